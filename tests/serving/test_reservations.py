"""A plan that pays for an answer does not refuse it, and an error gives back what it reserved."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_cases import ASK, listening, new_usage, served
from stub_engine import ByteTokenizer, StubEngine

from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom
from adapmixed.serving.admission import Admission, Reservation
from adapmixed.serving.clients import Clients
from adapmixed.serving.engine import Prompt
from adapmixed.serving.keys import add_key, read_keys


class Slow(StubEngine):
    """A charge is written while the models compute, and sequences leave a cache by a copy."""

    def step(self) -> list[tuple[Prompt, int]]:
        released = super().step()
        time.sleep(0.02)
        return released

    def leave(self, ended: Collection[Prompt]) -> None:
        time.sleep(0.02)
        super().leave(ended)


def test_a_second_answer_that_the_plan_pays_for() -> None:
    with served(Slow(queries=100)) as server:
        body = ASK | {"max_tokens": 50}
        first = threading.Thread(
            target=server.client().post, args=("/v1/completions",), kwargs={"json": body}
        )
        first.start()
        time.sleep(0.2)
        answer = server.client().post("/v1/completions", json=body)
        first.join()
    assert answer.status_code == 200, answer.text


def test_one_answer_after_the_other() -> None:
    with served(Slow("ab", queries=100, ends=True)) as server:
        client = server.client()
        body = ASK | {"max_tokens": 60}
        assert [client.post("/v1/completions", json=body).status_code for _ in range(5)] == [
            200
        ] * 5


class Strict(ByteTokenizer):
    """A tokenizer in Python that has no text for an id of the padded vocabulary."""

    def decode(self, ids: Any, **options: object) -> str:
        if 70 in ids:
            raise IndexError("piece id is out of range")
        return super().decode(ids, **options)


def test_a_prompt_that_cannot_be_decoded_reserves_nothing(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice", tokens=100)
    usage = new_usage(tmp_path / "usage")
    clients = Clients(read_keys(tmp_path / "keys.json"), usage)
    with served(StubEngine(queries=100), tokenizer=Strict(), clients=clients) as server:
        asking = server.client(headers={"Authorization": f"Bearer {secret}"})
        asked = ASK | {"prompt": [97, 70], "max_tokens": 40}
        assert asking.post("/v1/completions", json=asked).status_code == 500
        assert server.settled(1.0), server.admission.reserved
        assert usage.used("alice") == 0


def test_a_key_loses_nothing_if_the_server_stops_before_its_answer(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "alice", tokens=100)
    usage = new_usage(tmp_path / "usage")
    clients = Clients(read_keys(tmp_path / "keys.json"), usage)
    with served(StubEngine(queries=100), clients=clients) as server:
        admit = usage.admit

        def stopped(*counted: Any) -> bool:
            server.scheduler.stop(0)
            return admit(*counted)

        usage.admit = stopped  # type: ignore[method-assign]
        asking = server.client(headers={"Authorization": f"Bearer {secret}"})
        assert asking.post("/v1/completions", json=ASK).status_code == 503
    deadline = time.monotonic() + 10
    while usage.used("alice") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert usage.used("alice") == 0


def test_free_answers_are_not_spent_while_others_run() -> None:
    """Of 23 answers beside one that goes on, none finds its plan spent: all are public."""
    mechanism = ClippedLogPool(-0.5, 0.5, queries=100, public_confidence=0.5)
    accountant, public = Accountant(1e-5), torch.tensor([[5.0, 0.0, 0.0, 0.0]])
    accountant.bind(mechanism, 3)
    admission = Admission(accountant, mechanism)

    def token(reservation: Reservation) -> None:
        ticket = mechanism.propose(public.repeat(3, 1, 1), public, rng=SecureRandom())
        accountant.charge(ticket)
        ticket.release()
        reservation.charged()

    goes_on = admission.reserve(40)
    for _ in range(23):
        token(goes_on)
        short = admission.reserve(10)
        for _ in range(10):
            token(short)
        short.close()
    assert accountant.planned == 0 and admission.reserve(0) and admission.left == 100 - 17


@pytest.mark.parametrize("error", [SystemExit, type("PanicException", (BaseException,), {})])
def test_any_end_of_the_engine_thread_ends_the_server(error: type[BaseException]) -> None:
    class Dead(StubEngine):
        def step(self) -> list[tuple[Prompt, int]]:
            raise error

    with served(Dead()) as server:
        server.client().post("/v1/completions", json=ASK)
        assert server.scheduler.failed


def test_a_key_pays_for_the_token_that_was_under_way(tmp_path: Path) -> None:
    """A client leaves while a step runs: its token is charged, so the key has used it, too."""
    file = tmp_path / "keys.json"
    secret = add_key(file, "alice", tokens=250)
    usage = new_usage(tmp_path / "usage")
    engine = StubEngine(seconds=0.005)
    with served(engine, clients=Clients(read_keys(file), usage)) as server:
        with listening(server.app) as port:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                body = json.dumps(ASK | {"max_tokens": 250, "stream": True}).encode()
                connection.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b"
                    b"\r\nContent-Length: %d\r\n\r\n%b" % (secret.encode(), len(body), body)
                )
                while engine.released < 5:
                    time.sleep(0.001)
                engine.go.clear()  # the next step waits
                time.sleep(0.05)
            deadline = time.monotonic() + 10
            while usage.used("alice") == 250 and time.monotonic() < deadline:
                time.sleep(0.001)
            engine.go.set()
            assert server.settled()
        assert engine.released <= usage.used("alice") < 250


def test_two_requests_cannot_take_the_last_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place is checked before the key is counted, which takes a while; it must still be there."""
    file = tmp_path / "keys.json"
    headers = {"Authorization": f"Bearer {add_key(file, 'alice', tokens=10_000)}"}
    usage = new_usage(tmp_path / "usage")
    admit = usage.admit
    monkeypatch.setattr(usage, "admit", lambda *one: (time.sleep(0.05), admit(*one))[1])
    engine = StubEngine(batch=1)
    engine.go.clear()
    with served(engine, clients=Clients(read_keys(file), usage), waiting=1) as server:
        with listening(server.app) as port:
            url = f"http://localhost:{port}/v1/completions"
            found: list[int] = []

            def ask() -> None:
                request = urllib.request.Request(url, json.dumps(ASK).encode(), headers)
                try:
                    found.append(urllib.request.urlopen(request, timeout=20).status)
                except urllib.error.HTTPError as error:
                    found.append(error.code)

            clients = [threading.Thread(target=ask) for _ in range(6)]
            clients[0].start()
            while not server.scheduler.running:
                time.sleep(0.001)
            for client in clients[1:]:
                client.start()
            deadline = time.monotonic() + 5
            while len(found) < 4 and time.monotonic() < deadline:
                time.sleep(0.001)
            engine.go.set()
            for client in clients:
                client.join()
    assert sorted(found) == [200, 200, 503, 503, 503, 503]


