"""A request whose tokens an ended answer still holds waits for them, and is not refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed: `make test-vllm` has it")

from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from adapmixed.mechanisms import ClippedLogPool, Origin  # noqa: E402
from adapmixed.privacy import Accountant  # noqa: E402
from adapmixed.vllm.scheduler import ChargingScheduler  # noqa: E402
from adapmixed.vllm.till import Till  # noqa: E402

ORIGIN = Origin("ab" * 32, ())


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a scheduler of a plan of 10 tokens, over a stand-in for vLLM's own."""

    def add(self: Any, request: Any) -> None:
        self.requests[request.request_id] = request

    def finish(self: Any, names: Any, *_: Any) -> None:
        for name in list(self.requests) if names is None else names:
            if self.requests.pop(name, None) is not None:
                self._till.close(name)

    monkeypatch.setattr(Scheduler, "add_request", add)
    monkeypatch.setattr(Scheduler, "finish_requests", finish)
    monkeypatch.setattr(Scheduler, "get_num_unfinished_requests", lambda self: len(self.requests))
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self: SimpleNamespace(num_scheduled_tokens={})
    )
    monkeypatch.setattr("adapmixed.vllm.scheduler.check_parameters", lambda params: None)
    found = object.__new__(ChargingScheduler)
    mechanism = ClippedLogPool(-0.5, 0.5, queries=10)
    found._till = Till(Accountant(1e-5), mechanism, 3, ORIGIN, 4)
    found._origin, found._mark, found.requests = ORIGIN, None, {}
    found._refused, found._late = [], []
    return found


def request(name: str, tokens: int, salt: str | None = None) -> Any:
    return SimpleNamespace(
        request_id=name, max_tokens=tokens, resumable=False, pooling_params=None,
        sampling_params=SimpleNamespace(), cache_salt=salt,
    )  # fmt: skip


def test_a_late_request_gets_the_tokens_of_an_ended_one(scheduler: Any) -> None:
    scheduler.add_request(request("a", 8))
    scheduler.add_request(request("b", 5))
    scheduler.schedule()
    assert set(scheduler.requests) == {"a"} and scheduler.get_num_unfinished_requests() == 2
    scheduler.finish_requests("a", None)
    scheduler.schedule()
    assert set(scheduler.requests) == {"b"} and scheduler._refused == scheduler._late == []


def test_a_late_request_ends_with_its_client(scheduler: Any) -> None:
    scheduler.add_request(request("a", 8))
    scheduler.add_request(request("b", 5))
    scheduler.finish_requests(["b"], None)
    assert scheduler._late == [] and scheduler.get_num_unfinished_requests() == 1
    scheduler.add_request(request("c", 5))
    scheduler.finish_requests(None, None)  # the engine stops: the client must be told
    assert [one.request_id for one in scheduler._refused] == ["c"] and scheduler._late == []


def test_a_spent_plan_keeps_nobody_waiting(scheduler: Any) -> None:
    scheduler.add_request(request("a", 8))
    scheduler.add_request(request("b", 11))
    assert [one.request_id for one in scheduler._refused] == ["b"]
    scheduler._till.pay(["a"])
    scheduler.add_request(request("c", 10))
    assert [one.request_id for one in scheduler._refused] == ["b", "c"]


def test_a_request_must_come_through_the_gate(scheduler: Any) -> None:
    scheduler._mark = b"secret"
    for salt in (None, "", "secre", "xsecret", "\ud800"):
        scheduler.add_request(request("a", 1, salt))
        assert [one.request_id for one in scheduler._refused] == ["a"]
        scheduler._refused.clear()
    scheduler.add_request(request("a", 1, "secret0123"))
    assert set(scheduler.requests) == {"a"} and scheduler._refused == []
