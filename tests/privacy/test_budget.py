"""Per-shard budgets: their ε, and the charges. The audit `budgets` attacks them on adaptive trees.

`test_accountant_api.py` tests the accountant's forks and copies.
"""

import math
import re

import numpy as np
import pytest
from accountant_cases import BOXED, DELTA, POOLED, Kind, Offer, bound, clipped, losses, pooled
from range_cases import theorem_epsilon

from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import (
    Accountant,
    GaussianScreening,
    IndividualCharge,
    PublicAnswer,
    UnprotectedAnswer,
)
from adapmixed.privacy.account import Account, Settings
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.conversions import c_alpha, zcdp_to_dp
from adapmixed.privacy.costs.clipped_log_pool import bounded_range_rho


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("order", [None, 2.5, 12.0])
def test_a_budget_is_the_largest_for_its_epsilon(epsilon, order, adjacency):
    least = 0.0 if order is None else ShardBudget("renyi", 0.0, order).epsilon(DELTA, adjacency)
    if epsilon < least:
        with pytest.raises(ValueError, match="epsilon must be >"):
            ShardBudget.for_epsilon(epsilon, DELTA, order, adjacency)
        return
    budget = ShardBudget.for_epsilon(epsilon, DELTA, order, adjacency)
    assert budget.epsilon(DELTA, adjacency) <= epsilon
    larger = ShardBudget(budget.measure, budget.amount * (1 + 1e-6), order)
    assert larger.epsilon(DELTA, adjacency) > epsilon
    replaced = budget.epsilon(DELTA, "replace_one")
    if order is None:
        assert budget.epsilon(DELTA) == zcdp_to_dp(budget.amount, DELTA)[0]
        assert replaced == pytest.approx(zcdp_to_dp(4 * budget.amount, DELTA)[0], rel=1e-12)
    else:
        assert budget.epsilon(DELTA) == pytest.approx(budget.amount + c_alpha(order, DELTA))
        # Through the emptied shard: (2 e, (1 + e^e) d) with the d that gives delta in total.
        share = DELTA / (1 + math.exp(replaced / 2))
        assert replaced == pytest.approx(2 * (budget.amount + c_alpha(order, share)), rel=1e-9)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("largest", [1e-7, 1e-5])
def test_a_bounded_range_buys_a_larger_budget(epsilon, largest, adjacency):
    budget = ShardBudget.for_epsilon(epsilon, DELTA, None, adjacency, largest)
    assert budget.epsilon(DELTA, adjacency) <= epsilon and budget.largest == largest
    assert budget.amount > 1.05 * ShardBudget.for_epsilon(epsilon, DELTA, None, adjacency).amount
    larger = ShardBudget("zcdp", budget.amount * (1 + 1e-6), None, largest)
    assert larger.epsilon(DELTA, adjacency) > epsilon
    for way, factor in (("zero_out", 1), ("replace_one", 4)):
        exact = theorem_epsilon(factor * budget.amount, factor * largest, DELTA)
        assert exact * (1 - 1e-11) <= budget.epsilon(DELTA, way) <= exact * (1 + 1e-9)


