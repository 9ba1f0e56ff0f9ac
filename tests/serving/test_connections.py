"""Connections to a real server: clients that leave or say nothing, TLS, and a graceful stop."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import until
from serving_cases import (
    ASK,
    CHAT,
    CHATS,
    COMPLETIONS,
    a_client,
    asks,
    check_error,
    listening,
    opened,
    served,
    stoppable,
    used,
)
from stub_engine import StubEngine

from adapmixed.serving import app
from adapmixed.serving.fields import REFUSED, SERVED

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves(stream: bool, reset: bool, tmp_path: Path) -> None:
    """While a step runs: its token is charged, so the key has used it, too, and no more."""
    (clients, alice, headers), engine = a_client(tmp_path, tokens=250), StubEngine(seconds=0.01)
    with served(engine, clients=clients) as server, listening(server.app) as port:
        connection = opened(port, ASK | {"stream": stream, "max_tokens": 250}, **headers)
        until(lambda: engine.released >= 5)
        engine.go.clear()  # the next step waits
        time.sleep(0.05)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()
        until(lambda: all(reply.cancelled for reply in server.scheduler._running.values()))
        engine.go.set()
        assert server.settled(1.0)
        until(lambda: used(clients, alice) == engine.released)
        assert engine.accountant.queries == engine.released < 60
        assert asks(port, ASK, **headers)[0] == 200


def test_a_client_that_leaves_the_queue() -> None:
    engine, connections = StubEngine(), []
    engine.go.clear()
    with served(engine) as server, listening(server.app) as port:
        for count in (1, 2, 3):
            connections.append(opened(port, ASK | {"stream": True}))
            until(lambda n=count: server.scheduler.running == 1 == n - server.scheduler.waiting)
        connections[2].close()
        until(lambda: any(reply.cancelled for reply in server.scheduler._waiting.values()))
        engine.go.set()
        for connection in connections[:2]:
            with connection, connection.makefile("rb") as file:
                assert any(line == b"data: [DONE]\n" for line in file)
        assert server.settled() and engine.released == 16


def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer ends, and others do not wait for it."""
    monkeypatch.setattr(app, "CLIENT_SECONDS", 0.3)
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
    monkeypatch.setattr(app, "CLIENT_SECONDS", 0.2)
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
    monkeypatch.setattr(app, "LAST_SECONDS", 1)
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
            answers = list(pool.map(lambda _: asks(port, ASK | {"max_tokens": 20}), range(60)))
        assert [status for status, _ in answers] == [200] * 60
        bodies = [json.loads(body) for _, body in answers]
        assert len({body["choices"][0]["text"] for body in bodies}) == 1
        assert len({body["id"] for body in bodies}) == 60
        assert server.settled() and server.engine.accountant.queries == 60 * 20


# A client that sends anything: no 500, no error in another form, and nothing hangs or leaks.


