"""An accountant beside a per-model filter: what it states, and which filters it serves."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from adapmixed.privacy import (
    Accountant,
    FilterBudget,
    GaussianScreening,
    IndividualCharge,
    PerModelFilter,
    PublicAnswer,
    zcdp_to_dp,
)


def test_an_accountant_states_the_budget_and_checks_it() -> None:
    budget = FilterBudget.for_epsilon(2.0, 1e-5, order=12.0)
    accountant = Accountant(1e-5, filter_budget=budget)
    event = IndividualCharge("renyi", 12.0, np.full((3, 2), budget.amount / 2.5))
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
    with pytest.raises(ValueError, match="must have the accountant's budget"):
        counting = replace(budget, releases=1, sigma=50.0)
        accountant.attach(PerModelFilter(3, counting))
    accountant.attach(PerModelFilter(3, budget, spent=accountant.individual_spent))


def test_the_cost_of_counts_stays_with_their_filter() -> None:
    budget = FilterBudget.for_epsilon(2.0, 1e-5, releases=1, sigma=50.0)
    accountant = Accountant(1e-5, filter_budget=budget)
    counting = PerModelFilter(3, budget)
    accountant.attach(counting)
    again = Accountant.from_state(accountant.state())
    again.attach(PerModelFilter.from_state(counting.state()))
    for one in (accountant, accountant.copy(), again):
        with pytest.raises(ValueError, match="the only one of its accountant"):
            one.attach(PerModelFilter(3, budget))


def test_an_older_state_of_the_same_filter_is_refused() -> None:
    budget = FilterBudget("zcdp", 1.0, 1e-5, releases=2, sigma=2.0)
    accountant = Accountant(1e-5, filter_budget=budget)
    first = PerModelFilter(1, budget)
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
    budget = FilterBudget("zcdp", 1.0, 1e-5, releases=1, sigma=2.0)
    accountant = Accountant(1e-5, filter_budget=budget)
    first = PerModelFilter(1, budget)
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
    plain = FilterBudget("zcdp", 20.0, 1e-5)
    charges = np.random.default_rng(3).exponential(1e-3, (4, 3000))
    charges[0] = 2.0**-54  # added to 1 each ends above it by a whole ulp
    charges[0, -1] = 1.0
    for releases in (0, 2):
        budget = replace(plain, releases=releases, sigma=3.0 if releases else None)
        accountant = Accountant(1e-5, filter_budget=budget)
        shared = PerModelFilter(4, budget)
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


def test_values_that_differ_are_told_apart() -> None:
    other = math.nextafter(1e-5, 1.0)
    budget = FilterBudget("zcdp", 1.0, 1e-5)
    with pytest.raises(ValueError, match=f"the filter's, 1e-05, got {other!r}"):
        Accountant(other, filter_budget=budget)
    stated = Accountant(other).add(GaussianScreening(3, 1, 1e-4, 1e-2)).epsilon()
    assert f"at δ = {other!r}" in str(stated)


def test_a_filter_goes_on_after_any_number_of_answers() -> None:
    """Its ε is of the budget alone: tokens are drawn exactly from the law that was charged."""
    budget = FilterBudget("zcdp", 1.0, 1e-5)
    begun = PerModelFilter(2, budget)
    begun.admit(np.zeros((2, 1)))
    model_filter = PerModelFilter.from_state({**begun.state(), "answers": 2**60})
    accountant = Accountant(1e-5, filter_budget=budget)
    accountant.attach(model_filter)
    assert model_filter.admit(np.full((2, 1), 1e-9)).all()
    accountant.add(IndividualCharge("zcdp", None, np.full((2, 1), 1e-9)))
    assert model_filter.state()["answers"] == 2**60 + 1
    assert accountant.epsilon().epsilon == budget.epsilon() == zcdp_to_dp(1.0, 1e-5)[0]


def test_a_filter_that_serves_an_accountant_with_answers_is_not_new() -> None:
    budget = FilterBudget("zcdp", 1.0, 1e-5)
    charges = np.full((2, 3), 1e-3)
    first, accountant = PerModelFilter(2, budget), Accountant(1e-5, filter_budget=budget)
    accountant.attach(first)
    first.admit(charges)
    accountant.add(IndividualCharge("zcdp", None, charges))
    going_on = PerModelFilter(2, budget, spent=accountant.individual_spent)
    accountant.attach(going_on)
    with pytest.raises(ValueError, match="restore needs a filter that is new, got 3 answers"):
        going_on.restore(first.state())