def test_a_charge_above_the_largest_raises_and_changes_nothing():
    mechanism = Kind(measure=("zcdp", None), largest=0.01)
    accountant = Accountant(DELTA, epsilon=2.0)
    accountant.charge(Offer(charges=[[0.01], [0.002]], mechanism=mechanism))
    before = accountant.state()
    bad = Offer(charges=[[0.002], [math.nextafter(0.01, 1.0)]], mechanism=mechanism)
    with pytest.raises(ValueError, match="charge must be <= 0.01, the largest of one answer"):
        accountant.charge(bad)
    assert bad.states == ["begun", "failed"] and accountant.state() == before


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_an_accountant_of_the_log_pool_uses_its_range(adjacency):
    pool = ClippedLogPool(-0.25, 1.0, scale=2.0)
    largest = pool.largest_charge(64)
    nominal = (2.0 * 1.25 / 64) ** 2 / 8
    assert nominal < largest < nominal * (1 + 1e-8)
    assert largest >= bounded_range_rho(2.0, -0.25, 1.0, 64, "zero_out") * (1 - 1e-15)
    accountant = Accountant(DELTA, epsilon=2.0, adjacency=adjacency)
    accountant.bind(pool, 64)
    factor = 4 if adjacency == "replace_one" else 1
    exact = theorem_epsilon(factor * accountant.limit, factor * largest, DELTA)
    assert exact == pytest.approx(2.0, rel=1e-8)
    assert accountant.limit > ShardBudget.for_epsilon(2.0, DELTA, None, adjacency).amount
    for _ in range(3):  # their sum exceeds the largest charge of one answer
        accountant.charge(Offer(charges=np.full((64, 1), largest), mechanism=pool))
    again = Accountant.from_state(accountant.state())
    assert again.limit == accountant.limit
    assert again.spent.tolist() == accountant.spent.tolist() and again.spent[0] > 2.9 * largest


def test_charging_is_in_order_and_silent():
    empty = Account(Settings(DELTA, None, "zero_out"), budget=ShardBudget("zcdp", 1.0))
    charges = np.array([[0.5, 0.75, 0.375], [0.0, 1.0, math.inf], [math.nan, 0.25, math.nan]])
    active = empty.admit(charges)
    expected = [[True, False, True], [True, True, False], [False, True, False]]
    assert active.tolist() == expected
    paid = IndividualCharge("zcdp", None, np.where(active, charges, 0.0))
    account = empty.added([paid])
    assert account.spent.tolist() == [math.nextafter(0.875, 1.0), 1.0, 0.25]
    again = account.admit(np.array([[0.125], [1e-300], [0.0]]))
    assert again.tolist() == [[False], [False], [True]]


@pytest.mark.slow
def test_what_was_admitted_can_be_charged():
    """Admission and the total add in the same order to the bit, so the last charge fits, too."""
    generator = np.random.default_rng(3)
    for _ in range(6):
        accountant = Accountant(DELTA, epsilon=float(generator.uniform(0.1, 2)))
        charges = generator.exponential(1e-3, (4, 3000))
        offers = [Offer(charges=part) for part in np.split(charges, [7, 1000, 1001], axis=1)]
        for offer in offers:
            accountant.charge(offer)
        assert (accountant.spent <= accountant.limit).all()
        whole = Offer(charges=charges)
        at_once = Accountant(DELTA, epsilon=accountant.epsilon)
        at_once.charge(whole)
        assert at_once.spent.tobytes() == accountant.spent.tobytes()
        active = np.concatenate([offer.active for offer in offers], axis=1)
        assert (whole.active == active).all() and not active.all()


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("mechanism", [POOLED, BOXED])
def test_an_accountant_states_the_budget_and_keeps_it(mechanism, adjacency):
    accountant = Accountant(DELTA, epsilon=12.0, adjacency=adjacency)
    for words in ("spent", "limit"):
        with pytest.raises(ValueError, match=f"{words} needs a first charge"):
            getattr(accountant, words)
        with pytest.raises(ValueError, match=f"{words} needs an accountant with epsilon="):
            getattr(Accountant(DELTA), words)
    accountant.bind(mechanism, 3)
    budget = ShardBudget.for_epsilon(12.0, DELTA, mechanism.measure[1], adjacency)
    assert accountant.limit == budget.amount and accountant.spent.tolist() == [0.0] * 3
    charges = np.full((3, 2), 0.4 * budget.amount)
    first, late = (Offer(charges=charges, mechanism=mechanism) for _ in range(2))
    accountant.charge(first)
    assert first.active.all() and (accountant.spent <= budget.amount).all()
    accountant.charge(late)  # an exhausted shard never raises
    assert not late.active.any() and accountant.queries == 4
    guarantee = accountant.guarantee()
    assert guarantee.kind == "fixed" and guarantee.method == "per-shard budget"
    assert 11.99 < guarantee.epsilon == budget.epsilon(DELTA, adjacency) <= 12.0
    assert "a budget of every shard" in str(guarantee) and "may be published" in str(guarantee)
    for way in ("zero_out", "replace_one"):
        assert accountant.guarantee(way).epsilon == budget.epsilon(DELTA, way)
    assert accountant.get_epsilon(1e-7) == budget.epsilon(1e-7, adjacency)
    with pytest.raises(ValueError, match="adjacency must be one of"):
        accountant.guarantee("add_remove")


