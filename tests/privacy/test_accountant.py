"""Composition of realised losses, Rényi bounds and screenings: upper bounds, kinds, mixtures."""

import math
from fractions import Fraction

import numpy as np
import pytest
from accountant_cases import DELTA, bound, losses, random_losses

from adapmixed.errors import BudgetSpentError
from adapmixed.privacy import Accountant, GaussianScreening, PublicAnswer, UnprotectedAnswer
from adapmixed.privacy.conversions import c_alpha, replace_one_epsilon
from adapmixed.privacy.costs.adapmixed import screening_rho


def test_table_2b():
    """Table 2b of the paper: 0.472 + 0.002 + 0.450 = 0.924 over 9 728 queries."""
    mixing = losses(np.full((100, 1, 1), 0.472))
    accountant = Accountant(DELTA)
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
    assert accountant.guarantee().epsilon == parts["total"]


def test_a_loss_of_zero_costs_nothing():
    accountant = Accountant(DELTA)
    for _ in range(50):
        accountant.add(losses(np.zeros((4, 7, 1))))
    assert accountant.guarantee().epsilon == c_alpha(18, DELTA)
    assert accountant.guarantee().queries == accountant.queries == 350


def test_no_answer_costs_exactly_the_conversion():
    accountant = Accountant(DELTA)
    accountant.add([losses(np.zeros((4, 0, 1))), PublicAnswer(350)])
    guarantee = accountant.guarantee()
    assert guarantee.epsilon == c_alpha(18, DELTA)
    assert (guarantee.queries, guarantee.public_queries) == (350, 350)


def test_totals_are_upper_bounds_of_the_losses():
    accountant, chunks = Accountant(DELTA), []
    for seed in range(30):
        values = random_losses(seed, queries=1 + 13 * seed).loss
        chunks.append(values)
        accountant.add(losses(values))
    exact = [Fraction(0)] * 5
    for values in chunks:
        for model, row in enumerate(values[:, :, 0].tolist()):
            exact[model] += sum(map(Fraction, row))
    found = accountant.breakdown()["mixing"]
    assert Fraction(found) >= max(exact)
    assert found <= float(max(exact)) * (1 + 1e-11)


def test_per_model_never_exceeds_the_paper_rule():
    """The paper charges the largest loss of each query to all members."""
    for seed in range(40):
        event = random_losses(seed, num_models=1 + seed % 6)
        largest = losses(np.broadcast_to(event.loss.max(0), event.loss.shape))
        per_model = Accountant(DELTA).add(event).guarantee().epsilon
        paper = Accountant(DELTA).add(largest).guarantee().epsilon
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
    first = Accountant(DELTA).add([screening, mixing]).guarantee()
    second = Accountant(DELTA).add([mixing, screening]).guarantee()
    assert first == second
    shares = [c_alpha(order, DELTA / 2) for order in orders]
    per_order = [1000 * order * screening_rho(0.5, 0.1, 5) for order in orders]
    expected = (mixing.loss.sum(axis=1) + per_order + shares).min(axis=1).max()
    assert first.epsilon == pytest.approx(expected, rel=1e-6)


def test_fixed_bounds_compose_and_mix_with_realised_losses_of_the_same_order():
    fixed = Accountant(DELTA).add(bound(queries=100)).guarantee()
    assert fixed.kind == "fixed" and fixed.order == 3.0
    assert fixed.epsilon == pytest.approx(1.0 + c_alpha(3, DELTA), rel=1e-12)
    event = losses(np.full((5, 1, 1), 0.25), (3.0,))
    mixed = Accountant(DELTA).add([bound(queries=100), event]).guarantee()
    assert mixed.kind == "data-dependent, ex-post"
    assert mixed.epsilon == pytest.approx(1.25 + c_alpha(3, DELTA), rel=1e-9)


