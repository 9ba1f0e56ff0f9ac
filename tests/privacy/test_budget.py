"""Per-shard budgets: their ε, and the charges. The audit `budgets` attacks them on trees."""

import math
import re

import numpy as np
import pytest
from privacy_cases import (
    BOXED,
    DELTA,
    POOLED,
    Kind,
    Offer,
    bound,
    clipped,
    losses,
    pooled,
    theorem_epsilon,
)

from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import (
    Accountant,
    GaussianScreening,
    IndividualCharge,
    PublicAnswer,
    UnprotectedAnswer,
)
from adapmixed.privacy.account import Account, Settings, ShardBudget
from adapmixed.privacy.conversions import c_alpha, zcdp_to_dp
from adapmixed.privacy.costs import bounded_range_rho

both_ways = pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])


@both_ways
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
@pytest.mark.parametrize(
    ("order", "largest"), [(None, None), (2.5, None), (12.0, None), (None, 1e-7), (None, 1e-5)]
)
def test_a_budget_is_the_largest_for_its_epsilon(epsilon, order, largest, adjacency):
    least = 0.0 if order is None else ShardBudget("renyi", 0.0, order).epsilon(DELTA, adjacency)
    if epsilon < least:
        with pytest.raises(ValueError, match="epsilon must be >"):
            ShardBudget.for_epsilon(epsilon, DELTA, order, adjacency)
        return
    budget = ShardBudget.for_epsilon(epsilon, DELTA, order, adjacency, largest)
    assert budget.epsilon(DELTA, adjacency) <= epsilon and budget.largest == largest
    larger = ShardBudget(budget.measure, budget.amount * (1 + 1e-6), order, largest)
    assert larger.epsilon(DELTA, adjacency) > epsilon
    once, replaced = (budget.epsilon(DELTA, way) for way in ("zero_out", "replace_one"))
    if largest is not None:
        plain = ShardBudget.for_epsilon(epsilon, DELTA, None, adjacency)
        assert budget.amount > 1.05 * plain.amount
        for found, factor in ((once, 1), (replaced, 4)):
            exact = theorem_epsilon(factor * budget.amount, factor * largest, DELTA)
            assert exact * (1 - 1e-11) <= found <= exact * (1 + 1e-9)
    elif order is None:
        assert once == zcdp_to_dp(budget.amount, DELTA)
        assert replaced == pytest.approx(zcdp_to_dp(4 * budget.amount, DELTA), rel=1e-12)
    else:
        assert once == pytest.approx(budget.amount + c_alpha(order, DELTA))
        # Through the emptied shard: (2 e, (1 + e^e) d) with the d that gives delta in total.
        share = DELTA / (1 + math.exp(replaced / 2))
        assert replaced == pytest.approx(2 * (budget.amount + c_alpha(order, share)), rel=1e-9)


@both_ways
def test_an_accountant_of_the_log_pool_uses_its_range(adjacency):
    pool = ClippedLogPool(-0.25, 1.0, scale=2.0)
    largest, nominal = pool.largest_charge(64), (2.0 * 1.25 / 64) ** 2 / 8
    assert nominal < largest < nominal * (1 + 1e-8)
    assert largest >= bounded_range_rho(2.0, -0.25, 1.0, 64, "zero_out") * (1 - 1e-15)
    accountant = Accountant(DELTA, epsilon=2.0, adjacency=adjacency)
    accountant.bind(pool, 64)
    factor = 4 if adjacency == "replace_one" else 1
    exact = theorem_epsilon(factor * accountant.limit, factor * largest, DELTA)
    assert exact == pytest.approx(2.0, rel=1e-8)
    for _ in range(3):  # their sum exceeds the largest charge of one answer
        accountant.charge(Offer(charges=np.full((64, 1), largest), mechanism=pool))
    again = Accountant.from_state(accountant.state())
    assert again.limit == accountant.limit
    assert again.spent.tolist() == accountant.spent.tolist() and again.spent[0] > 2.9 * largest
    before = accountant.state()
    bad = Offer(charges=np.full((64, 1), math.nextafter(largest, 1.0)), mechanism=pool)
    with pytest.raises(ValueError, match="charge must be <= .*, the largest of one answer"):
        accountant.charge(bad)
    assert bad.states == ["begun", "failed"] and accountant.state() == before


def test_charging_is_in_order_and_silent():
    empty = Account(Settings(DELTA, None, "zero_out"), budget=ShardBudget("zcdp", 1.0))
    charges = np.array([[0.5, 0.75, 0.375], [0.0, 1.0, math.inf], [math.nan, 0.25, math.nan]])
    active = empty.admit(charges)
    assert active.tolist() == [[True, False, True], [True, True, False], [False, True, False]]
    account = empty.added([IndividualCharge("zcdp", None, np.where(active, charges, 0.0))])
    assert account.spent.tolist() == [math.nextafter(0.875, 1.0), 1.0, 0.25]
    again = account.admit(np.array([[0.125], [1e-300], [0.0]]))
    assert again.tolist() == [[False], [False], [True]]


@both_ways
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


def test_events_alone_are_kept_within_the_budget():
    accountant = Accountant(DELTA, epsilon=2.0)
    limit = ShardBudget.for_epsilon(2.0, DELTA, None).amount
    event = IndividualCharge("zcdp", None, np.full((3, 2), limit / 2.5))
    accountant.add([PublicAnswer(1), event])
    assert accountant.limit == limit and accountant.queries == 3
    for other, words in (
        (event, "charge must keep every shard within its budget "),
        (IndividualCharge("renyi", 4.0, np.zeros((3, 1))), "measure and order must be those of"),
        (IndividualCharge("zcdp", None, np.zeros((2, 1))), "num_models must be the same"),
    ):
        with pytest.raises(ValueError, match=words):
            accountant.add(other)
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
    accountant, own = (
        Accountant(DELTA, epsilon=2.0),
        IndividualCharge("zcdp", None, np.zeros((3, 1))),
    )
    with pytest.raises(ValueError, match="must be IndividualCharge under a budget of every shard"):
        accountant.add([event, own] if first else [own, event])
    assert accountant.add(PublicAnswer(2)).guarantee().queries == 2


def test_a_budget_below_the_conversion_names_an_order_that_is_not():
    with pytest.raises(ValueError, match="epsilon must be > .* the cost of the convers") as raised:
        Accountant(DELTA, epsilon=0.1).bind(BOXED, 3)
    found = re.search(r"a larger order costs less, for instance order=(\d+)$", str(raised.value))
    Accountant(DELTA, epsilon=0.1).bind(Kind(measure=("renyi", float(found[1]))), 3)
