"""Composition: both rules, upper bounds, kinds, what may not be mixed."""

import math
from fractions import Fraction

import numpy as np
import pytest
from accountant_cases import DELTA, bound, losses, random_losses

from adapmixed.privacy import (
    LOSS_ABSOLUTE_ERROR,
    Accountant,
    GaussianScreening,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
    c_alpha,
    screening_rdp,
)


def test_table_2b():
    """0.472 + 0.002 + 0.450 = 0.924 over 9 728 queries."""
    mixing = losses(np.full((100, 1, 1), 0.472 - 1e-12))
    accountant = Accountant(DELTA, rule="paper")
    accountant.add([GaussianScreening(100, 9728, 1e-4, 1e-2), mixing])
    parts = accountant.breakdown()
    assert [round(parts[k], 3) for k in ("mixing", "screening", "conversion", "total")] == [
        0.472,
        0.002,
        0.450,
        0.924,
    ]
    assert parts["screening"] == pytest.approx(0.00175104, rel=1e-12)
    assert sum([parts["mixing"], parts["screening"], parts["conversion"]]) <= parts["total"]
    assert accountant.epsilon().epsilon == parts["total"]


@pytest.mark.parametrize("rule", ["paper", "per_model"])
def test_a_loss_of_zero_is_charged_its_absolute_error(rule):
    """An operator may answer exactly 0 for any loss below that error."""
    accountant = Accountant(DELTA, rule=rule)
    for _ in range(50):
        accountant.add(losses(np.zeros((4, 7, 1)), loss_error=1e-6))
    guarantee, truth = accountant.epsilon(), 350 * Fraction(LOSS_ABSOLUTE_ERROR)
    mixing = Fraction(accountant.breakdown()["mixing"])
    assert truth <= mixing <= truth * Fraction("1.000000000001")
    assert c_alpha(18, DELTA) + 350e-12 <= guarantee.epsilon <= c_alpha(18, DELTA) + 350.1e-12
    assert guarantee.queries == accountant.queries == 350


@pytest.mark.parametrize("rule", ["paper", "per_model"])
def test_no_answer_costs_exactly_the_conversion(rule):
    accountant = Accountant(DELTA, rule=rule)
    accountant.add([losses(np.zeros((4, 0, 1)), loss_error=1e-6), PublicAnswer(350)])
    guarantee = accountant.epsilon()
    assert guarantee.epsilon == c_alpha(18, DELTA)
    assert guarantee.queries == 350


@pytest.mark.parametrize("rule", ["paper", "per_model"])
def test_totals_are_upper_bounds_of_the_inflated_losses(rule):
    accountant, chunks = Accountant(DELTA, rule=rule), []
    for seed in range(30):
        values = random_losses(seed, queries=1 + 13 * seed).loss
        chunks.append(values)
        accountant.add(losses(values, loss_error=1e-6))
    exact = [[Fraction(0) for _ in range(5)]]
    for values in chunks:
        inflated = [
            [Fraction(x) * Fraction("1.000001") + Fraction("1e-12") for x in row]
            for row in values[:, :, 0].tolist()
        ]
        exact.extend([list(column) for column in zip(*inflated, strict=True)])
    if rule == "paper":
        truth = sum(max(row) for row in exact)
    else:
        truth = max(sum(column) for column in zip(*exact, strict=True))
    found = accountant.breakdown()["mixing"]
    # The float 1e-6 lies below the decimal 1e-6 by less than an ulp; the rounding up covers it.
    assert Fraction(found) >= truth
    assert found <= float(truth) * (1 + 1e-11)


def test_many_single_query_events_stay_an_upper_bound():
    accountant = Accountant(DELTA)
    for _ in range(3000):
        accountant.add(losses([[[0.1]]]))
    truth = 3000 * (Fraction(0.1) + Fraction("1e-12"))
    assert truth <= Fraction(accountant.breakdown()["mixing"]) <= truth * Fraction("1.00000000001")


def test_the_sum_inside_one_event_is_an_upper_bound():
    for seed in range(30):
        values = random_losses(seed, num_models=1, queries=500).loss
        truth = sum(Fraction(x) + Fraction(1e-12) for x in values.ravel().tolist())
        found = Accountant(DELTA).add(losses(values)).breakdown()["mixing"]
        assert truth <= Fraction(found) <= truth * Fraction("1.000000000001")


