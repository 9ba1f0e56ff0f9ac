"""Sums of events: upper bounds, kinds, plans, budgets, what has no total; and whom they bind."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from privacy_cases import (
    BOXED,
    DELTA,
    bound,
    clipped,
    gaussian_delta,
    grid_delta,
    losses,
    offer,
    pooled,
    random_losses,
    theorem_epsilon,
)
from processes import ended

from adapmixed import (
    Accountant,
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    PMixED,
    PublicOnly,
    Unprotected,
)
from adapmixed.errors import BudgetSpentError
from adapmixed.limits import QUESTIONS
from adapmixed.mechanisms import Allowance, Mechanism, Ticket, UnprotectedPool
from adapmixed.privacy import (
    Caveat,
    Event,
    GaussianScreening,
    IndividualCharge,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
    read_ledger,
)
from adapmixed.privacy.composition import ShardBudget, clipped_mixing_epsilon
from adapmixed.privacy.conversions import c_alpha, replace_one_epsilon, zcdp_to_dp
from adapmixed.privacy.costs import RANGE_ERROR, bounded_range_rho, screening_rho
from adapmixed.privacy.events import Binding, Origin, to_json
from adapmixed.rng import SecureRandom, SeededRandom


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Use fewer grid points, which is fast; every test here holds for any number of them."""

    def quick(*arguments, **options):
        return clipped_mixing_epsilon(*arguments, **options, points=2**13)

    monkeypatch.setattr("adapmixed.privacy.guarantee.clipped_mixing_epsilon", quick)


def added(*events, delta=DELTA, **settings):
    return Accountant(delta, **settings).add(events)


def test_table_2b():
    """Table 2b of the paper: 0.472 + 0.002 + 0.450 = 0.924 over 9 728 queries."""
    mixing = losses(np.full((100, 1, 1), 0.472))
    parts = added(GaussianScreening(100, 9728, 1e-4, 1e-2), mixing).breakdown()
    assert [round(parts[k], 3) for k in ("mixing", "screening", "conversion", "total")] == [
        0.472, 0.002, 0.450, 0.924,
    ]  # fmt: skip
    assert parts["screening"] == pytest.approx(0.00175104, rel=1e-12)
    assert sum([parts["mixing"], parts["screening"], parts["conversion"]]) <= parts["total"]


def test_totals_are_upper_bounds_of_the_losses():
    accountant, exact = Accountant(DELTA), [Fraction(0)] * 5
    for seed in range(30):
        event = random_losses(seed, queries=1 + 13 * seed)
        accountant.add(event)
        for model, row in enumerate(event.loss[:, :, 0].tolist()):
            exact[model] += sum(map(Fraction, row))
    mixing = accountant.breakdown()["mixing"]
    assert Fraction(mixing) >= max(exact) and mixing <= float(max(exact)) * (1 + 1e-11)


def test_every_part_of_a_total_is_rounded_up():
    bound = [GaussianScreening(7, 3, 0.1, 0.3), RenyiBound(3.3, 0.1, 7, 3)]
    parts = Accountant(1e-5).add(bound).breakdown()
    assert Fraction(parts["mixing"]) >= 3 * Fraction(0.1)
    assert Fraction(parts["screening"]) >= Fraction(3.3) * 3 * Fraction(screening_rho(0.1, 0.3, 7))


def test_screening_adds_at_every_order_whatever_the_sequence_of_events():
    orders, screening = (2.0, 18.0), GaussianScreening(5, 1000, 0.5, 0.1)
    mixing = random_losses(1, orders=orders)
    first = added(screening, mixing).guarantee()
    assert first == added(mixing, screening).guarantee()
    shares = [c_alpha(order, DELTA / 2) for order in orders]
    per_order = [1000 * order * screening_rho(0.5, 0.1, 5) for order in orders]
    expected = (mixing.loss.sum(axis=1) + per_order + shares).min(axis=1).max()
    assert first.epsilon == pytest.approx(expected, rel=1e-6)