def test_screening_alone_is_fixed_at_the_best_order():
    screening = GaussianScreening(10, 500, 0.1, 0.5)
    accountant = Accountant(DELTA).add(screening)
    guarantee, rho = accountant.guarantee(), 500 * (0.1 / 5) ** 2
    assert guarantee.kind == "fixed" and guarantee.adjacency == "zero_out"
    assert guarantee.order > 1
    best = min(a * rho + c_alpha(a, DELTA) for a in 1 + np.exp(np.linspace(-3, 6, 3000)))
    assert guarantee.epsilon == pytest.approx(best, rel=1e-5)
    assert accountant.breakdown()["total"] == guarantee.epsilon
    # An order declared by the mechanism stays, even if every answer turned out to be public.
    events = [screening, losses(np.zeros((10, 0, 1))), PublicAnswer(500)]
    declared = Accountant(DELTA).add(events).guarantee()
    assert (declared.order, declared.kind) == (18.0, "data-dependent, ex-post")
    assert declared.epsilon == pytest.approx(18 * rho + c_alpha(18, DELTA), rel=1e-12)
    free = Accountant(DELTA).add(GaussianScreening(10, 500, 0.0, 0.5)).guarantee()
    assert (free.epsilon, free.kind, free.order) == (0.0, "fixed", None)


def test_kinds():
    public = [PublicAnswer(3)]
    published = bound(order=18.0, published=True)
    removed = losses(np.zeros((5, 1, 1)), adjacency="add_remove")
    cases = {
        "public": public,
        "fixed": [*public, bound(), GaussianScreening(5, 1, 0.1, 1.0)],
        "data-dependent, ex-post": [*public, losses(np.zeros((5, 1, 1)))],
        "published": [removed, published],
        "none": [published, UnprotectedAnswer(1)],
    }
    for kind, events in cases.items():
        guarantee = Accountant(DELTA).add(events).guarantee()
        assert guarantee.kind == kind
        assert (guarantee.epsilon is None) == (kind == "none")
        assert guarantee.unit == "shard"
    assert Accountant(DELTA).add(UnprotectedAnswer(0)).guarantee().kind == "public"


def test_only_what_is_fixed_has_an_epsilon_at_another_delta():
    fixed = Accountant(DELTA).add(bound(queries=10))
    assert fixed.get_epsilon(DELTA) == fixed.guarantee().epsilon
    again = Accountant(1e-7).add(bound(queries=10))
    assert fixed.get_epsilon(1e-7) == again.guarantee().epsilon > fixed.get_epsilon(DELTA)
    assert Accountant(DELTA).get_epsilon(0.05) == 0.0
    for events in (losses(np.zeros((5, 1, 1))), bound(published=True), UnprotectedAnswer(1)):
        with pytest.raises(ValueError, match="epsilon must be that of a fixed total, got one of"):
            Accountant(DELTA).add(events).get_epsilon(DELTA)


def test_no_events_cost_nothing():
    guarantee = Accountant(DELTA).guarantee()
    assert (guarantee.epsilon, guarantee.delta, guarantee.kind) == (0.0, 0.0, "public")
    assert guarantee.queries == 0 and guarantee.adjacency is None and guarantee.order is None
    assert Accountant(DELTA).breakdown()["total"] == 0.0
    unprotected = Accountant(DELTA).add(UnprotectedAnswer(1))
    assert unprotected.breakdown()["total"] == math.inf
    assert unprotected.guarantee().delta == 1.0