def test_events_alone_are_kept_within_the_budget():
    accountant = Accountant(DELTA, epsilon=2.0)
    limit = ShardBudget.for_epsilon(2.0, DELTA, None).amount
    event = IndividualCharge("zcdp", None, np.full((3, 2), limit / 2.5))
    accountant.add([PublicAnswer(1), event])
    assert accountant.limit == limit and accountant.queries == 3
    with pytest.raises(ValueError, match="charge must keep every shard within its budget "):
        accountant.add(event)
    with pytest.raises(ValueError, match="measure and order must be those of the budget"):
        accountant.add(IndividualCharge("renyi", 4.0, np.zeros((3, 1))))
    with pytest.raises(ValueError, match="num_models must be the same"):
        accountant.add(IndividualCharge("zcdp", None, np.zeros((2, 1))))
    with pytest.raises(ValueError, match="epsilon must be given to an accountant of Individual"):
        Accountant(DELTA).add(event)
    assert accountant.queries == 3


@pytest.mark.parametrize(
    "event",
    [
        GaussianScreening(3, 1, 1e-4, 1e-2),
        bound(),
        losses(np.zeros((3, 1, 1))),
        clipped(),
        pooled(),
        UnprotectedAnswer(1),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_under_a_budget_every_cost_is_one_members_own(event, first):
    accountant = Accountant(DELTA, epsilon=2.0)
    if not first:
        accountant.add(IndividualCharge("zcdp", None, np.zeros((3, 1))))
    with pytest.raises(ValueError, match="must be IndividualCharge under a budget of every shard"):
        accountant.add(event)
    assert accountant.add(PublicAnswer(2)).guarantee().queries == 2 + (not first)


def test_mechanisms_that_a_budget_cannot_carry_raise_before_a_charge():
    fixed = Kind(no_budget="its charge is the same for every member")
    with pytest.raises(ValueError, match="epsilon must be None for Kind, got 2.0: its charge is"):
        Accountant(DELTA, epsilon=2.0).bind(fixed, 3)
    alone = Kind(no_total="queries must be given")
    with pytest.raises(ValueError, match="queries must be given"):
        Accountant(DELTA).bind(alone, 3)
    Accountant(DELTA, epsilon=2.0).bind(alone, 3)
    planned = Kind(measure=("zcdp", None), planned_queries=9)
    with pytest.raises(ValueError, match="queries must be None if every shard has a budget, got 9"):
        Accountant(DELTA, epsilon=2.0).bind(planned, 3)
    removed = Kind(no_replacement="a realised loss is about removal")
    with pytest.raises(ValueError, match="adjacency must be 'zero_out' for Kind"):
        Accountant(DELTA, adjacency="replace_one").bind(removed, 3)
    with pytest.raises(
        ValueError, match="epsilon must be > .* the cost of the conversion"
    ) as raised:
        Accountant(DELTA, epsilon=0.1).bind(BOXED, 3)
    (order,) = re.findall(
        r"a larger order costs less, for instance order=(\d+)$", str(raised.value)
    )
    Accountant(DELTA, epsilon=0.1).bind(Kind(measure=("renyi", float(order))), 3)
