"""The per-model filter: budgets, adversarial trees enumerated to the last leaf, refusals."""

from __future__ import annotations

import copy
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from adapmixed.audit.trees import Adversary, largest_divergence, leaves
from adapmixed.privacy import (
    Accountant,
    FilterBudget,
    GaussianScreening,
    IndividualCharge,
    PerModelFilter,
    PublicAnswer,
    c_alpha,
    zcdp_to_dp,
)

ORDER = 4.0


class Source:
    """Where noise comes from, as a filter sees it."""

    def __init__(self, seeded: bool) -> None:
        self.seeded = seeded


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
    # The tokens of 2^40 answers are drawn within 2^20 2^-99 of the law, whose delta is the rest.
    if replaced > 16:
        assert replaced == math.inf
        return
    rest = 1e-5 - (1 + math.exp(replaced)) * 2.0**-39
    if order is None:
        assert replaced == pytest.approx(zcdp_to_dp(4 * budget.amount, rest)[0], rel=1e-12)
    else:
        # Through the emptied shard: (2 e, (1 + e^e) d) with the d that gives the rest in all.
        share = rest / (1 + math.exp(replaced / 2))
        assert replaced == pytest.approx(2 * (budget.amount + c_alpha(order, share)), rel=1e-9)


def test_a_budget_beyond_what_drawn_tokens_can_keep_to() -> None:
    assert FilterBudget("zcdp", 2.0, 1e-5).epsilon() < 12.0
    assert FilterBudget("zcdp", 9.0, 1e-5).epsilon() == math.inf
    assert FilterBudget("zcdp", 0.1, 1e-13).epsilon() == math.inf


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


def test_counts_are_paid_for_beforehand() -> None:
    budget = FilterBudget("renyi", 1.0, 1e-5, ORDER)
    filter_ = PerModelFilter(3, budget, releases=2, sigma=3.0)
    left = 1.0 - 2 * ORDER / (2 * 9.0)
    assert filter_.admit(np.array([[left + 1e-12], [left - 1e-9], [0.0]])).tolist() == [
        [False], [True], [True],
    ]  # fmt: skip
    assert filter_.noisy_count(0.0, 0.75, rng=UNSEEDED) == 2.0
    filter_.noisy_count(0.0, -1.0, rng=UNSEEDED)
    with pytest.raises(ValueError, match="none left"):
        filter_.noisy_count(0.0, 1.0, rng=UNSEEDED)
    with pytest.raises(ValueError, match=r"a draw of N\(0, sigma²\), got 0.0"):
        filter_.noisy_count(0.0, 0.0, rng=UNSEEDED)
    with pytest.raises(ValueError, match="releases must leave"):
        PerModelFilter(3, budget, releases=5, sigma=3.0)
    with pytest.raises(ValueError, match="sigma must be given"):
        PerModelFilter(3, budget, releases=1)
    with pytest.raises(ValueError, match="releases must be 0 where spent is given"):
        PerModelFilter(3, budget, releases=1, sigma=3.0, spent=filter_.spent)
    # What was paid for counts goes with what was spent.
    resumed = PerModelFilter(3, budget, spent=filter_.spent)
    assert resumed.admit(np.array([[0.0], [2e-9], [left + 1e-12]])).tolist() == [
        [True], [False], [False],
    ]  # fmt: skip


def test_an_accountant_states_the_budget_and_checks_it() -> None:
    budget = FilterBudget.for_epsilon(2.0, 1e-5, order=ORDER * 3)
    accountant = Accountant(1e-5, filter_budget=budget)
    event = IndividualCharge("renyi", ORDER * 3, np.full((3, 2), budget.amount / 2.5))
    accountant.attach(PerModelFilter(3, budget))
    guarantee = accountant.add(event).epsilon()
    assert guarantee.kind == "fixed" and guarantee.epsilon == budget.epsilon() <= 2.0
    assert "per-model filter" in str(guarantee) and "may be published" in str(guarantee)
    assert accountant.epsilon("replace_one").epsilon == budget.epsilon("replace_one")
    with pytest.raises(ValueError, match="'zero_out' or 'replace_one'"):
        accountant.epsilon("add_remove")
    with pytest.raises(ValueError, match="within the budget"):
        accountant.add(event)
    with pytest.raises(ValueError, match="those of the filter's budget"):
        accountant.add(IndividualCharge("zcdp", None, np.zeros((3, 1))))
    with pytest.raises(ValueError, match="off or public under a filter"):
        accountant.add(GaussianScreening(3, 1, 1e-4, 1e-2))
    with pytest.raises(ValueError, match="filter_budget must be given"):
        Accountant(1e-5).add(event)
    with pytest.raises(ValueError, match="delta must be the filter's"):
        Accountant(1e-6, filter_budget=budget)


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