SEED = 23
WARM = 500  # requests before the first look at open files
FIELDS = sorted(SERVED[True] | SERVED[False] | set(REFUSED))
LITERALS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 1.5, 0.7, 10**20, -(10**400), 1e308, "", "x", "demo", "é🙂",
    "\ud800", "\x00", "<|end|>", "a" * 3000, [], {}, [1], [[1, 2], [3]], ["a", "b"], [None], [[]],
    {"include_usage": True}, {"type": "text"}, [{"role": "user", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [256], [300], "stop",
]  # fmt: skip
PATHS = [COMPLETIONS, CHATS]
OTHER_PATHS = [
    "/", "/v1", "/v1/models", "/health", "/v1/%ff", "/a?b=c", "/x" * 999
]  # fmt: skip
METHODS = ["POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "X"]


def body_of(rng: random.Random, chat: bool) -> bytes:
    fields = dict(CHAT if chat else ASK)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        fields[rng.choice(FIELDS)] = rng.choice(LITERALS)
    if rng.random() < 0.1:
        fields.pop(rng.choice(list(fields)))
    if rng.random() < 0.3:
        fields["stream"] = True
    text = json.dumps(fields).encode()
    kind = rng.random()
    if kind < 0.1:  # a changed byte
        at = rng.randrange(len(text))
        text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    elif kind < 0.15:
        text = text[: rng.randrange(len(text))]
    elif kind < 0.18:
        text = rng.randbytes(rng.randrange(200))
    elif kind < 0.2:
        long = b"x" * rng.choice([10**4, 10**6, 2 * 10**6])
        text = b'{"model": "demo", "prompt": "' + long + b'"}'
    elif kind < 0.22:
        text = b"[" * rng.randrange(20000) + text
    return text


def request_of(rng: random.Random) -> tuple[str, bytes]:
    """Return a method and a whole request."""
    chat = rng.random() < 0.5
    path, method = PATHS[chat], "POST"
    if rng.random() < 0.1:
        path = rng.choice([*OTHER_PATHS, *PATHS])
        method = rng.choice(METHODS)
    body = body_of(rng, chat)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if rng.random() < 0.2:
        cut = rng.randrange(1, max(2, len(body)))
        parts = [part for part in (body[:cut], body[cut:]) if part]
        sent = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        return method, (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + sent
    return method, (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body


def read(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:  # it refused a body that was still being sent
        pass
    return b"".join(parts)


def check_answer(method: str, answer: bytes) -> int:
    """Assert that an answer has the form of its kind, and return its status."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status < 500, answer
    if b"text/event-stream" in head:
        data = b"".join(body.split(b"\r\n")[1::2])  # without the lengths of chunks
        for event in data.split(b"\n\n")[:-1]:
            assert event.startswith(b"data: ")
        assert data.endswith(b"data: [DONE]\n\n") and status == 200
    elif method != "HEAD":
        found = json.loads(body)
        if status >= 400:
            check_error(found, status)
    return status


@pytest.mark.slow
def test_a_thousand_requests() -> None:
    rng, engine = random.Random(SEED), StubEngine(queries=10**6)
    statuses, files = Counter[int](), list[int]()

    def look() -> None:
        assert server.settled()
        if os.path.isdir("/proc/self/fd"):
            files.append(len(os.listdir("/proc/self/fd")))

    with served(engine) as server, listening(server.app) as port:
        for number in range(1000):
            if number == WARM:
                look()
            method, sent = request_of(rng)
            with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
                try:
                    connection.sendall(sent)
                except (BrokenPipeError, ConnectionResetError):
                    continue  # 413 came first
                if rng.random() < 0.1:
                    time.sleep(rng.random() * 0.005)
                    continue  # the client leaves
                if answer := read(connection):
                    statuses[check_answer(method, answer)] += 1
        look()
        assert engine.accountant.queries == engine.released
        assert server.admission.left == 10**6 - engine.released
    assert statuses[200] > 200 and statuses[400] > 200
    assert statuses[404] and statuses[405] and statuses[413] and files[:1] == files[1:]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    making = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*making.split(), *names, *files], check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=certificate)
    with served() as server, listening(server.app, tls=(certificate, key)) as port:
        url = f"https://127.0.0.1:{port}/v1/models"
        with urllib.request.urlopen(url, context=trusting) as answer:
            assert json.load(answer)["data"][0]["id"] == "demo"


@pytest.mark.parametrize("twice", [False, True])
def test_a_graceful_stop(twice: bool) -> None:
    """Answers that run or wait end, or are cut by the second signal; new queries get 503."""
    with served(StubEngine(seconds=0.01, batch=1), max_tokens=1000) as server:
        with stoppable(server.app) as (listener, thread, port), ThreadPoolExecutor() as pool:
            body = ASK | {"stream": True, "max_tokens": 1000 if twice else 30}
            client = pool.submit(asks, port, body | {"prompt": ["a", "b"]})
            until(lambda: server.engine.released >= 5)
            listener.handle_exit(signal.SIGTERM, None)
            until(lambda: server.scheduler.stopped)
            status, text = asks(port, ASK)
            assert check_error(json.loads(text), status)["code"] == "stopping" and status == 503
            if twice:
                listener.handle_exit(signal.SIGTERM, None)
            last = client.result()[1].split("\n\n")[-2]
            thread.join(5.0)
            assert not thread.is_alive()
        if twice:
            check_error(json.loads(last.removeprefix("data: ")), 503)
        else:
            assert last == "data: [DONE]" and server.engine.released == 60
        assert server.admission.reserved == 0


def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a header keeps no connection, neither as the first request nor as a later one."""
    monkeypatch.setattr(app, "CLIENT_SECONDS", 0.5)
    half, whole = b"POST /v1/compl", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served() as server, stoppable(server.app) as (_, _, port), ExitStack() as stack:
        opened = []
        for before in (b"", whole):
            connection = socket.create_connection(("127.0.0.1", port), timeout=10.0)
            opened.append((before, stack.enter_context(connection)))
            connection.sendall(before + half)
        for before, connection in opened:
            answer = connection.makefile("rb").read()  # until it is closed
            assert (b"200 OK" in answer) == bool(before)
