"""Plans keep within the budget and waste little of it."""

import math
from unittest.mock import Mock

import pytest
import torch

from adapmixed.errors import BudgetSpentError
from adapmixed.mechanisms.planned import planned
from adapmixed.privacy import Accountant, BoundedRangeAnswer, ClippedAnswer, RenyiBound, planner
from adapmixed.privacy.composition import PLANNED_POINTS, composed_epsilon
from adapmixed.privacy.conversions import c_alpha
from adapmixed.privacy.costs.clipped_mixing import (
    accounted_box,
    answer_error,
    clipped_mixing_pair,
)
from adapmixed.privacy.costs.pmixed import sound_bound
from adapmixed.privacy.planner import plan
from adapmixed.privacy.search import FIT, largest_within
from adapmixed.rng import SecureRandom

DELTA = 1e-5
QUESTION = (1.0, DELTA, 64, 508)


@pytest.fixture(scope="module")
def plans():
    return {
        way: plan(1.0, DELTA, 64, 508, way, shapes=(4.0,), scales=(2.0,))
        for way in ("zero_out", "replace_one")
    }


@pytest.mark.slow
def test_plans_fill_the_budget(plans):
    for adjacency, found in plans.items():
        names = [one.mechanism for one in found]
        assert names == ["clipped-mixing", "clipped-log-pool", "pmixed"]
        for one in found:
            assert 0.99 < one.epsilon <= 1.0
            assert (one.adjacency, one.queries, one.num_models) == (adjacency, 508, 64)
            counts, costs = zip(*one.over_time, strict=True)
            assert counts == (5, 50, 254, 508) and list(costs) == sorted(costs)
            assert costs[-1] == one.epsilon


@pytest.mark.slow
def test_an_accountant_states_what_was_planned(plans):
    for adjacency, found in plans.items():
        mixing, pool = found[0].settings, found[1].settings
        assert math.log(mixing["upper"]) == pytest.approx(-4 * math.log(mixing["lower"]))
        events = [
            ClippedAnswer(mixing["lower"], mixing["upper"], 64, 1, budget=508),
            BoundedRangeAnswer(pool["scale"], pool["lower"], pool["upper"], 64, 1, budget=508),
        ]
        for event, one in zip(events, found[:2], strict=True):
            stated = Accountant(DELTA, adjacency=adjacency).add(event).guarantee().epsilon
            assert stated <= 1.0 and stated == pytest.approx(one.epsilon, rel=1e-3)
    pmixed = plans["zero_out"][-1]
    bound = sound_bound(pmixed.settings["order"], pmixed.settings["radius"], 64)
    event = RenyiBound(pmixed.settings["order"], bound, 64, 508, budget=508)
    assert Accountant(DELTA).add(event).guarantee().epsilon <= 1.0


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_a_ball_is_planned_inward(adjacency):
    """The ε left for the ball is rounded down, so no setting exceeds the target by an ulp."""
    for step in range(60):
        common = (0.8 + 0.37 * step, 10.0 ** -(3 + step % 7), 2 + 7 * step, 1 + 131 * step)
        found = planner._pmixed(*common, adjacency)
        assert found is None or 0.999 * common[0] < found.epsilon <= common[0], common


@pytest.mark.slow
def test_a_box_beyond_what_its_widening_covers_is_planned_with_the_rounding():
    found = planner._clipped_mixing(1.0, DELTA, 1000, 508, "zero_out", 8.0)
    box = found.settings["lower"], found.settings["upper"]
    error = answer_error(*box, 1000)
    assert box[1] / box[0] > 150 and error > 0
    pair = clipped_mixing_pair(*accounted_box(*box), 1000, "zero_out")
    bare = composed_epsilon(pair, 508, DELTA, points=PLANNED_POINTS)
    assert bare + 2 * 508 * error <= found.epsilon <= 1.0


