"""The per-model filter: budgets, adversarial trees enumerated to the last leaf, counts."""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from adapmixed.audit.trees import Adversary, largest_divergence, leaves
from adapmixed.privacy import Accountant, FilterBudget, PerModelFilter, c_alpha, zcdp_to_dp
from adapmixed.privacy.discrete_gaussian import discrete_gaussian
from adapmixed.rng import SecureRandom, SeededRandom

ORDER = 4.0


class Source:
    """Where noise comes from, as a filter sees it."""

    def __init__(self, seeded: bool) -> None:
        self.seeded = seeded
        self.bits = SeededRandom(0).bits


SEEDED, UNSEEDED = Source(True), Source(False)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("order", [None, 2.5, 12.0])
def test_a_budget_is_the_largest_for_its_epsilon(epsilon: float, order: float | None) -> None:
    if order is not None and epsilon <= c_alpha(order, 1e-5):
        with pytest.raises(ValueError, match="epsilon must be >"):
            FilterBudget.for_epsilon(epsilon, 1e-5, order=order)
        return
    budget = FilterBudget.for_epsilon(epsilon, 1e-5, order=order)
    assert budget.epsilon() <= epsilon
    larger = FilterBudget(budget.measure, budget.amount * (1 + 1e-6), 1e-5, order)
    assert larger.epsilon() > epsilon
    replaced = budget.epsilon("replace_one")
    if order is None:
        assert replaced == pytest.approx(zcdp_to_dp(4 * budget.amount, 1e-5)[0], rel=1e-12)
    else:
        # Through the emptied shard: (2 e, (1 + e^e) d) with the d that gives delta in all.
        share = 1e-5 / (1 + math.exp(replaced / 2))
        assert replaced == pytest.approx(2 * (budget.amount + c_alpha(order, share)), rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("amount", [0.02, 0.1, 0.5])
def test_the_history_stays_within_the_budget_on_every_adaptive_tree(
    seed: int, amount: float
) -> None:
    models, vocab, depth = [(1, 2, 7), (2, 3, 5), (3, 3, 5)][seed % 3]
    adversary = Adversary(seed, models, vocab, *[(0.6, 1.7), (0.85, 2.5), (0.4, 1.3)][seed % 3])
    here = leaves(adversary, depth, amount, None, ORDER)
    assert math.fsum(here.values()) == pytest.approx(1.0)
    assert largest_divergence(adversary, depth, amount, ORDER) <= amount


def test_without_the_filter_some_tree_exceeds_the_budget() -> None:
    """The test above could fail: with an endless budget for the same answers it does."""
    adversary = Adversary(1, 2, 3, 0.85, 2.5)
    assert largest_divergence(adversary, 5, 1e9, ORDER) > 0.1


def test_charging_is_in_order_and_silent() -> None:
    filter_ = PerModelFilter(2, FilterBudget("zcdp", 1.0, 1e-5))
    active = filter_.admit(np.array([[0.5, 0.75, 0.375], [0.0, 1.0, math.inf]]))
    assert active.tolist() == [[True, False, True], [True, True, False]]
    assert filter_.spent[0] == math.nextafter(0.875, 1.0) and filter_.spent[1] == 1.0


def test_sums_are_rounded_up() -> None:
    filter_ = PerModelFilter(1, FilterBudget("zcdp", 1.0, 1e-5))
    for _ in range(10):
        filter_.admit(np.array([[0.1]]))
    assert filter_.spent[0] > 0.9 and not filter_.admit(np.array([[0.1]])).any()


def test_the_noise_of_a_count_is_that_which_was_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def watched(sigma: float, bits: Any) -> int:
        drawn = discrete_gaussian(sigma, bits)
        asked.append((sigma, bits, drawn))
        return drawn

    monkeypatch.setattr("adapmixed.privacy.filter.discrete_gaussian", watched)
    source, sigma = SecureRandom(), 20.0
    budget = FilterBudget("zcdp", 1.0, 1e-5, releases=200, sigma=sigma)
    filter_ = PerModelFilter(3, budget)
    counts = [filter_.noisy_count(0.0, rng=source) for _ in range(200)]
    assert {one[:2] for one in asked} == {(sigma, source.bits)}
    assert counts == [noise for *_, noise in asked]
    assert all(type(one) is int for one in counts)
    # Six standard errors of the deviation of 200 variates.
    assert 0.7 * sigma < np.std(counts) < 1.3 * sigma


def test_noise_shifts_a_count_exactly() -> None:
    """Beside noise of 10^20 a double would lose the count."""
    budget = FilterBudget("zcdp", 1.0, 1e-5, releases=1, sigma=1e20)
    found = []
    for spent in (0.0, 0.5):
        filter_ = PerModelFilter(1, budget)
        filter_.admit(np.array([[spent]]))
        found.append(filter_.noisy_count(0.1, rng=SeededRandom(4)))
    assert abs(found[0]) > 2**53 and found[1] == found[0] + 1


def test_counts_are_paid_for_beforehand() -> None:
    budget = FilterBudget("renyi", 1.0, 1e-5, ORDER, releases=2, sigma=3.0)
    filter_ = PerModelFilter(3, budget)
    plain = replace(budget, releases=0, sigma=None)
    assert repr(plain) == f"FilterBudget(measure='renyi', amount=1.0, delta=1e-05, order={ORDER})"
    assert repr(budget) == repr(plain)[:-1] + ", releases=2, sigma=3.0)"
    assert budget.epsilon() == plain.epsilon() and plain.available == 1.0
    for_epsilon = FilterBudget.for_epsilon(2.0, 1e-5)
    counting = FilterBudget.for_epsilon(2.0, 1e-5, releases=2, sigma=30.0)
    assert counting == replace(for_epsilon, releases=2, sigma=30.0) != for_epsilon
    assert budget.reserved >= 2 * ORDER / 18.0 and budget.available == 1.0 - budget.reserved
    left = 1.0 - 2 * ORDER / (2 * 9.0)
    assert filter_.admit(np.array([[left + 1e-12], [left - 1e-9], [0.0]])).tolist() == [
        [False], [True], [True],
    ]  # fmt: skip
    for noise, expected in ((1, 2), (-1, 0)):
        with mock.patch.object(filter_, "_noise", return_value=noise):
            assert filter_.noisy_count(0.0, rng=UNSEEDED) == expected
    with pytest.raises(ValueError, match="none left"):
        filter_.noisy_count(0.0, rng=UNSEEDED)
    for changes, words in (
        ({"releases": 5}, "releases must leave"),
        ({"sigma": None}, "sigma must be given"),
        ({"releases": 0}, "sigma must be given"),
        ({"sigma": 0.0}, "sigma must be > 0"),
        ({"releases": -1}, "releases must be"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(budget, **changes)
    # What was paid for counts goes with what was spent; a ledger alone knows how many are left.
    resumed = PerModelFilter(3, budget, spent=filter_.spent)
    with pytest.raises(ValueError, match="must be attached to its ledger"):
        resumed.noisy_count(0.0, rng=UNSEEDED)
    with pytest.raises(ValueError, match="spent must be >= .* what the budget reserves"):
        PerModelFilter(3, budget, spent=np.full(3, budget.reserved * (1 - 1e-12)))
    assert resumed.admit(np.array([[0.0], [2e-9], [left + 1e-12]])).tolist() == [
        [True], [False], [False],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("charges", "message"),
    [
        (np.zeros(3), "shape"),
        (np.zeros((2, 1)), "float64 of shape"),
        (np.zeros((3, 1), dtype=np.float32), "float64 of shape"),
        (np.full((3, 1), np.nan), "not NaN"),
        (np.full((3, 1), -1e-9), ">= 0"),
    ],
)
def test_bad_charges_are_refused_and_change_nothing(charges: np.ndarray, message: str) -> None:
    filter_ = PerModelFilter(3, FilterBudget("zcdp", 1.0, 1e-5))
    with pytest.raises(ValueError, match=message):
        filter_.admit(charges)
    assert not filter_.spent.any()


@pytest.mark.parametrize("recycled", [False, True], ids=["another id", "its parent's id"])
def test_a_child_of_a_fork_spends_nothing(recycled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one whose process id is its parent's, as in a namespace of its own."""
    budget = FilterBudget("zcdp", 1.0, 1e-5, releases=1, sigma=9.0)
    shared, written = PerModelFilter(1, budget), PerModelFilter(1, budget).state()
    asked: list[Callable[[], object]] = [
        shared.state,
        lambda: shared.restore(written),
        lambda: Accountant(1e-5, filter_budget=budget).attach(shared),
        lambda: shared.admit(np.zeros((1, 1))),
        lambda: shared.noisy_count(0.0, rng=UNSEEDED),
    ]
    parent = os.getpid()
    for ask in asked:
        child = os.fork()
        if child == 0:
            if recycled:
                monkeypatch.setattr(os, "getpid", lambda: parent)
            try:
                ask()
            except ValueError as error:
                os._exit(7 if "in the process that made it" in str(error) else 1)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        ask()


def test_a_state_that_is_asked_for_amid_a_seeded_count_is_refused() -> None:
    shared = PerModelFilter(1, FilterBudget("zcdp", 1.0, 1e-5, releases=2, sigma=9.0))
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(shared.state())
        except ValueError as error:
            found.append(str(error))

    asking = threading.Thread(target=ask)

    def bits(count: int) -> int:
        if not asking.ident:
            asking.start()
            asking.join(0.2)  # it waits for the count
        return SEEDED.bits(count)

    shared.noisy_count(0.0, rng=SimpleNamespace(seeded=True, bits=bits))
    asking.join()
    assert found == ["a filter that has released counts with seeded noise has no state"]


def test_there_are_no_copies() -> None:
    shared = PerModelFilter(1, FilterBudget("zcdp", 1.0, 1e-5))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="must not be copied or pickled"):
            copied(shared)


def test_seeded_noise_is_for_filters_that_nothing_rests_on() -> None:
    budget = FilterBudget("zcdp", 1.0, 1e-5, releases=2, sigma=9.0)

    def counting() -> PerModelFilter:
        return PerModelFilter(2, budget)

    served = counting()
    Accountant(1e-5, filter_budget=budget).attach(served)
    restored = counting()
    restored.restore(counting().state())
    for one in (served, restored, PerModelFilter.from_state(counting().state())):
        for source in (SEEDED, object()):
            with pytest.raises(ValueError, match=r"must be SecureRandom\(\) where an"):
                one.noisy_count(0.0, rng=source)
        for _ in range(2):  # a refused count is not spent
            one.noisy_count(0.0, rng=UNSEEDED)
    alone = counting()
    with pytest.raises(ValueError, match=r"rng must give random bits, .* got object without bits"):
        alone.noisy_count(0.0, rng=object())
    alone.noisy_count(0.0, rng=SEEDED)
    with pytest.raises(ValueError, match="must not have released counts with seeded noise"):
        Accountant(1e-5, filter_budget=budget).attach(alone)
    with pytest.raises(ValueError, match="has no state"):
        alone.state()


@pytest.mark.parametrize("sigma", [5e-324, 1e-170, 1e-3])
@pytest.mark.parametrize("order", [None, ORDER])
def test_noise_that_costs_more_than_the_budget(sigma: float, order: float | None) -> None:
    measure = "zcdp" if order is None else "renyi"
    with pytest.raises(ValueError, match="releases must leave some of the budget of 1.0"):
        FilterBudget(measure, 1.0, 1e-5, order, releases=1, sigma=sigma)