def test_no_more_answers_than_the_sampling_bound_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapmixed.privacy.filter.MAX_ANSWERS", 3)
    filter_ = PerModelFilter(1, FilterBudget("zcdp", 1.0, 1e-5))
    filter_.admit(np.zeros((1, 3)))
    with pytest.raises(ValueError, match="at most 3"):
        filter_.admit(np.zeros((1, 1)))


def test_an_accountant_serves_filters_that_hold_what_was_spent() -> None:
    budget = FilterBudget.for_epsilon(2.0, 1e-5)
    accountant = Accountant(1e-5, filter_budget=budget)
    with pytest.raises(ValueError, match="must have the accountant's budget"):
        accountant.attach(PerModelFilter(3, FilterBudget.for_epsilon(8.0, 1e-5)))
    with pytest.raises(ValueError, match="must have the accountant's budget, None"):
        Accountant(1e-5).attach(PerModelFilter(3, budget))
    first = PerModelFilter(3, budget)
    charges = np.full((3, 1), budget.amount / 4)
    accountant.attach(first)
    accountant.add(IndividualCharge("zcdp", None, np.where(first.admit(charges), charges, 0.0)))
    accountant.attach(first)
    for other in (PerModelFilter(3, budget), PerModelFilter(2, budget)):
        with pytest.raises(ValueError, match="what its models have spent before"):
            accountant.attach(other)
    with pytest.raises(ValueError, match="the only one of its accountant"):
        accountant.attach(PerModelFilter(3, budget, releases=1, sigma=50.0))
    accountant.attach(PerModelFilter(3, budget, spent=accountant.individual_spent))


def test_the_cost_of_counts_stays_with_their_filter() -> None:
    budget = FilterBudget.for_epsilon(2.0, 1e-5)
    accountant = Accountant(1e-5, filter_budget=budget)
    counting = PerModelFilter(3, budget, releases=1, sigma=50.0)
    accountant.attach(counting)
    again = Accountant.from_state(accountant.state())
    again.attach(PerModelFilter.from_state(counting.state()))
    for one in (accountant, accountant.copy(), again):
        with pytest.raises(ValueError, match="the only one of its accountant"):
            one.attach(PerModelFilter(3, budget))


def test_an_older_state_of_the_same_filter_is_refused() -> None:
    budget = FilterBudget("zcdp", 1.0, 1e-5)
    accountant = Accountant(1e-5, filter_budget=budget)
    first = PerModelFilter(1, budget, releases=2, sigma=2.0)
    older = PerModelFilter.from_state(first.state())
    accountant.attach(first)
    charge = np.full((1, 1), 0.49)
    accountant.add(IndividualCharge("zcdp", None, np.where(first.admit(charge), charge, 0.0)))
    accountant.attach(first)
    with pytest.raises(ValueError, match="what its models have spent before"):
        accountant.attach(older)


def test_a_rank_that_follows_states_nothing() -> None:
    accountant = Accountant(1e-5)
    accountant.follow()
    with pytest.raises(ValueError, match="asked of the rank that leads"):
        accountant.epsilon()
    again = accountant.copy()
    for one in (accountant, again):
        for asked in (one.epsilon, one.breakdown, one.state):
            with pytest.raises(ValueError, match="asked of the rank that leads"):
                asked()


def test_a_charge_needs_the_filter_that_it_comes_from() -> None:
    budget = FilterBudget("zcdp", 1.0, 1e-5)
    event = IndividualCharge("zcdp", None, np.full((2, 1), 0.25))
    accountant = Accountant(1e-5, filter_budget=budget)
    for events in (event, [PublicAnswer(1), event]):
        with pytest.raises(ValueError, match=r"model_filter must be attached .* by attach\("):
            accountant.add(events)
    assert accountant.queries == 0
    accountant.attach(PerModelFilter(2, budget))
    for one in (accountant.copy(), Accountant.from_state(accountant.state()), accountant):
        assert one.add(event).individual_spent.tolist() == [0.25, 0.25]  # type: ignore[union-attr]
    # What a ledger reads again was checked when it was charged; what comes next was not.
    read = Accountant(1e-5, filter_budget=budget).replay(event)
    with pytest.raises(ValueError, match="model_filter must be attached"):
        read.add(event)
    with pytest.raises(ValueError, match="what its models have spent before"):
        read.attach(PerModelFilter(2, budget))
    read.attach(PerModelFilter(2, budget, spent=read.individual_spent))
    assert read.add(event).queries == 2


@pytest.mark.parametrize("part", [1e-11, 1e-14])
def test_no_charge_is_small_enough_to_be_missing(part: float) -> None:
    budget = FilterBudget("zcdp", 1.0, 1e-5)
    accountant = Accountant(1e-5, filter_budget=budget)
    first = PerModelFilter(1, budget, releases=1, sigma=2.0)
    accountant.attach(first)
    for amount in (0.5, part):
        older = PerModelFilter.from_state(first.state())
        charge = np.full((1, 1), amount)
        assert first.admit(charge).all()
        accountant.add(IndividualCharge("zcdp", None, charge))
    with pytest.raises(ValueError, match="what its models have spent before"):
        accountant.attach(older)