def test_per_model_never_exceeds_the_paper_rule():
    for seed in range(40):
        event = random_losses(seed, num_models=1 + seed % 6)
        per_model = Accountant(DELTA).add(event).epsilon().epsilon
        paper = Accountant(DELTA, rule="paper").add(event).epsilon().epsilon
        assert per_model <= paper * (1 + 1e-12)
        if seed % 6 == 0:
            assert per_model == pytest.approx(paper, rel=1e-14)
        else:
            assert per_model < paper
            values = event.loss[:, :, 0]
            conversion = c_alpha(18, DELTA)
            assert per_model == pytest.approx(values.sum(axis=1).max() + conversion, rel=1e-6)
            assert paper == pytest.approx(values.max(axis=0).sum() + conversion, rel=1e-6)


def test_screening_adds_at_every_order_whatever_the_sequence_of_events():
    orders = (2.0, 18.0)
    screening = GaussianScreening(5, 1000, 0.5, 0.1)
    mixing = random_losses(1, orders=orders)
    first = Accountant(DELTA).add([screening, mixing]).epsilon()
    second = Accountant(DELTA).add([mixing, screening]).epsilon()
    assert first == second
    shares = [c_alpha(order, DELTA / 2) for order in orders]
    per_order = [1000 * screening_rdp(order, 0.5, 0.1, 5) for order in orders]
    expected = (mixing.loss.sum(axis=1) + per_order + shares).min(axis=1).max()
    assert first.epsilon == pytest.approx(expected, rel=1e-6)


def test_fixed_bounds_compose_and_mix_with_realised_losses_of_the_same_order():
    fixed = Accountant(DELTA).add(bound(queries=100)).epsilon()
    assert fixed.kind == "fixed" and fixed.order == 3.0
    assert fixed.epsilon == pytest.approx(1.0 + c_alpha(3, DELTA), rel=1e-12)
    for rule in ("per_model", "paper"):
        event = losses(np.full((5, 1, 1), 0.25), (3.0,), "zero_out")
        mixed = Accountant(DELTA, rule=rule).add([bound(queries=100), event]).epsilon()
        assert mixed.kind == "data-dependent, ex-post"
        assert mixed.epsilon == pytest.approx(1.25 + c_alpha(3, DELTA), rel=1e-9)


def test_screening_alone_is_fixed_at_the_best_order():
    accountant = Accountant(DELTA).add(GaussianScreening(10, 500, 0.1, 0.5))
    guarantee, rho = accountant.epsilon(), 500 * (0.1 / 5) ** 2
    assert guarantee.kind == "fixed" and guarantee.adjacency == "zero_out"
    assert guarantee.order > 1
    best = min(a * rho + c_alpha(a, DELTA) for a in 1 + np.exp(np.linspace(-3, 6, 3000)))
    assert guarantee.epsilon == pytest.approx(best, rel=1e-5)
    assert accountant.breakdown()["total"] == guarantee.epsilon
    # An order declared by the mechanism stays, even if every answer turned out to be public.
    declared = accountant.copy().add([losses(np.zeros((10, 0, 1))), PublicAnswer(500)]).epsilon()
    assert (declared.order, declared.kind) == (18.0, "data-dependent, ex-post")
    assert declared.epsilon == pytest.approx(18 * rho + c_alpha(18, DELTA), rel=1e-12)
    free = Accountant(DELTA).add(GaussianScreening(10, 500, 0.0, 0.5)).epsilon()
    assert (free.epsilon, free.kind, free.order) == (0.0, "fixed", None)


def test_kinds():
    public = [PublicAnswer(3)]
    cases = {
        "public": public,
        "fixed": [*public, bound(), GaussianScreening(5, 1, 0.1, 1.0)],
        "data-dependent, ex-post": [*public, losses(np.zeros((5, 1, 1)))],
        "published": [losses(np.zeros((5, 1, 1)), (3.0,), "zero_out"), bound(published=True)],
        "none": [bound(published=True), UnprotectedAnswer(1)],
    }
    for kind, events in cases.items():
        guarantee = Accountant(DELTA).add(events).epsilon()
        assert guarantee.kind == kind
        assert (guarantee.epsilon is None) == (kind == "none")
        assert guarantee.unit == "shard"
    assert Accountant(DELTA).add(UnprotectedAnswer(0)).epsilon().kind == "public"


