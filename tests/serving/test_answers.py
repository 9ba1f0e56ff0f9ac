"""Requests under way: places in the queue, and what answers reserve until they end or fail."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from processes import until
from serving_cases import ASK, COMPLETIONS, a_client, asks, listening, served, used
from stub_engine import ByteTokenizer, StubEngine

from adapmixed.serving import answers
from adapmixed.serving.engine import Prompt


class Slow(StubEngine):
    """A charge is written while the models compute, and sequences leave a cache by a copy."""

    def step(self) -> list[tuple[Prompt, int]]:
        released = super().step()
        time.sleep(0.02)
        return released

    def leave(self, ended: Collection[Prompt]) -> None:
        time.sleep(0.02)
        super().leave(ended)


@pytest.mark.parametrize(
    ("answers", "at_once", "count"), [({}, 2, 2), ({"text": "ab", "ends": True}, 1, 5)]
)
def test_answers_that_the_plan_pays_for(answers: Any, at_once: int, count: int) -> None:
    """Two at once, and others after each other: what an answer leaves is free once it has ended."""
    engine = Slow(queries=40, **answers)
    with served(engine) as server, listening(server.app) as port:

        def status(number: int) -> int:
            until(lambda: engine.released >= number)  # tokens are charged and not yet freed
            return asks(port, ASK | {"max_tokens": 20})[0]

        with ThreadPoolExecutor(at_once) as pool:
            assert list(pool.map(status, range(count))) == [200] * count


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


def test_a_fault_after_the_last_token_frees_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has ended and is still in the batch when the engine's thread ends."""
    clients, alice, headers = a_client(tmp_path, tokens=100)
    with served(StubEngine("ab", queries=100, ends=True), clients=clients) as server:
        third = Mock(side_effect=[None, None, RuntimeError])
        monkeypatch.setattr(server.metrics.released, "inc", third)
        answer = server.client(headers=headers).post(COMPLETIONS, json=ASK)
        assert answer.status_code == 503 and answer.headers["x-should-retry"] == "false"
        assert server.settled() and server.scheduler.failed
        assert used(clients, alice) == 3 and server.admission.left == 97


def test_a_key_loses_nothing_if_the_server_stops_before_its_answer(tmp_path: Path) -> None:
    clients, alice, headers = a_client(tmp_path, tokens=100)
    with served(StubEngine(queries=100), clients=clients) as server:
        admit = clients.admit

        def stopped(*counted: Any) -> None:
            server.scheduler.stop()
            admit(*counted)

        clients.admit = stopped  # type: ignore[method-assign]
        assert server.client(headers=headers).post(COMPLETIONS, json=ASK).status_code == 503
        until(lambda: used(clients, alice) == server.admission.reserved == 0)


def test_two_requests_cannot_take_the_last_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place is checked before the key is counted, which takes a while; it must still be there."""
    clients, alice, headers = a_client(tmp_path, tokens=10_000)
    admit = clients.admit
    monkeypatch.setattr(clients, "admit", lambda *counted: (time.sleep(0.05), admit(*counted))[1])
    engine = StubEngine(batch=1)
    engine.go.clear()
    monkeypatch.setattr(answers, "MOST_WAITING", 1)
    with served(engine, clients=clients) as server, ThreadPoolExecutor(6) as pool:
        with listening(server.app) as port:
            asked = [pool.submit(asks, port, ASK, **headers)]
            until(lambda: server.scheduler.running)
            asked += [pool.submit(asks, port, ASK, **headers) for _ in range(5)]
            until(lambda: sum(future.done() for future in asked) == 4)
            engine.go.set()
            statuses = sorted(future.result()[0] for future in asked)
    assert statuses == [200, 200, 503, 503, 503, 503]
