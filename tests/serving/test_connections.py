"""Connections over a real server: clients that leave, do not read, send slowly or say nothing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import until
from serving_cases import ASK, Served, asks, check_error, listening, opened, served
from stub_engine import StubEngine

from adapmixed.serving import app, listener

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def slow() -> Iterator[tuple[Served, int]]:
    """A server that takes 10 ms for a token."""
    with served(StubEngine(seconds=0.01)) as server, listening(server.app) as port:
        yield server, port


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves(slow: tuple[Served, int], stream: bool, reset: bool) -> None:
    server, port = slow
    connection = opened(port, ASK | {"stream": stream, "max_tokens": 250})
    until(lambda: server.engine.released)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
    assert server.settled(1.0)
    assert server.engine.released < 60
    assert server.engine.accountant.queries == server.engine.released
    assert asks(port, ASK)[0] == 200


def test_a_client_that_leaves_the_queue(slow: tuple[Served, int]) -> None:
    server, port = slow
    server.engine.go.clear()
    connections = []
    for count in (1, 2, 3):
        connections.append(opened(port, ASK | {"stream": True}))
        until(lambda n=count: server.scheduler.running + server.scheduler.waiting == n)
    connections[2].close()
    until(lambda: any(run.answer.cancelled for run in server.scheduler._waiting))
    server.engine.go.set()
    for connection in connections[:2]:
        with connection.makefile("rb") as file:
            assert any(line == b"data: [DONE]\n" for line in file)
        connection.close()
    assert server.settled() and server.engine.released == 16


def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer ends, and others do not wait for it."""
    monkeypatch.setattr(listener, "SEND_SECONDS", 0.3)
    engine, small = StubEngine(window=10**6, queries=10**6), {"send_buffer": 4096}
    with served(engine, max_tokens=10**5) as server, listening(server.app, **small) as port:
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", port))
        body = json.dumps(ASK | {"stream": True, "max_tokens": 10**5}).encode()
        stuck.sendall(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        time.sleep(0.1)
        assert asks(port, ASK)[0] == 200
        assert server.settled(10.0)
        assert engine.released < 10**5 and server.admission.reserved == 0
        stuck.close()


def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    with served() as server, listening(server.app) as port:
        for reads in (True, False):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
                if reads:
                    answer = connection.makefile("rb").read()
                    assert answer.startswith(b"HTTP/1.1 408 ")
                    check_error(json.loads(answer.split(b"\r\n\r\n")[1]), 408)
        assert asks(port, ASK)[0] == 200


MALFORMED = (
    b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    HEAD + b"Content-Length: x\r\n\r\n", HEAD + b"Accept: " + b"x" * 70_000,  # without its end
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
)  # fmt: skip


def test_malformed_http(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(listener, "LAST_SECONDS", 1)
    with served() as server, listening(server.app) as port:
        for sent in MALFORMED:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(sent)
                with connection.makefile("rb") as file:
                    head, _, body = file.read().partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head, sent[:80]
            assert "valid HTTP/1.1" in check_error(json.loads(body), 400)["message"]
        with opened(port, ASK | {"stream": True, "max_tokens": 200}) as connection:
            until(lambda: server.engine.released)
            connection.sendall(b"nonsense\r\n\r\n")  # it is read after the answer
            with connection.makefile("rb") as file:
                answer = file.read()
        assert b"data: [DONE]" in answer and answer.count(b"HTTP/1.1 400 ") == 1
        assert server.settled() and "Traceback" not in caplog.text


def test_many_clients_at_once() -> None:
    """Each gets the whole text, and all tokens are charged once."""
    with served(StubEngine(batch=8)) as server, listening(server.app) as port:
        with ThreadPoolExecutor(20) as pool:
            found = list(pool.map(lambda _: asks(port, ASK | {"max_tokens": 20}), range(60)))
        assert [status for status, _ in found] == [200] * 60
        bodies = [json.loads(body) for _, body in found]
        assert len({body["choices"][0]["text"] for body in bodies}) == 1
        assert len({body["id"] for body in bodies}) == 60
        assert server.settled() and server.engine.accountant.queries == 60 * 20