def test_infinite_loss_of_one_model_only_makes_the_total_infinite():
    values = np.zeros((3, 2, 1))
    values[1, 0, 0] = np.inf
    guarantee = Accountant(DELTA).add(losses(values)).guarantee()
    assert guarantee.epsilon == math.inf
    assert "ε = inf" in str(guarantee)
    huge = losses(np.full((3, 2, 1), 1.7e308))
    assert Accountant(DELTA).add([huge, huge]).guarantee().epsilon == math.inf


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (losses(np.zeros((6, 1, 1))), "num_models must be the same in every event, got 6 after 5"),
        (GaussianScreening(6, 1, 0.1, 1.0), "num_models must be the same"),
        (losses(np.zeros((5, 1, 1)), (17.0,)), r"orders and adjacency must be .*, got \(\(17\.0,"),
        (bound(order=17.0), "orders and adjacency must be the same"),
        (losses(np.zeros((5, 1, 1)), adjacency="add_remove"), "orders and adjacency must be the"),
        (bound(order=18.0, published=True), "orders and adjacency must be the same"),
        ("unprotected", "events must be privacy events, got str"),
    ],
)
def test_disagreeing_events_are_refused_and_nothing_is_added(second, message):
    accountant = Accountant(DELTA).add(random_losses(2))
    before = accountant.guarantee()
    with pytest.raises(ValueError, match=message):
        accountant.add([random_losses(3), second])
    assert accountant.guarantee() == before


def test_a_budget_is_charged_at_once_and_not_exceeded() -> None:
    accountant = Accountant(1e-5).add(bound(budget=10))
    first = accountant.guarantee()
    whole = Accountant(1e-5).add(bound(queries=10)).guarantee()
    assert first.epsilon == whole.epsilon
    assert first.budget == 10 and whole.budget is None
    assert "Up to 10 answered queries are" in str(first)
    assert "if the number of queries and the settings of each were fixed" in str(whole)
    mixed = Accountant(1e-5).add([bound(budget=10), PublicAnswer(3)]).guarantee()
    assert "Up to 10 answered queries, not counting 3 from public values only, are" in str(mixed)
    assert (mixed.epsilon, mixed.queries, mixed.public_queries) == (first.epsilon, 4, 3)
    accountant.add(bound(queries=9, budget=10))
    assert accountant.guarantee().epsilon == first.epsilon
    with pytest.raises(BudgetSpentError, match="must stay within the 10 .* planned for, got 11"):
        accountant.add(bound(budget=10))
    assert accountant.queries == 10
    with pytest.raises(ValueError, match="epsilon must be the same in every planned answer"):
        accountant.add(bound(epsilon=0.02, queries=0, budget=10))


def test_costs_beside_a_plan_void_its_fixed_count() -> None:
    planned, screening = bound(queries=2, budget=10), GaussianScreening(5, 2, 1e-4, 1e-2)
    screened = Accountant(1e-5).add([planned, screening]).guarantee()
    assert screened.kind == "fixed" and screened.budget is None


def test_a_fixed_loss_passes_to_a_replaced_shard_through_the_emptied_one() -> None:
    accountant = Accountant(DELTA).add([bound(queries=10), GaussianScreening(5, 10, 0.1, 1.0)])
    found, parts = accountant.guarantee("replace_one"), accountant.breakdown()
    spent = parts["mixing"] + parts["screening"]
    assert found.epsilon == pytest.approx(replace_one_epsilon(3.0, spent, DELTA), rel=1e-12)
    assert found.epsilon > 2 * accountant.guarantee().epsilon
    asked = Accountant(DELTA, adjacency="replace_one").add(bound(queries=10))
    assert asked.guarantee().adjacency == "replace_one"
    assert (
        asked.breakdown()["total"]
        == asked.guarantee().epsilon
        > asked.guarantee("zero_out").epsilon
    )


@pytest.mark.parametrize("events", [random_losses(1), bound(published=True)])
def test_what_is_not_fixed_has_no_statement_for_a_replaced_shard(events) -> None:
    accountant = Accountant(DELTA).add(events)
    with pytest.raises(ValueError, match="must be 'zero_out' for a total that is not fixed"):
        accountant.guarantee("replace_one")


def test_a_guarantee_of_the_papers_leave_one_out_says_so() -> None:
    found = Accountant(DELTA).add(random_losses(1, adjacency="add_remove")).guarantee()
    assert found.adjacency == "add_remove" and "the paper's leave-one-out" in str(found)
    zero_out = Accountant(DELTA).add(random_losses(1)).guarantee()
    assert zero_out.adjacency == "zero_out" and "zero-out" in str(zero_out)