def test_what_rounding_hides_is_held_all_the_same() -> None:
    budget = FilterBudget("zcdp", 1.0, 1e-5)
    accountant = Accountant(1e-5, filter_budget=budget)
    accountant.attach(PerModelFilter(1, budget))
    for amount in (0.5, 2.0**-54, 2.0**-54):
        accountant.add(IndividualCharge("zcdp", None, np.full((1, 1), amount)))
    spent = accountant.individual_spent
    assert spent is not None and spent[0] > 0.5
    lacking = PerModelFilter(1, budget, spent=np.full(1, 0.5))
    accountant.attach(lacking)
    assert lacking.spent[0] == spent[0]


def test_sums_in_another_order_are_the_same_charges() -> None:
    budget = FilterBudget("zcdp", 20.0, 1e-5)
    charges = np.random.default_rng(3).exponential(1e-3, (4, 3000))
    charges[0] = 2.0**-54  # added to 1 each ends above it by a whole ulp
    charges[0, -1] = 1.0
    for releases in (0, 2):
        sigma = 3.0 if releases else None
        accountant = Accountant(1e-5, filter_budget=budget)
        shared = PerModelFilter(4, budget, releases=releases, sigma=sigma)
        accountant.attach(shared)
        assert shared.admit(charges).all()
        accountant.add(IndividualCharge("zcdp", None, charges[:, ::-1].copy()))
        accountant.attach(shared)


def test_threads_share_a_filter_and_an_accountant() -> None:
    budget = FilterBudget("zcdp", 400.5, 1e-5)
    shared, accountant = PerModelFilter(1, budget), Accountant(1e-5, filter_budget=budget)
    accountant.attach(shared)

    def answer() -> None:
        for _ in range(200):
            active = shared.admit(np.ones((1, 1)))
            accountant.add(IndividualCharge("zcdp", None, active.astype(np.float64)))

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=answer) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert 400.0 <= shared.spent[0] < 400.001 and accountant.queries == 800
    assert accountant.individual_spent is not None
    assert accountant.individual_spent.tolist() == shared.spent.tolist()


def test_a_child_of_a_fork_spends_nothing() -> None:
    shared = PerModelFilter(1, FilterBudget("zcdp", 1.0, 1e-5), releases=1, sigma=9.0)
    asked: list[Callable[[], object]] = [
        lambda: shared.admit(np.zeros((1, 1))),
        lambda: shared.noisy_count(0.0, 0.5, rng=UNSEEDED),
    ]
    for ask in asked:
        child = os.fork()
        if child == 0:
            try:
                ask()
            except ValueError as error:
                os._exit(7 if "in the process that made it" in str(error) else 1)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        ask()


def test_there_are_no_copies() -> None:
    shared = PerModelFilter(1, FilterBudget("zcdp", 1.0, 1e-5))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="must not be copied or pickled"):
            copied(shared)


def test_seeded_noise_is_for_filters_that_nothing_rests_on() -> None:
    budget = FilterBudget("zcdp", 1.0, 1e-5)

    def counting() -> PerModelFilter:
        return PerModelFilter(2, budget, releases=2, sigma=9.0)

    served = counting()
    Accountant(1e-5, filter_budget=budget).attach(served)
    restored = counting()
    restored.restore(counting().state())
    for one in (served, restored, PerModelFilter.from_state(counting().state())):
        for source in (SEEDED, object()):
            with pytest.raises(ValueError, match=r"must be SecureRandom\(\) where an"):
                one.noisy_count(0.0, 0.5, rng=source)
        for _ in range(2):  # a refused count is not spent
            one.noisy_count(0.0, 0.5, rng=UNSEEDED)
    alone = counting()
    alone.noisy_count(0.0, 0.5, rng=SEEDED)
    with pytest.raises(ValueError, match="must not have released counts with seeded noise"):
        Accountant(1e-5, filter_budget=budget).attach(alone)
    with pytest.raises(ValueError, match="has no state"):
        alone.state()


@pytest.mark.parametrize("sigma", [5e-324, 1e-170, 1e-3])
@pytest.mark.parametrize("order", [None, ORDER])
def test_noise_that_costs_more_than_the_budget(sigma: float, order: float | None) -> None:
    measure = "zcdp" if order is None else "renyi"
    with pytest.raises(ValueError, match="releases must leave some of the budget of 1.0"):
        PerModelFilter(1, FilterBudget(measure, 1.0, 1e-5, order), releases=1, sigma=sigma)


def test_values_that_differ_are_told_apart() -> None:
    other = math.nextafter(1e-5, 1.0)
    budget = FilterBudget("zcdp", 1.0, 1e-5)
    with pytest.raises(ValueError, match=f"the filter's, 1e-05, got {other!r}"):
        Accountant(other, filter_budget=budget)
    stated = Accountant(other).add(GaussianScreening(3, 1, 1e-4, 1e-2)).epsilon()
    assert f"at δ = {other!r}" in str(stated)