def test_fixed_bounds_compose_and_mix_with_realised_losses_of_the_same_order():
    fixed = added(bound(queries=100)).guarantee()
    assert fixed.kind == "fixed" and fixed.order == 3.0
    assert fixed.epsilon == pytest.approx(1.0 + c_alpha(3, DELTA), rel=1e-12)
    mixed = added(bound(queries=100), losses(np.full((5, 1, 1), 0.25), (3.0,))).guarantee()
    assert mixed.kind == "data-dependent, ex-post"
    assert mixed.epsilon == pytest.approx(1.25 + c_alpha(3, DELTA), rel=1e-9)


def test_screenings_alone_compose_exactly():
    screening, rho = GaussianScreening(10, 500, 0.1, 0.5), 500 * (0.1 / 5) ** 2
    guarantee = added(screening).guarantee()
    assert guarantee.kind == "fixed" and guarantee.adjacency == "zero_out"
    delta = gaussian_delta(math.sqrt(1000) / 50, guarantee.epsilon)  # Δ √T / σ
    assert DELTA * (1 - 1e-10) < delta <= DELTA
    assert guarantee.order is None and "composition of Gaussian mechanisms" in str(guarantee)
    # An order declared by the mechanism stays, even if every answer turned out to be public.
    declared = added(screening, losses(np.zeros((10, 0, 1))), PublicAnswer(500)).guarantee()
    assert (declared.order, declared.kind) == (18.0, "data-dependent, ex-post")
    assert declared.epsilon == pytest.approx(18 * rho + c_alpha(18, DELTA), rel=1e-12)
    free = added(GaussianScreening(10, 500, 0.0, 0.5)).guarantee()
    assert (free.epsilon, free.kind, free.order) == (0.0, "fixed", None)


SCHEDULES = [
    [pooled(), pooled(scale=5.0, lower=-3.0, upper=4.0)],
    [pooled(1, budget=50), pooled(scale=5.0)],
    [bound(epsilon=0.1), bound(epsilon=0.4)],
    [GaussianScreening(5, 1, 0.1, 1.0), GaussianScreening(5, 1, 0.1, 2.0), bound()],
    [GaussianScreening(5, 1, 0.1, 1.0), bound(budget=50)],
]
"""No event tells if the first answer decided the second setting."""


def test_kinds():
    public, published = PublicAnswer(3), bound(order=18.0, published=True)
    removed = losses(np.zeros((5, 1, 1)), adjacency="add_remove")
    cases = {
        "public": [[], [public], [UnprotectedAnswer(0)], [public, pooled(0)]],
        "fixed": [*SCHEDULES, [clipped(0), public]],
        "data-dependent, ex-post": [[public, losses(np.zeros((5, 1, 1)))]],
        "published": [[removed, published]],
        "none": [[published, UnprotectedAnswer(1)], [pooled(3), UnprotectedAnswer(1)]],
    }
    for kind, several in cases.items():
        for events in several:
            accountant = added(*events)
            guarantee = accountant.guarantee()
            assert guarantee.kind == kind and guarantee.unit == "shard"
            assert (guarantee.epsilon is None) == (kind == "none")
            scheduled = "published if the number of queries and the settings of each were"
            assert (scheduled in str(guarantee)) == (events in SCHEDULES)
            epsilon = math.inf if kind == "none" else guarantee.epsilon
            assert accountant.breakdown()["total"] == epsilon
            if kind == "public":
                assert (guarantee.epsilon, guarantee.delta, guarantee.adjacency) == (0.0, 0.0, None)
            if kind in ("public", "fixed"):
                assert accountant.get_epsilon(DELTA) == epsilon
            else:
                with pytest.raises(ValueError, match="epsilon must be that of a fixed total"):
                    accountant.get_epsilon(DELTA)
            if kind in ("data-dependent, ex-post", "published"):
                with pytest.raises(ValueError, match="adjacency must be 'zero_out' for a total"):
                    accountant.guarantee("replace_one")


