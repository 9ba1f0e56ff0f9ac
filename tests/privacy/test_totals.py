"""ClippedAnswer and BoundedRangeAnswer in the accountant: plans, mixtures, neighbours."""

import math

import numpy as np
import pytest
from accountant_cases import DELTA, bound, clipped, losses, pooled
from range_cases import grid_delta, theorem_epsilon

from adapmixed.errors import BudgetSpentError
from adapmixed.limits import QUESTIONS
from adapmixed.privacy import (
    Accountant,
    GaussianScreening,
    IndividualCharge,
    PublicAnswer,
    UnprotectedAnswer,
)
from adapmixed.privacy.composition import clipped_mixing_epsilon
from adapmixed.privacy.costs.clipped_log_pool import RANGE_ERROR, bounded_range_rho

CONDITION = "may be published if the number of queries and the settings of each were fixed, too"


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Use fewer grid points, which is fast; every test here holds for any number of them."""

    def quick(*arguments, **options):
        return clipped_mixing_epsilon(*arguments, **options, points=2**13)

    monkeypatch.setattr("adapmixed.privacy.epsilon.clipped_mixing_epsilon", quick)


def test_the_whole_budget_is_charged_with_the_first_answer():
    accountant = Accountant(DELTA).add(clipped())
    first = accountant.guarantee()
    expected = clipped_mixing_epsilon(0.7, 1.6, 20, 500, DELTA, "zero_out", points=2**13)
    assert first.epsilon == expected > 0
    assert (first.kind, first.budget, first.queries, first.method) == ("fixed", 500, 1, "pld")
    assert (first.order, first.adjacency) == (None, "zero_out")
    accountant.add([clipped(499), PublicAnswer(7)])
    assert accountant.guarantee().epsilon == first.epsilon and accountant.queries == 507
    with pytest.raises(BudgetSpentError, match="queries must stay within the 500 .* got 501"):
        accountant.add(clipped())
    assert accountant.queries == 507
    # A mechanism that answered nothing has declared its plan.
    assert Accountant(DELTA).add(clipped(0)).guarantee().epsilon == first.epsilon


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (clipped(lower=0.6), "lower must be the same in every planned answer.*fixed beforehand"),
        (clipped(upper=1.7), r"upper must be the same in every planned answer, got \{'upper': 1.7"),
        (clipped(budget=900), "budget must be the same in every planned answer"),
        (clipped(num_models=21), "num_models must be the same in every event, got 21 after 20"),
        (pooled(), "events must come from one mechanism, got BoundedRangeAnswer after ClippedAns"),
        (bound(num_models=20), "one mechanism, got realised losses or Rényi"),
        (losses(np.zeros((20, 1, 1))), "one mechanism"),
        (GaussianScreening(20, 1, 0.1, 1.0), "one mechanism, got realised losses or Rényi"),
        (IndividualCharge("zcdp", None, np.zeros((20, 1))), "epsilon must be given"),
    ],
)
def test_what_is_not_fixed_beforehand_is_refused(second, message):
    accountant = Accountant(DELTA).add(clipped(3))
    before = accountant.guarantee()
    with pytest.raises(ValueError, match=message):
        accountant.add([PublicAnswer(1), second])
    assert accountant.guarantee() == before


def test_a_public_box_costs_nothing_and_an_open_one_everything():
    assert Accountant(DELTA).add(clipped(upper=1.0)).guarantee().epsilon == 0.0
    open_box = Accountant(DELTA).add(clipped(lower=0.0)).guarantee()
    assert open_box.epsilon == math.inf and "ε = inf" in str(open_box)


def test_every_question_is_answered():
    accountant = Accountant(DELTA).add(clipped())
    found = {way: accountant.guarantee(way) for way in QUESTIONS}
    assert found["zero_out"].epsilon < found["replace_one"].epsilon
    # Two zero-outs are a replacement, so they are never cheaper than the direct statement.
    assert found["replace_one"].epsilon < 2 * found["zero_out"].epsilon * 1.2
    assert {way: one.adjacency for way, one in found.items()} == {way: way for way in QUESTIONS}
    asked = Accountant(DELTA, adjacency="replace_one").add(clipped())
    assert asked.guarantee() == found["replace_one"]
    assert asked.guarantee("zero_out") == found["zero_out"]
    assert asked.breakdown()["total"] == found["replace_one"].epsilon
    pool = Accountant(DELTA).add(pooled(100))
    costs = [pool.guarantee(way).epsilon for way in QUESTIONS]
    assert QUESTIONS == ("zero_out", "replace_one") and costs[0] < costs[1]
    for accountant in (Accountant(DELTA).add(clipped()), pool):
        with pytest.raises(ValueError, match="adjacency must be one of .* got 'add_remove'"):
            accountant.guarantee("add_remove")


def test_public_and_unprotected_answers_beside_them():
    accountant = Accountant(DELTA).add([PublicAnswer(4), pooled(0)])
    assert accountant.guarantee().kind == "public"
    accountant.add(pooled(3))
    found = accountant.guarantee()
    assert found.kind == "fixed" and accountant.queries == 7
    assert accountant.add(PublicAnswer(1000)).guarantee().epsilon == found.epsilon
    assert accountant.add(UnprotectedAnswer(1)).guarantee("replace_one").kind == "none"


def test_the_log_pool_is_composed_by_its_range():
    rho = (2 * 0.75 / 20) ** 2 / 8
    for way, factor in zip(QUESTIONS, (1, 4), strict=True):
        found = bounded_range_rho(2.0, -0.25, 0.5, 20, way)
        assert factor * rho < found <= factor * rho * (1 + 3 * RANGE_ERROR)
        accountant = Accountant(DELTA, adjacency=way).add([pooled(300), pooled(700)])
        guarantee, parts = accountant.guarantee(), accountant.breakdown()
        exact = theorem_epsilon(1000 * factor * rho, factor * rho, DELTA)
        assert exact * (1 - 1e-11) <= guarantee.epsilon <= exact * (1 + 1e-8)
        assert guarantee.order is None and guarantee.method == "bounded range"
        assert parts["mixing"] == parts["total"] == guarantee.epsilon
        assert parts["screening"] == parts["conversion"] == 0.0


def test_few_answers_of_the_log_pool_cost_what_the_worst_adversary_takes():
    for way, factor in zip(QUESTIONS, (1, 2), strict=True):
        span = factor * 2 * 0.75 / 20
        epsilon = Accountant(DELTA, adjacency=way).add(pooled(16)).guarantee().epsilon
        assert grid_delta(span, 16, epsilon) <= DELTA < grid_delta(span, 16, epsilon / 1.02)


def test_a_public_schedule_adds_up():
    accountant = Accountant(DELTA).add([pooled(300), pooled(200, scale=1.0, upper=2.0)])
    largest = (2.25 / 20) ** 2 / 8
    rho = 300 * (1.5 / 20) ** 2 / 8 + 200 * largest
    guarantee = accountant.guarantee()
    exact = theorem_epsilon(rho, largest, DELTA)
    assert exact * (1 - 1e-11) <= guarantee.epsilon <= exact * (1 + 1e-8)
    assert guarantee.budget is None and accountant.breakdown()["screening"] == 0


@pytest.mark.parametrize(
    "events",
    [
        [pooled(), pooled(scale=5.0, lower=-3.0, upper=4.0)],
        [pooled(1, budget=50), pooled(scale=5.0)],
        [bound(epsilon=0.1), bound(epsilon=0.4)],
        [GaussianScreening(5, 1, 0.1, 1.0), GaussianScreening(5, 1, 0.1, 2.0), bound()],
        [GaussianScreening(5, 1, 0.1, 1.0), bound(budget=50)],
    ],
)
def test_what_may_follow_a_schedule_says_that_it_must_be_fixed(events):
    """No event tells if the first answer decided the second setting."""
    guarantee = Accountant(DELTA).add(events).guarantee()
    assert guarantee.kind == "fixed" and CONDITION in str(guarantee)


def test_a_planned_pool():
    accountant = Accountant(DELTA).add(pooled(1, budget=50))
    whole = Accountant(DELTA).add(pooled(50)).guarantee()
    assert accountant.guarantee().epsilon == whole.epsilon
    assert accountant.guarantee().budget == 50 and whole.budget is None
    accountant.add(pooled(49, budget=50))
    with pytest.raises(BudgetSpentError, match="queries must stay within the 50"):
        accountant.add(pooled(1, budget=50))
    with pytest.raises(ValueError, match="scale must be the same in every planned answer"):
        accountant.add(pooled(0, budget=50, scale=1.0))
    mixed = accountant.add(pooled(1)).guarantee()
    assert mixed.budget is None and mixed.epsilon > whole.epsilon


def test_mechanisms_do_not_mix_in_any_sequence():
    events = {
        "clipped": clipped(),
        "pool": pooled(),
        "bound": bound(num_models=20),
        "screening": GaussianScreening(20, 1, 0.1, 1.0),
    }
    for first in events:
        for second in events:
            accountant = Accountant(DELTA).add(events[first])
            if first == second or {first, second} == {"bound", "screening"}:
                accountant.add(events[second])
            else:
                with pytest.raises(ValueError, match="whose fixed ε and δ add"):
                    accountant.add(events[second])
