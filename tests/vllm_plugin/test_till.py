"""What is reserved and charged of a plan: never less than is drawn, never more than the plan."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from adapmixed.mechanisms import ClippedLogPool, Origin
from adapmixed.privacy import Accountant, BudgetSpentError
from adapmixed.serving.query import ReservedError
from adapmixed.vllm.reserved import Reserved, charged_so_far
from adapmixed.vllm.till import Till

ORIGIN = Origin("ab" * 32, ())


def till_of(queries: int, block: int = 4) -> tuple[Till, Accountant]:
    accountant = Accountant(1e-5)
    mechanism = ClippedLogPool(-0.5, 0.5, queries=queries)
    return Till(accountant, mechanism, 3, ORIGIN, block), accountant


def test_blocks_are_charged_ahead_and_reused() -> None:
    till, accountant = till_of(100)
    till.reserve("a", 10)
    till.reserve("b", 3)
    assert till.pay(["a", "b"]) == 4 + 3 and accountant.queries == 7
    assert [till.pay(["a", "b"]) for _ in range(2)] == [0, 0] and till.spare == 1
    till.close("b")
    assert till.pay(["a"]) == 0  # what b has left over
    assert till.pay(["a"]) == 4 and accountant.queries == 11


def test_a_request_draws_no_more_than_it_reserved() -> None:
    till, accountant = till_of(100)
    till.reserve("a", 1)
    till.pay(["a"])
    for name in ("a", "unknown"):
        with pytest.raises(ValueError, match="no more tokens than it has reserved"):
            till.pay([name])
    with pytest.raises(ValueError, match="must be new"):
        till.reserve("a", 1)
    assert accountant.queries == 1


def test_a_plan_is_reserved_once() -> None:
    till, _ = till_of(10)
    till.reserve("a", 6)
    with pytest.raises(BudgetSpentError, match="at most the 10 tokens"):
        till.reserve("b", 11)
    with pytest.raises(ReservedError, match="reserved 6 tokens"):
        till.reserve("b", 5)
    till.reserve("b", 4)
    till.close("a")
    till.close("a")
    till.reserve("c", 6)


def test_random_requests_never_leave_the_plan() -> None:
    draw = random.Random(1)
    for queries in (30, 200):
        till, accountant = till_of(queries, block=draw.choice([1, 4, 16]))
        left: dict[str, int] = {}
        drawn = 0
        for number in range(400):
            tokens = draw.randint(1, 12)
            before = till.free
            try:
                till.reserve(str(number), tokens)
                left[str(number)] = tokens
            except (BudgetSpentError, ReservedError):
                assert tokens > before
            running = [name for name in left if draw.random() < 0.8]
            if running:
                till.pay(running)
            drawn += len(running)
            for name in running:
                left[name] -= 1
            for name in [name for name in left if not left[name] or draw.random() < 0.1]:
                till.close(name)
                del left[name]
            assert drawn + till.spare == accountant.queries <= queries
        assert drawn > queries - 12 or left


def test_reservations_read_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    mechanism = ClippedLogPool(-0.5, 0.5, queries=100)
    with Accountant(1e-5, path=path) as accountant:
        accountant.charge_ahead(mechanism, 3, 30, ORIGIN)
        assert charged_so_far(str(path)) == 30
        reserved = Reserved(100, lambda: charged_so_far(str(path)))
        end = reserved.reserve(60)
        with pytest.raises(ReservedError, match="reserved 60 tokens"):
            reserved.reserve(11)
        with pytest.raises(BudgetSpentError, match="<= 70, got 71"):
            reserved.reserve(71)
        accountant.charge_ahead(mechanism, 3, 20, ORIGIN)
        end()
        end()
        assert reserved.unspent == 70  # not read again yet
        other = reserved.reserve(50)
        with pytest.raises(ReservedError):
            reserved.reserve(1)
        with pytest.raises(BudgetSpentError, match="<= 50, got 51"):
            reserved.reserve(51)
        other()
    assert Reserved(100, lambda: charged_so_far(str(path))).unspent == 50


def test_threads_never_reserve_more_than_the_plan() -> None:
    reserved = Reserved(100, lambda: 0)
    taken: list[int] = []

    def take() -> None:
        for _ in range(30):
            try:
                reserved.reserve(3)
                taken.append(3)
            except ReservedError:
                pass

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 99