def test_what_is_infinite_for_one_model_is_infinite():
    values = np.zeros((3, 2, 1))
    values[1, 0, 0] = np.inf
    huge = losses(np.full((3, 2, 1), 1.7e308))
    for events in ([losses(values)], [huge, huge], [clipped(lower=0.0)]):
        guarantee = added(*events).guarantee()
        assert guarantee.epsilon == math.inf and "ε = inf" in str(guarantee)
    assert added(clipped(upper=1.0)).guarantee().epsilon == 0.0  # it answers q


FAMILIES = {
    "clipped": clipped(),
    "pool": pooled(),
    "bound": bound(num_models=20),
    "losses": losses(np.zeros((20, 1, 1)), (3.0,)),
    "screening": GaussianScreening(20, 1, 0.1, 1.0),
}
RENYI = {"bound", "losses", "screening"}
UNEQUAL = [
    # one, another, and the argument in the message
    (random_losses(2), random_losses(2, 6), "num_models"),
    (random_losses(2), GaussianScreening(6, 1, 0.1, 1.0), "num_models"),
    (clipped(3), clipped(num_models=21), "num_models"),
    (random_losses(2), random_losses(2, orders=(17.0,)), "orders"),
    (random_losses(2), random_losses(2, adjacency="add_remove"), "adjacency"),
    (random_losses(2), bound(order=17.0), "orders"),
    (random_losses(2), bound(order=18.0, published=True), "adjacency"),
    (random_losses(2), "unprotected", "events must be privacy events, got str"),
    (random_losses(2), None, "events must be privacy events, got NoneType"),
    (clipped(3), clipped(lower=0.6), "of one plan, got .*lower=0.6, .*fixed beforehand"),
    (clipped(3), clipped(upper=1.7), "of one plan, got .*upper=1.7"),
    (clipped(3), clipped(budget=900), "of one plan, got .*budget=900"),
    (pooled(3, 50), pooled(0, 50, scale=1.0), "of one plan, got .*scale=1.0"),
    (
        bound(budget=10),
        bound(epsilon=0.02, queries=0, budget=10),
        "of one plan, got .*epsilon=0.02",
    ),
    (PublicAnswer(1), IndividualCharge(None, np.zeros((20, 1))), "epsilon must be given"),
]


@pytest.mark.parametrize(("first", "second", "words"), UNEQUAL)
def test_what_has_no_joint_total_is_refused_and_nothing_is_added(first, second, words):
    accountant = added(first)
    before = accountant.state()
    with pytest.raises(ValueError, match=words):
        accountant.add([PublicAnswer(1), second])
    assert accountant.state() == before


@pytest.mark.parametrize("first", FAMILIES)
@pytest.mark.parametrize("second", FAMILIES)
def test_mechanisms_do_not_mix_in_any_sequence(first, second):
    accountant = added(FAMILIES[first])
    if first == second or {first, second} <= RENYI:
        assert accountant.add(FAMILIES[second]) is accountant
    else:
        with pytest.raises(ValueError, match="method must be .* whose fixed ε and δ add"):
            accountant.add(FAMILIES[second])


def test_no_answer_is_free_but_public_ones():
    events = [*FAMILIES.values(), UnprotectedAnswer(1), PublicAnswer(1)]
    free = {Caveat, Binding, IndividualCharge}  # the last needs a budget
    assert {type(each) for each in events} >= {*Event.__subclasses__()} - free
    for event in events:
        stated = added(event).guarantee()
        assert (stated.kind == "public") == (stated.epsilon == 0) == isinstance(event, PublicAnswer)