def test_no_events_cost_nothing():
    guarantee = Accountant(DELTA).epsilon()
    assert (guarantee.epsilon, guarantee.delta, guarantee.kind) == (0.0, 0.0, "public")
    assert guarantee.queries == 0 and guarantee.adjacency is None and guarantee.order is None
    assert Accountant(DELTA).breakdown()["total"] == 0.0
    unprotected = Accountant(DELTA).add(UnprotectedAnswer(1))
    assert unprotected.breakdown()["total"] == math.inf
    assert unprotected.epsilon().delta == 1.0


def test_infinite_loss_of_one_model_only_makes_the_total_infinite():
    values = np.zeros((3, 2, 1))
    values[1, 0, 0] = np.inf
    guarantee = Accountant(DELTA).add(losses(values)).epsilon()
    assert guarantee.epsilon == math.inf
    assert "ε = inf" in str(guarantee)
    huge = losses(np.full((3, 2, 1), 1.7e308))
    assert Accountant(DELTA).add([huge, huge]).epsilon().epsilon == math.inf


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (losses(np.zeros((6, 1, 1))), "num_models must be the same in every event, got 6 after 5"),
        (GaussianScreening(6, 1, 0.1, 1.0), "num_models must be the same"),
        (losses(np.zeros((5, 1, 1)), (17.0,)), r"orders must be the same in every event, got \(17"),
        (bound(order=17.0, adjacency="add_remove"), "orders must be the same"),
        (losses(np.zeros((5, 1, 1)), adjacency="zero_out"), "adjacency must be the same"),
        (bound(order=18.0), "adjacency must be the same"),
        ("unprotected", "events must be privacy events, got str"),
    ],
)
def test_disagreeing_events_are_refused_and_nothing_is_added(second, message):
    accountant = Accountant(DELTA).add(random_losses(2))
    before = accountant.epsilon()
    with pytest.raises(ValueError, match=message):
        accountant.add([random_losses(3), second])
    assert accountant.epsilon() == before


def test_the_paper_rule_wants_one_order():
    with pytest.raises(ValueError, match="rule 'paper' allows one order"):
        Accountant(DELTA, rule="paper").add(random_losses(1, orders=(2.0, 18.0)))


def test_arguments_in_words():
    with pytest.raises(ValueError, match="rule must be one of"):
        Accountant(DELTA, rule="best")
    for delta in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"delta must be in \(0, 1\)"):
            Accountant(delta)
    with pytest.raises(ValueError, match="events must be privacy events, got int"):
        Accountant(DELTA).add(3)


def test_copies_are_independent_and_a_running_curve_never_falls():
    accountant, curve = Accountant(DELTA), []
    for seed in range(10):
        accountant.add(random_losses(seed))
        curve.append(accountant.epsilon().epsilon)
    assert curve == sorted(curve)
    other = accountant.copy().add(random_losses(99))
    assert accountant.epsilon().epsilon == curve[-1] < other.epsilon().epsilon


def test_a_budget_is_charged_at_once_and_not_exceeded() -> None:
    def event(queries: int) -> RenyiBound:
        return RenyiBound(3.0, 0.01, 5, queries, "zero_out", budget=10)

    accountant = Accountant(1e-5).add(event(1))
    first = accountant.epsilon()
    whole = Accountant(1e-5).add(RenyiBound(3.0, 0.01, 5, 10, "zero_out")).epsilon()
    assert first.epsilon == whole.epsilon
    assert first.budget == 10 and whole.budget is None
    assert "Up to 10 answered queries are" in str(first)
    assert "if the number of queries and the settings of each were fixed" in str(whole)
    mixed = accountant.copy().add(PublicAnswer(3)).epsilon()
    assert "Up to 10 answered queries, not counting 3 from public values only, are" in str(mixed)
    assert (mixed.epsilon, mixed.queries, mixed.public_queries) == (first.epsilon, 4, 3)
    accountant.add(event(9))
    assert accountant.epsilon().epsilon == first.epsilon
    with pytest.raises(ValueError, match="must stay within the budget of 10 .* got 11"):
        accountant.add(event(1))
    assert accountant.queries == 10
    with pytest.raises(ValueError, match="budget and epsilon must be the same"):
        accountant.add(RenyiBound(3.0, 0.02, 5, 0, "zero_out", budget=10))


def test_costs_beside_a_plan_void_its_fixed_count() -> None:
    planned = RenyiBound(3.0, 0.01, 5, 2, "zero_out", budget=10)
    screened = Accountant(1e-5).add([planned, GaussianScreening(5, 2, 1e-4, 1e-2)]).epsilon()
    assert screened.kind == "fixed" and screened.budget is None
