"""A plan that pays for an answer does not refuse it, and an error gives back what it reserved."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import until
from serving_cases import ASK, COMPLETIONS, a_client, asks, listening, opened, served, used
from stub_engine import ByteTokenizer, StubEngine

from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom
from adapmixed.serving import scheduler
from adapmixed.serving.admission import Admission, Reservation
from adapmixed.serving.engine import Prompt
from adapmixed.serving.errors import RequestError


def test_tokens_are_reserved_until_they_are_charged_or_given_back() -> None:
    """While two prompts of a list are answered, others get what is left, and no more."""
    engine, body = StubEngine(queries=1000), ASK | {"prompt": ["a", "b"], "stream": True}
    engine.go.clear()
    with served(engine, max_tokens=1001) as server, listening(server.app) as port:
        admission, client = server.admission, server.client()

        def asked(tokens: int) -> tuple[int, str]:
            answer = client.post(COMPLETIONS, json=ASK | {"max_tokens": tokens})
            return answer.status_code, answer.json()["error"]["code"]

        with opened(port, body | {"max_tokens": 400}):
            until(lambda: server.scheduler.running == 2)
            assert (admission.reserved, admission.left) == (800, 200)
            assert asked(201) == (503, "reserved") and asked(1001) == (429, "insufficient_quota")
            admission.reserve(200).close()
            engine.go.set()
            until(lambda: engine.released >= 10)
            engine.go.clear()
            until(lambda: admission.reserved == 800 - engine.released)
            assert admission.left == 200
            with pytest.raises(RequestError, match="reserved too many"):
                admission.reserve(201)
        engine.go.set()
        assert server.settled() and not engine._running
        assert admission.left == admission.unspent == 1000 - engine.accountant.queries > 200


class Slow(StubEngine):
    """A charge is written while the models compute, and sequences leave a cache by a copy."""

    def step(self) -> list[tuple[Prompt, int]]:
        released = super().step()
        time.sleep(0.02)
        return released

    def leave(self, ended: Collection[Prompt]) -> None:
        time.sleep(0.02)
        super().leave(ended)


def test_answers_that_the_plan_pays_for() -> None:
    """Two at once, and others after each other: what an answer leaves is free once it has ended."""
    asked = ASK | {"max_tokens": 50}
    for engine, at_once, count in (
        (Slow(queries=100), 2, 2),
        (Slow("ab", queries=100, ends=True), 1, 5),
    ):
        with served(engine) as server, listening(server.app) as port:
            with ThreadPoolExecutor(at_once) as pool:
                found = pool.map(lambda _, port=port: asks(port, asked)[0], range(count))
                assert list(found) == [200] * count


class Strict(ByteTokenizer):
    """A tokenizer in Python that has no text for an id of the padded vocabulary."""

    def decode(self, ids: Any, **options: object) -> str:
        if 70 in ids:
            raise IndexError("piece id is out of range")
        return super().decode(ids, **options)


def test_a_prompt_that_cannot_be_decoded_reserves_nothing(tmp_path: Path) -> None:
    clients, alice, headers = a_client(tmp_path, tokens=100)
    with served(StubEngine(queries=100), tokenizer=Strict(), clients=clients) as server:
        asked = ASK | {"prompt": [97, 70], "max_tokens": 40}
        answer = server.client(headers=headers).post(COMPLETIONS, json=asked)
        assert answer.status_code == 500
        assert server.settled(1.0), server.admission.reserved
        assert used(clients, alice) == 0


def test_a_key_loses_nothing_if_the_server_stops_before_its_answer(tmp_path: Path) -> None:
    clients, alice, headers = a_client(tmp_path, tokens=100)
    with served(StubEngine(queries=100), clients=clients) as server:
        admit = clients.admit

        def stopped(*counted: Any) -> None:
            server.scheduler.stop(0)
            admit(*counted)

        clients.admit = stopped  # type: ignore[method-assign]
        answer = server.client(headers=headers).post(COMPLETIONS, json=ASK)
        assert answer.status_code == 503
        until(lambda: used(clients, alice) == server.admission.reserved == 0)


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


def test_a_key_pays_for_the_token_that_was_under_way(tmp_path: Path) -> None:
    """A client leaves while a step runs: its token is charged, so the key has used it, too."""
    clients, alice, headers = a_client(tmp_path, tokens=250)
    engine, body = StubEngine(seconds=0.005), ASK | {"max_tokens": 250, "stream": True}
    with served(engine, clients=clients) as server, listening(server.app) as port:
        with opened(port, body, **headers):
            until(lambda: engine.released >= 5)
            engine.go.clear()  # the next step waits
            time.sleep(0.05)
        until(lambda: all(run.answer.cancelled for run in server.scheduler._running.values()))
        engine.go.set()
        until(lambda: used(clients, alice) == engine.released)
        assert server.settled() and engine.released < 250


def test_two_requests_cannot_take_the_last_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place is checked before the key is counted, which takes a while; it must still be there."""
    clients, alice, headers = a_client(tmp_path, tokens=10_000)
    admit = clients.admit
    monkeypatch.setattr(clients, "admit", lambda *one: (time.sleep(0.05), admit(*one))[1])
    engine = StubEngine(batch=1)
    engine.go.clear()
    monkeypatch.setattr(scheduler, "MOST_WAITING", 1)
    with served(engine, clients=clients) as server, ThreadPoolExecutor(6) as pool:
        with listening(server.app) as port:
            asked = [pool.submit(asks, port, ASK, **headers)]
            until(lambda: server.scheduler.running)
            asked += [pool.submit(asks, port, ASK, **headers) for _ in range(5)]
            until(lambda: sum(one.done() for one in asked) == 4)
            engine.go.set()
            found = sorted(one.result()[0] for one in asked)
    assert found == [200, 200, 503, 503, 503, 503]


@pytest.mark.parametrize("then_public", [False, True])
def test_what_a_spent_plan_answers(then_public: bool, tmp_path: Path) -> None:
    """The public model costs neither plan nor key, and says so in the body, also of a stream."""
    clients, alice, headers = a_client(tmp_path, tokens=10)
    engine, told = StubEngine(queries=10), []
    with served(engine, clients=clients, then_public=then_public) as server:
        client = server.client(headers=headers)
        for tokens, stream in ((6, False), (6, False), (6, True), (4, False), (6, False)):
            asked = ASK | {"max_tokens": tokens, "stream": stream}
            answer = client.post(COMPLETIONS, json=asked)
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
    assert used(clients, alice) == engine.accountant.planned == 10
    clients.close()