PLANS = {
    # an answer of a plan of 10, and the same answers without a plan if there are such
    "bound": (bound(budget=10), lambda n: bound(queries=n), "renyi"),
    "pool": (pooled(budget=10), pooled, "bounded range"),
    "clipped": (clipped(budget=10), None, "pld"),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_first_answer_charges_the_whole_plan_which_is_not_exceeded(name, tmp_path):
    """Also after the ledger was opened again."""
    planned, unplanned, method = PLANS[name]
    path = tmp_path / "ledger.db"
    with Accountant(DELTA, path=path) as accountant:
        first = accountant.add(planned).guarantee()
        assert (first.kind, first.budget, first.queries, first.method) == ("fixed", 10, 1, method)
        assert "Up to 10 answered queries are" in str(first)
        if unplanned is not None:
            whole = added(unplanned(10)).guarantee()
            assert first.epsilon == whole.epsilon and whole.budget is None
            assert "if the number of queries and the settings of each were fixed" in str(whole)
    with Accountant(DELTA, path=path) as accountant:
        accountant.add([*[planned] * 9, PublicAnswer(3)])
        mixed = accountant.guarantee()
        assert "Up to 10 answered queries, not counting 3 from public" in str(mixed)
        assert (mixed.epsilon, mixed.queries, mixed.public_queries) == (first.epsilon, 13, 3)
        charges = accountant.charges
        with pytest.raises(BudgetSpentError, match="queries must stay within the 10 .* got 11"):
            accountant.add(planned)
        assert accountant.queries == 13 and accountant.charges == charges
    if unplanned is not None:
        both = added(planned, unplanned(1)).guarantee()
        assert both.budget is None and both.epsilon > first.epsilon


@pytest.mark.parametrize("event", [bound(queries=10), clipped(), pooled(100)])
def test_every_question_is_answered(event):
    accountant, other = added(event), added(event, adjacency="replace_one")
    stated = {way: accountant.guarantee(way) for way in QUESTIONS}
    assert stated["zero_out"].epsilon < stated["replace_one"].epsilon
    assert {way: g.adjacency for way, g in stated.items()} == {way: way for way in QUESTIONS}
    assert other.guarantee() == stated["replace_one"]
    assert other.guarantee("zero_out") == stated["zero_out"]
    assert other.breakdown()["total"] == other.get_epsilon(DELTA) == stated["replace_one"].epsilon
    for question in ("add_remove", "remove"):
        with pytest.raises(ValueError, match="adjacency must be one of"):
            accountant.guarantee(question)


def test_a_fixed_loss_passes_to_a_replaced_shard_through_the_emptied_one():
    accountant = added(bound(queries=10), GaussianScreening(5, 10, 0.1, 1.0))
    guarantee, parts = accountant.guarantee("replace_one"), accountant.breakdown()
    spent = parts["mixing"] + parts["screening"]
    assert guarantee.epsilon == pytest.approx(replace_one_epsilon(3.0, spent, DELTA), rel=1e-12)
    assert guarantee.epsilon > 2 * accountant.guarantee().epsilon


def test_a_box_is_composed_as_its_pair():
    expected = clipped_mixing_epsilon(0.7, 1.6, 20, 500, DELTA, "zero_out", points=2**13)
    for answers in (clipped(), clipped(0)):  # a mechanism that answered nothing declared its plan
        assert added(answers).guarantee().epsilon == expected > 0


@pytest.mark.parametrize(("way", "factor"), [("zero_out", 1), ("replace_one", 4)])
def test_the_log_pool_is_composed_by_its_range(way, factor):
    rho = (2 * 0.75 / 20) ** 2 / 8
    cost = bounded_range_rho(2.0, -0.25, 0.5, 20, way)
    assert factor * rho < cost <= factor * rho * (1 + 3 * RANGE_ERROR)
    accountant = added(pooled(300), pooled(700), adjacency=way)
    guarantee, parts = accountant.guarantee(), accountant.breakdown()
    exact = theorem_epsilon(1000 * factor * rho, factor * rho, DELTA)
    assert exact <= guarantee.epsilon <= exact * (1 + 1e-8)
    assert guarantee.order is None and parts["mixing"] == parts["total"] == guarantee.epsilon
    assert parts["screening"] == parts["conversion"] == 0.0
    few, span = added(pooled(16), adjacency=way).guarantee().epsilon, math.sqrt(8 * factor * rho)
    assert grid_delta(span, 16, few) <= DELTA < grid_delta(span, 16, few / 1.02)
    # A public schedule adds up.
    largest = factor * (2.25 / 20) ** 2 / 8
    exact = theorem_epsilon(300 * factor * rho + 200 * largest, largest, DELTA)
    both = added(pooled(300), pooled(200, scale=1.0, upper=2.0), adjacency=way).guarantee()
    assert exact <= both.epsilon <= exact * (1 + 1e-8)


def test_several_orders_split_delta():
    orders = (2.0, 6.0, 18.0, 60.0)
    for seed in range(20):
        event = random_losses(seed, orders=orders, queries=200)
        guarantee, totals = added(event).guarantee(), event.loss.sum(axis=1)
        # The report does not pick the best order of each model afterwards for free.
        naive = (totals + [c_alpha(order, DELTA) for order in orders]).min(axis=1).max()
        split = (totals + [c_alpha(order, DELTA / 4) for order in orders]).min(axis=1).max()
        assert naive + 1e-6 < guarantee.epsilon == pytest.approx(split, rel=1e-6)
        assert guarantee.order in orders and guarantee.orders == orders
    for count in (1, 2, 3, 7, 10, 32):  # the shares of δ add up to no more
        orders = tuple(2.0 + k for k in range(count))
        guarantee = added(losses(np.zeros((3, 0, count)), orders)).guarantee()
        share = DELTA if count == 1 else math.nextafter(DELTA / count, 0.0)
        assert count * Fraction(share) <= Fraction(DELTA)
        assert guarantee.epsilon == c_alpha(orders[-1], share) and guarantee.order == orders[-1]


def test_a_state_of_something_else_is_refused():
    for state in ({}, {"settings": {}}, {"settings": {}, "counts": []}):
        with pytest.raises(ValueError, match="must have"):
            Accountant.from_state(state)
    accountant = Accountant(DELTA)
    accountant.charge(offer([Caveat("base")]))
    for name, value in (("num_models", "5"), ("order", 2), ("mechanism", None), ("more", 1)):
        changed = accountant.state()
        changed["counts"][0][0][name] = value
        with pytest.raises(ValueError, match="must be|Binding must have mechanism"):
            Accountant.from_state(changed)
    for queries in (-1, 1.0, True):
        changed = accountant.state()
        changed["counts"][0][1] = queries
        with pytest.raises(ValueError, match="counts queries must be an integer"):
            Accountant.from_state(changed)


# Budgets of every shard; the audit `budgets` attacks them on trees

both_ways = pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])


