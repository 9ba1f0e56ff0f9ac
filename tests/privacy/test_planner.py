"""Plans keep within their ε and waste little of it; so do their inverses and the public rule."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from privacy_cases import DELTA

from adapmixed.errors import BudgetSpentError
from adapmixed.mechanisms import planned
from adapmixed.privacy import Accountant, planner
from adapmixed.privacy.composition import PLANNED_POINTS, composed_epsilon
from adapmixed.privacy.conversions import c_alpha
from adapmixed.privacy.costs import accounted_box, answer_error, clipped_mixing_pair
from adapmixed.privacy.planner import (
    SHARDS,
    epsilon_of,
    kept_share,
    models_for,
    nearest,
    plan,
    queries_for,
    recommended,
    rounded_inward,
)
from adapmixed.rng import SecureRandom


@pytest.fixture(scope="module")
def plans():
    return {
        way: plan(1.0, DELTA, 64, 508, way, shapes=(4.0,), scales=(2.0,))
        for way in ("zero_out", "replace_one")
    }


@pytest.mark.slow
def test_plans_fill_the_budget(plans):
    """A mechanism of a plan charges all of it with the first answer, and answers no query more."""
    for adjacency, listed in plans.items():
        names = [choice.mechanism for choice in listed]
        assert names == ["clipped-mixing", "clipped-log-pool", "pmixed"]
        mixing = listed[0].settings
        assert math.log(mixing["upper"]) == pytest.approx(-4 * math.log(mixing["lower"]))
        for choice in listed:
            assert 0.99 < choice.epsilon <= 1.0
            assert (choice.adjacency, choice.queries, choice.num_models) == (adjacency, 508, 64)
            mechanism, accountant = planned(choice), Accountant(DELTA, adjacency=adjacency)
            assert (mechanism.name, mechanism.planned_queries) == (choice.mechanism, 508)
            logits = torch.randn(64, 1, 8), torch.randn(1, 8)
            accountant.charge(mechanism.propose(*logits, rng=SecureRandom()))
            guarantee = accountant.guarantee()
            assert guarantee.epsilon <= 1.0 and guarantee.budget == 508
            assert guarantee.epsilon == pytest.approx(choice.epsilon, rel=1e-3)
            accountant.check_left(mechanism, 507)
            with pytest.raises(BudgetSpentError, match="1 of which are spent, got up to 508"):
                accountant.check_left(mechanism, 508)
    for place, name in ((0, "upper"), (1, "upper"), (2, "radius")):  # wider neighbours buy less
        wide, narrow = (plans[way][place].settings[name] for way in ("zero_out", "replace_one"))
        assert wide > narrow


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_a_ball_is_planned_inward(adjacency):
    """The ε left for the ball is rounded down, so no setting exceeds the target by an ulp."""
    for step in range(60):
        common = (0.8 + 0.37 * step, 10.0 ** -(3 + step % 7), 2 + 7 * step, 1 + 131 * step)
        ball = planner._pmixed(*common, adjacency)
        assert ball is None or 0.999 * common[0] < ball.epsilon <= common[0], common


@pytest.mark.slow
def test_a_box_beyond_what_its_widening_covers_is_planned_with_the_rounding():
    choice = planner._clipped_mixing(1.0, DELTA, 1000, 508, "zero_out", 8.0)
    box = choice.settings["lower"], choice.settings["upper"]
    error = answer_error(*box, 1000)
    assert box[1] / box[0] > 150 and error > 0
    pair = clipped_mixing_pair(*accounted_box(*box), 1000, "zero_out")
    bare = composed_epsilon(pair, 508, DELTA, points=PLANNED_POINTS)
    assert bare + 2 * 508 * error <= choice.epsilon <= 1.0


def best_leakage(inner, models, queries):
    """Return β of the best of 20 000 orders."""
    best = 0.0
    for step in range(20_000):
        order = 1 + math.exp(-3 + 12 * step / 20_000)
        left = (order - 1) * (inner - c_alpha(order, DELTA)) / queries
        if left > 0:
            best = max(best, math.log1p(models * math.expm1(left)) / (order - 1) / order)
    return best


@pytest.mark.parametrize("target", [0.02, 0.1, 0.15, 1.0, 8.0])
def test_the_best_order_of_a_ball_is_found(target):
    ball = planner._pmixed(target, DELTA, 64, 508, "zero_out")
    assert ball is not None and ball.epsilon <= target
    best = best_leakage(target, 64, 508)
    assert best * (1 - 1e-5) < ball.settings["target_leakage"] < best * (1 + 1e-6)


def test_plans_end_at_the_widest_settings_and_say_what_pays_for_nothing():
    box, narrow, wide = planner.plan(200.0, DELTA, 5, 10, shapes=(4.0,), scales=(1.0, 4.0))[:3]
    assert box.epsilon < 160 and narrow.epsilon < 140 and wide.epsilon > 199
    with pytest.raises(ValueError, match="epsilon must pay for 500 .* got 1e-13: give a larger"):
        recommended(1e-13, 1e-15, 1, 500, mechanism="clipped-mixing")


@pytest.mark.parametrize(
    ("name", "value"),
    [("epsilon", 0.0), ("num_models", 0), ("queries", 0), ("adjacency", "swap"),
     ("adjacency", "add_remove"), ("shapes", (0.0,)), ("scales", (math.inf,))],
)  # fmt: skip
def test_bad_arguments_are_named(name, value):
    arguments = {"epsilon": 1.0, "delta": DELTA, "num_models": 5, "queries": 10, name: value}
    with pytest.raises(ValueError, match=f"{name} must be"):
        plan(**arguments)


# Inverse questions

LOG_POOL = {"lower": -0.25, "upper": 1.0, "scale": 2.0}


@pytest.mark.parametrize(
    ("settings", "adjacency", "epsilon", "models"),
    [
        (LOG_POOL, "zero_out", 4.0, 1000),  # more than 400 000 queries
        (LOG_POOL, "replace_one", 1.0, 64),
        *(
            pytest.param({"lower": 0.7788, "upper": 1.6}, way, 1.0, 64, marks=pytest.mark.slow)
            for way in ("zero_out", "replace_one")
        ),
    ],
)
def test_inverse_questions(settings, adjacency, epsilon, models):
    queries = queries_for(epsilon, DELTA, models, adjacency, **settings)
    assert queries > (40 if models < 100 else 400_000)
    cost = [epsilon_of(DELTA, models, queries + n, adjacency, **settings) for n in (0, 1)]
    assert cost[0] <= epsilon < cost[1]
    least = models_for(epsilon / 2, DELTA, queries, adjacency, **settings)
    cost = [epsilon_of(DELTA, least - n, queries, adjacency, **settings) for n in (0, 1)]
    assert cost[0] <= epsilon / 2 < cost[1] and least > models


def test_ends_of_the_inverse_questions():
    assert queries_for(1e-3, 1e-9, 2, lower=0.1, upper=10.0) == 0
    assert queries_for(1.0, DELTA, 64, lower=1.0, upper=1.0) == 2**40
    assert models_for(1e-3, DELTA, 10**12, lower=0.1, upper=10.0) is None
    assert models_for(50.0, DELTA, 1, lower=0.9, upper=1.1) == 2


# The public rule


@pytest.mark.parametrize(
    "mechanism", [pytest.param("clipped-mixing", marks=pytest.mark.slow), "clipped-log-pool"]
)
def test_the_rule_takes_the_widest_within_epsilon(mechanism):
    choice = recommended(1.0, DELTA, 64, 500, mechanism=mechanism)
    settings = dict(choice.settings)
    assert choice.mechanism == mechanism and choice.queries == 500
    assert 0.99 < choice.epsilon == epsilon_of(DELTA, 64, 500, "zero_out", **settings) <= 1.0
    for name, value in settings.items():  # in four digits, as they are printed and saved
        assert float(f"{value:.4g}") == value, name
    wider = settings | {"upper": settings["upper"] * 1.01, "lower": settings["lower"] * 0.999}
    assert epsilon_of(DELTA, 64, 500, "zero_out", **wider) > 1.0


def test_settings_are_rounded_inward():
    settings = {"lower": 0.77791, "upper": 1.60699, "scale": 1.99999}
    assert rounded_inward(settings) == {"lower": 0.778, "upper": 1.606, "scale": 1.999}
    assert rounded_inward({"lower": -0.250999}) == {"lower": -0.2509}
    near = {"lower": 0.99871234, "upper": 1.00123456}
    assert rounded_inward(near) == {"lower": 0.998713, "upper": 1.001234}
    for distance in 10.0 ** np.random.default_rng(3).uniform(-15, -2, 200):
        box = {"lower": 1 - distance, "upper": 1 + distance}
        rounded = rounded_inward(box)
        assert box["lower"] <= rounded["lower"] < 1 < rounded["upper"] <= box["upper"]


def test_other_numbers_of_shards_take_the_nearest_measured_one():
    shards = [nearest(models) for models in (1, 64, 173, 174, 547, 548, 65_536)]
    assert shards == [100, 100, 100, 300, 300, 1_000, 1_000]
    choice = recommended(3.0, DELTA, 64, 20_000, mechanism="clipped-log-pool")
    assert kept_share(choice) == kept_share(replace(choice, num_models=SHARDS[0]))
    assert kept_share(replace(choice, num_models=1_000)) < kept_share(choice)