@pytest.mark.parametrize("then_public", [False, True])
def test_what_a_spent_plan_answers(then_public: bool, tmp_path: Path) -> None:
    """The public model costs neither plan nor key, and says so in the body, also of a stream."""
    keys = tmp_path / "keys.json"
    headers = {"authorization": f"Bearer {add_key(keys, 'alice', tokens=10)}"}
    usage, engine, told = new_usage(tmp_path / "usage"), StubEngine(queries=10), []
    with served(engine, clients=Clients(read_keys(keys), usage), then_public=then_public) as server:
        client = server.client(headers=headers)
        for tokens, stream in ((6, False), (6, False), (6, True), (4, False), (6, False)):
            asked = ASK | {"max_tokens": tokens, "stream": stream}
            answer = client.post("/v1/completions", json=asked)
            public = answer.text.count('"system_fingerprint":"public-model"')
            told.append((answer.status_code, public, answer.text.count('"length"')))
            assert server.settled()
            told.append(client.get("/health").json())
    health: list[Any] = [{"status": "ok"}] * 2
    if then_public:
        health = [{"answers": "ensemble", "plan_tokens_left": 4}]
        health += [{"answers": "public model", "plan_tokens_left": 0}]
        health = [{"status": "ok"} | one for one in health]
    assert told[1::2] == [health[0]] * 3 + [health[1]] * 2
    private, whole, stream = (200, 0, 1), (200, 1, 1), (200, 4, 1)  # 6 bytes, 4 letters
    refused = (429, 0, 0)
    spent = [whole, stream, private, whole] if then_public else [refused, refused, private, refused]
    assert told[::2] == [private, *spent]
    assert usage.used("alice") == engine.accountant.planned == 10
    usage.close()