@both_ways
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
@pytest.mark.parametrize(
    ("order", "largest"), [(None, None), (2.5, None), (12.0, None), (None, 1e-7), (None, 1e-5)]
)
def test_a_budget_is_the_largest_for_its_epsilon(epsilon, order, largest, adjacency):
    least = 0.0 if order is None else ShardBudget(0.0, order).epsilon(DELTA, adjacency)
    if epsilon < least:
        with pytest.raises(ValueError, match="epsilon must be >"):
            ShardBudget.for_epsilon(epsilon, DELTA, order, adjacency)
        return
    budget = ShardBudget.for_epsilon(epsilon, DELTA, order, adjacency, largest)
    assert budget.epsilon(DELTA, adjacency) <= epsilon and budget.largest == largest
    larger = ShardBudget(budget.amount * (1 + 1e-6), order, largest)
    assert larger.epsilon(DELTA, adjacency) > epsilon
    once, replaced = (budget.epsilon(DELTA, way) for way in ("zero_out", "replace_one"))
    if largest is not None:
        plain = ShardBudget.for_epsilon(epsilon, DELTA, None, adjacency)
        assert budget.amount > 1.05 * plain.amount
        for stated, factor in ((once, 1), (replaced, 4)):
            exact = theorem_epsilon(factor * budget.amount, factor * largest, DELTA)
            assert exact <= stated <= exact * (1 + 1e-9)
    elif order is None:
        assert once == zcdp_to_dp(budget.amount, DELTA)
        assert replaced == pytest.approx(zcdp_to_dp(4 * budget.amount, DELTA), rel=1e-12)
    else:
        assert once == pytest.approx(budget.amount + c_alpha(order, DELTA))
        # Through the emptied shard: (2 e, (1 + e^e) d) with the d that gives delta in total.
        share = DELTA / (1 + math.exp(replaced / 2))
        assert replaced == pytest.approx(2 * (budget.amount + c_alpha(order, share)), rel=1e-9)