@pytest.mark.parametrize("power", [0.05, 0.5, 1.0, 7.0, 60.0])
@pytest.mark.parametrize("start", [1e-9, 0.1, 2.9999, 20.0])
def test_the_search_closes_in(power, start):
    """Costs may be steep, flat, with a step, or infinite from some size on."""
    costs = {
        "power": lambda size: size**power,
        "step": lambda size: (size / 3) ** power * (1.0 if size <= 3.0 else 50.0),
        "infinite": lambda size: size**power if size <= 3.0 else math.inf,
        "flat, then steep": lambda size: 3.0**power * (0.2 if size <= 3.0 else size),
    }
    for name, cost in costs.items():
        for target in (cost(3.0), cost(3.0) * 1.0001):
            counted = Mock(side_effect=cost)
            found = largest_within(counted, target, 20.0, start)
            assert cost(found) <= target < cost(found * (1 + FIT)), name
            assert counted.call_count < 80, name
    assert largest_within(lambda size: 1.0, 1.0, 20.0, start) == 20.0
    assert largest_within(lambda size: 2.0, 1.0, 20.0, start) == 0.0


def best_leakage(inner, delta, models, queries):
    """Return β of the best of 20 000 orders."""
    best = 0.0
    for step in range(20_000):
        order = 1 + math.exp(-3 + 12 * step / 20_000)
        left = (inner - c_alpha(order, delta)) / queries
        if left > 0:
            best = max(
                best, math.log1p(models * math.expm1((order - 1) * left)) / (order - 1) / order
            )
    return best


@pytest.mark.parametrize("target", [0.02, 0.1, 0.15, 1.0, 8.0])
def test_the_best_order_of_a_ball_is_found(target):
    found = planner._pmixed(target, DELTA, 64, 508, "zero_out")
    assert found is not None and found.epsilon <= target
    best = best_leakage(target, DELTA, 64, 508)
    assert best * (1 - 1e-5) < found.settings["target_leakage"] < best * (1 + 1e-6)


def test_wider_neighbours_buy_less(plans):
    first = {way: found[0].settings["upper"] for way, found in plans.items()}
    assert first["zero_out"] > first["replace_one"]
    pool = {way: found[1].settings["upper"] for way, found in plans.items()}
    assert pool["zero_out"] > pool["replace_one"]
    assert plans["replace_one"][-1].settings["radius"] < plans["zero_out"][-1].settings["radius"]


def test_plans_that_end_before_the_target_say_so(plans):
    found = planner.plan(200.0, DELTA, 5, 10, shapes=(4.0,), scales=(1.0, 4.0))
    box, narrow, wide = found[:3]
    assert box.epsilon < 160 and box.note == "no box wider than 1e+06 is tried"
    assert narrow.epsilon < 140 and narrow.note == "no clip wider than 40 is tried"
    assert wide.epsilon > 199 and not wide.note
    assert not any(one.note for one in plans["zero_out"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be > 0, got 0.0"),
        ({"num_models": 0}, "num_models must be an integer >= 1"),
        ({"queries": 0}, "queries must be an integer >= 1, got 0"),
        ({"adjacency": "swap"}, "adjacency must be one of"),
        ({"adjacency": "add_remove"}, "adjacency must be one of"),
        ({"shapes": (0.0,)}, "shapes must be"),
        ({"scales": (math.inf,)}, "scales must be"),
    ],
)
def test_errors_in_words(changes, message):
    arguments = {"epsilon": 1.0, "delta": DELTA, "num_models": 5, "queries": 10, **changes}
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


def test_a_plan_becomes_its_mechanism(plans):
    """It states the planned ε, charges it with the first answer, and answers no query more."""
    for one in plans["replace_one"]:
        mechanism = planned(one)
        assert (mechanism.name, mechanism.planned_queries) == (one.mechanism, 508)
        logits = torch.randn(64, 1, 8), torch.randn(1, 8)
        accountant = Accountant(DELTA, adjacency="replace_one")
        accountant.charge(mechanism.propose(*logits, rng=SecureRandom()))
        guarantee = accountant.guarantee()
        assert 0.99 < guarantee.epsilon <= 1.0 and guarantee.budget == 508
        accountant.check_left(mechanism, 507)
        with pytest.raises(BudgetSpentError, match="1 of which are spent, got up to 508"):
            accountant.check_left(mechanism, 508)