@both_ways
@pytest.mark.parametrize("mechanism", [ClippedLogPool(-0.25, 1.0, scale=2.0), BOXED])
def test_an_accountant_states_the_budget_and_keeps_it(mechanism, adjacency):
    accountant = Accountant(DELTA, epsilon=12.0, adjacency=adjacency)
    for name in ("spent", "limit"):
        for early in (accountant, Accountant(DELTA)):
            with pytest.raises(ValueError, match="spent and limit need an accountant with epsi"):
                getattr(early, name)
    accountant.bind(mechanism, 3)
    largest = mechanism.largest_charge(3)
    budget = ShardBudget.for_epsilon(12.0, DELTA, mechanism.charge_order, adjacency, largest)
    assert accountant.limit == budget.amount and accountant.spent.tolist() == [0.0] * 3
    if largest is not None:  # of one answer; their sum exceeds it
        nominal, before = (2.0 * 1.25 / 3) ** 2 / 8, accountant.state()
        assert nominal < largest < nominal * (1 + 1e-8)
        assert largest >= bounded_range_rho(2.0, -0.25, 1.0, 3, "zero_out") * (1 - 1e-15)
        more = np.full((3, 1), math.nextafter(largest, 1.0))
        bad = offer(charges=more, mechanism=mechanism)
        with pytest.raises(ValueError, match="charge must keep every shard within its budget"):
            accountant.charge(bad)
        with pytest.raises(ValueError, match="its charge failed"):
            bad.release()
        assert accountant.state() == before
    part = min(0.4 * budget.amount, largest or math.inf)
    for _ in range(int(budget.amount // part)):
        ticket = offer(charges=np.full((3, 1), part), mechanism=mechanism)
        accountant.charge(ticket)
        assert ticket._members.all() and (accountant.spent <= budget.amount).all()
    assert accountant.spent[0] > 2 * part * (1 - 1e-9)
    for charges in ([[part]] * 3, [[math.nan]] * 3, [[math.inf]] * 3):
        late = offer(charges=charges, mechanism=mechanism)
        accountant.charge(late)  # a shard that cannot pay never raises
        assert not late._members.any()
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
    event = IndividualCharge(None, np.full((3, 2), limit / 2.5))
    accountant.add([PublicAnswer(1), event])
    assert accountant.limit == limit and accountant.queries == 3
    for other, words in (
        (event, "charge must keep every shard within its budget"),
        (IndividualCharge(4.0, np.zeros((3, 1))), "must keep .* got one of order 4.0"),
        (IndividualCharge(None, np.zeros((2, 1))), "num_models must be the same"),
    ):
        with pytest.raises(ValueError, match=words):
            accountant.add(other)
    assert accountant.queries == 3
    unlimited = accountant.state() | {"epsilon": None}
    with pytest.raises(AttributeError, match="epsilon"):  # there is none, not that of nothing
        Accountant.from_state(unlimited).guarantee()


@pytest.mark.parametrize("event", [*FAMILIES.values(), UnprotectedAnswer(1)])
def test_under_a_budget_every_cost_is_one_members_own(event):
    accountant = Accountant(DELTA, epsilon=2.0)
    charge = IndividualCharge(None, np.zeros((20, 1)))
    for events in ([event, charge], [charge, event]):
        with pytest.raises(ValueError, match="must be IndividualCharge under a budget of every"):
            accountant.add(events)
    assert accountant.add(PublicAnswer(2)).guarantee().queries == 2


POOL, BOX = ClippedLogPool(-1.0, 1.0), ClippedMixing(0.5, 4.0, queries=10)


def proposed(
    mechanism: Mechanism, models: int = 3, positions: int = 1, seed: int = 0, rng: Any = None
) -> Ticket:
    """Return a ticket over a few random logits."""
    generator = torch.Generator().manual_seed(seed)
    private = 3 * torch.randn(models, positions, 8, generator=generator)
    public = torch.randn(positions, 8, generator=generator)
    return mechanism.propose(private, public, rng=rng or SecureRandom())


def test_a_ticket_shows_public_constants_alone() -> None:
    """Private attributes hold the bits of the screening and the costs."""
    ticket = proposed(AdaPMixED(18.0, 0.2))
    shown = {name for name in vars(ticket) if not name.startswith("_")}
    assert shown == {"mechanism", "num_models", "origin"}
    assert {name for name in dir(ticket) if not name.startswith("_")} == shown | {
        "charge",
        "release",
    }


def test_a_forked_child_spends_nothing() -> None:
    accountant, waiting = Accountant(DELTA), proposed(BOX)

    def work() -> None:
        for use in (
            lambda: accountant.charge(waiting),
            lambda: accountant.charge_ahead(Allowance(POOL, 3), 1),
            lambda: accountant.add(PublicAnswer(1)),
            lambda: accountant.bind(PublicOnly(), 3),
        ):
            with pytest.raises(ValueError, match="in the process that made it"):
                use()

    assert ended(work) == 0
    accountant.charge(waiting)
    assert accountant.queries == 1


def test_public_answers_cost_nothing_under_a_budget_of_every_shard(tmp_path: Path) -> None:
    with Accountant(DELTA, epsilon=2.0, path=tmp_path / "ledger") as accountant:
        for count in (1, 2):
            ticket = proposed(PublicOnly())
            accountant.charge(ticket)
            assert ticket.release().tokens.shape == (1,) and accountant.queries == count
        assert accountant.guarantee().epsilon == 0 and not accountant.spent.any()


def test_what_raises_writes_nothing(tmp_path: Path) -> None:
    """Neither the failed charge is written nor the binding that would come before it."""
    path = tmp_path / "ledger.db"
    with Accountant(DELTA, path=path) as accountant:
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        spent, seeds = BudgetSpentError, r"rng must be SecureRandom\(\) if charges go to a ledger"
        for wrong, kind, words in (
            (proposed(BOX, positions=11), spent, "queries must stay within the 10"),
            (proposed(replace(POOL, queries=2), 3, 3), spent, "queries must stay within the 2"),
            (proposed(replace(BOX, queries=None)), ValueError, "queries must be given"),
            (proposed(BOX, rng=SeededRandom(1)), ValueError, seeds),
        ):
            with pytest.raises(kind, match=words):
                accountant.charge(wrong)
            with pytest.raises(ValueError, match="it is not charged"):
                wrong.release()
        for use in (
            lambda: accountant.add([Caveat("seeded")]),
            lambda: accountant.charge_ahead(Allowance(POOL, 3, seeded=True), 1),
        ):
            with pytest.raises(ValueError, match=seeds):
                use()
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
        assert accountant.charges == 0 and accountant.state()["counts"] == []
        accountant.charge(proposed(BOX))
    assert read_ledger(path).charges == 2  # the binding and the charge
    with Accountant(DELTA, epsilon=2.0, path=tmp_path / "budget.db") as accountant:
        with pytest.raises(ValueError, match=seeds):
            accountant.charge(proposed(POOL, rng=SeededRandom(1)))


def test_a_ledger_remembers_whom_it_protects(tmp_path: Path) -> None:
    for unit, words in (("user", "everything of one 'user'"), (None, "one whole shard")):
        path = tmp_path / f"{unit}.db"
        with Accountant(DELTA, path=path) as accountant:
            accountant.bind(POOL, 3, Origin("these members", unit=unit))
            with pytest.raises(ValueError, match="'unit': .* needs an accountant of its own"):
                accountant.bind(POOL, 3, Origin("these members", unit="another"))
        read = read_ledger(path)
        assert words in str(read.guarantee)
        assert json.loads(list(read.records())[1].text)[0]["unit"] == unit
        assert Accountant.from_state(to_json(read.account)).guarantee() == read.guarantee


def test_an_accountant_is_bound_to_one_mechanism_ensemble_and_n(tmp_path: Path) -> None:
    """Also after its ledger was opened again, or its state was read."""
    path = tmp_path / "ledger.db"
    accountant = Accountant(DELTA, path=path)
    for same in (BOX.upper, np.float64(BOX.upper), int(BOX.upper)):  # numbers of another type
        accountant.bind(replace(BOX, upper=same), 3, Origin("these members", (), 7))
    origin = Origin("these members", active_tokens=7)  # caveats do not bind
    others = POOL, replace(BOX, queries=11), replace(BOX, upper=BOX.upper + 1)
    wrong: list[Any] = [(BOX, 3, replace(origin, ensemble=other)) for other in ("others", None)]
    wrong += [(other, 3, origin) for other in others]
    wrong += [(BOX, 4, origin), (BOX, 3, replace(origin, active_tokens=8))]

    def refuses(opened: Accountant) -> None:
        before = opened.state()
        for binding in wrong:
            with pytest.raises(ValueError, match="charged for what it is bound to") as caught:
                opened.bind(*binding)
            assert "these members" not in str(caught.value)  # a digest of the members
            assert (binding in wrong[:2]) == ("got another ensemble" in str(caught.value))
        with pytest.raises(ValueError, match="accountant must be charged for what it is bound to"):
            opened.charge(proposed(BOX))
        with pytest.raises(ValueError, match="must not be bound to a mechanism to take events"):
            opened.add(PublicAnswer(1))
        opened.bind(BOX, 3, origin)
        assert opened.state() == before

    refuses(accountant)
    refuses(Accountant.from_state(accountant.state()))
    assert accountant.charges == 1
    accountant.close()
    with Accountant(DELTA, path=path) as again:
        refuses(again)
        assert again.charges == read_ledger(path).charges == 1


@pytest.mark.parametrize(
    "event", [PublicAnswer(1), GaussianScreening(3, 1, 0.5, 1.0), Caveat("shards")]
)
def test_an_accountant_takes_events_or_tickets(event: Event) -> None:
    accountant, late = Accountant(DELTA).add(event), proposed(BOX)
    before = accountant.queries
    with pytest.raises(ValueError, match="must have charged nothing before it is bound"):
        accountant.charge(late)
    with pytest.raises(ValueError, match="it is not charged"):
        late.release()
    assert accountant.queries == before


@pytest.mark.parametrize(
    ("mechanism", "settings", "words"),
    [
        (PMixED(2.0, DELTA, 10, 18.0), {"epsilon": 2.0}, "its charge is the same for every member"),
        (AdaPMixED(18.0, 0.2), {"epsilon": 2.0}, "its losses depend on the other members"),
        (AdaPMixED(18.0, 0.2, None), {"epsilon": 2.0}, "epsilon must be None for AdaPMixED"),
        (Unprotected(), {"epsilon": 2.0}, "it has no bound that could be charged"),
        (UnprotectedPool(), {"epsilon": 2.0}, "it has no bound that could be charged"),
        (BOX, {"epsilon": 2.0}, "its charges need an order"),
        (replace(POOL, queries=10), {"epsilon": 2.0}, "queries must be None if .* got 10: any num"),
        (replace(BOX, queries=None), {}, "queries must be given to ClippedMixing"),
        (AdaPMixED(18.0, 0.2), {"adjacency": "replace_one"}, "adjacency must be 'zero_out'"),
        (PMixED(2.0, 1e-6, 10, 18.0), {}, "delta must be the mechanism's own, 1e-06"),
    ],
)
def test_mechanisms_without_a_guarantee_under_the_settings(
    mechanism: Mechanism, settings: dict[str, Any], words: str
) -> None:
    accountant, ticket = Accountant(DELTA, **settings), proposed(mechanism)
    for use in (lambda: accountant.bind(mechanism, 3), lambda: accountant.charge(ticket)):
        with pytest.raises(ValueError, match=words):
            use()
    with pytest.raises(ValueError, match="it is not charged"):
        ticket.release()
    assert accountant.queries == 0
