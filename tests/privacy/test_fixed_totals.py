"""ClippedAnswer and BoundedRangeAnswer in the accountant: budgets, refusals, neighbours, words."""

import math

import numpy as np
import pytest

from adapmixed.privacy import (
    QUESTIONS,
    RANGE_ERROR,
    Accountant,
    BoundedRangeAnswer,
    ClippedAnswer,
    GaussianScreening,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
    bounded_range_rho,
    c_alpha,
    clipped_mixing_epsilon,
    fixed_totals,
    screening_rho,
    zcdp_to_dp,
)

DELTA = 1e-5
CONDITION = "may be published if the number of queries and the settings of each were fixed, too"


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Fewer grid points: quick, and every statement below holds for any number of them."""

    def quick(*arguments, **options):
        return clipped_mixing_epsilon(*arguments, **options, points=2**13)

    monkeypatch.setattr(fixed_totals, "clipped_mixing_epsilon", quick)


def clipped(queries=1, budget=500, **changes):
    fields = {"lower": 0.7, "upper": 1.6, "num_models": 20, **changes}
    return ClippedAnswer(**fields, queries=queries, budget=budget)


def pooled(queries=1, budget=None, **changes):
    fields = {"scale": 2.0, "lower": -0.25, "upper": 0.5, "num_models": 20, **changes}
    return BoundedRangeAnswer(**fields, queries=queries, budget=budget)


def test_the_whole_budget_is_charged_with_the_first_answer():
    accountant = Accountant(DELTA).add(clipped())
    first = accountant.epsilon()
    expected = clipped_mixing_epsilon(0.7, 1.6, 20, 500, DELTA, "zero_out", points=2**13)
    assert first.epsilon == expected > 0
    assert (first.kind, first.budget, first.queries, first.method) == ("fixed", 500, 1, "pld")
    assert (first.rule, first.order, first.adjacency) == (None, None, "zero_out")
    accountant.add([clipped(499), PublicAnswer(7)])
    assert accountant.epsilon().epsilon == first.epsilon and accountant.queries == 507
    with pytest.raises(ValueError, match="queries must stay within the budget of 500 .* got 501"):
        accountant.add(clipped())
    assert accountant.queries == 507
    # A mechanism that answered nothing has declared its plan.
    assert Accountant(DELTA).add(clipped(0)).epsilon().epsilon == first.epsilon


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (clipped(lower=0.6), "lower must be the same in every ClippedAnswer.*fixed beforehand"),
        (clipped(upper=1.7), r"upper must be the same in every ClippedAnswer, got \{'upper': 1.7"),
        (clipped(budget=900), "budget must be the same in every ClippedAnswer"),
        (clipped(budget=None), "budget of a ClippedAnswer must be an integer >= 1, got None"),
        (clipped(num_models=21), "num_models must be the same in every event, got 21 after 20"),
        (pooled(), "events must come from one mechanism, got BoundedRangeAnswer after ClippedAns"),
        (RenyiBound(3.0, 0.1, 20, 1, "zero_out"), "one mechanism, got realised losses or Rényi"),
        (LeaveOneOutLoss((3.0,), np.zeros((20, 1, 1)), "zero_out", 0.0), "one mechanism"),
        (GaussianScreening(20, 1, 0.1, 1.0), "screening must begin with the first query"),
    ],
)
def test_what_is_not_fixed_beforehand_is_refused(second, message):
    accountant = Accountant(DELTA).add(clipped(3))
    before = accountant.epsilon()
    with pytest.raises(ValueError, match=message):
        accountant.add([PublicAnswer(1), second])
    assert accountant.epsilon() == before


def test_mechanisms_do_not_mix_in_any_sequence():
    events = {
        "clipped": clipped(),
        "pool": pooled(),
        "bound": RenyiBound(3.0, 0.1, 20, 1, "zero_out"),
    }
    for first in events:
        for second in events:
            accountant = Accountant(DELTA).add(events[first])
            if first == second:
                accountant.add(events[second])
            else:
                with pytest.raises(ValueError, match="whose fixed ε and δ add"):
                    accountant.add(events[second])


def test_screening_is_composed_for_the_whole_budget():
    screening = GaussianScreening(20, 1, 0.1, 1.0)
    accountant = Accountant(DELTA).add([screening, clipped()])
    rho = screening_rho(0.1, 1.0, 20)
    guarantee, parts = accountant.epsilon(), accountant.breakdown()
    expected = clipped_mixing_epsilon(
        0.7, 1.6, 20, 500, DELTA, "zero_out", screening=rho, points=2**13
    )
    alone = Accountant(DELTA).add(clipped()).epsilon().epsilon
    assert guarantee.epsilon == parts["total"] == expected > alone == parts["mixing"]
    assert parts["screening"] == pytest.approx(expected - alone) and guarantee.budget == 500
    assert Accountant(DELTA).add([clipped(), screening]).epsilon() == guarantee
    for _ in range(20):  # answered from the public model or not, the noise was paid
        accountant.add([screening, PublicAnswer(1)])
    assert accountant.epsilon().epsilon == guarantee.epsilon
    with pytest.raises(ValueError, match="weight and sigma must be the same in every Gaussian"):
        accountant.add(GaussianScreening(20, 1, 0.2, 1.0))
    with pytest.raises(ValueError, match="screened queries must stay within the budget of 500"):
        accountant.add(GaussianScreening(20, 480, 0.1, 1.0))


def test_a_public_box_costs_nothing_and_an_open_one_everything():
    assert Accountant(DELTA).add(clipped(upper=1.0)).epsilon().epsilon == 0.0
    open_box = Accountant(DELTA).add(clipped(lower=0.0)).epsilon()
    assert open_box.epsilon == math.inf and "ε = inf" in str(open_box)


def test_every_question_is_answered():
    accountant = Accountant(DELTA).add(clipped())
    found = {way: accountant.epsilon(way) for way in QUESTIONS}
    assert found["zero_out"].epsilon < found["add_remove"].epsilon < found["replace_one"].epsilon
    # Two zero-outs are a replacement: never cheaper than the direct statement.
    assert found["replace_one"].epsilon < 2 * found["zero_out"].epsilon * 1.2
    assert {way: one.adjacency for way, one in found.items()} == {way: way for way in QUESTIONS}
    asked = Accountant(DELTA, adjacency="replace_one").add(clipped())
    assert asked.epsilon() == found["replace_one"] == asked.copy().epsilon()
    assert asked.epsilon("zero_out") == found["zero_out"]
    assert asked.breakdown()["total"] == found["replace_one"].epsilon
    pool = Accountant(DELTA).add(pooled(100))
    costs = [pool.epsilon(way).epsilon for way in QUESTIONS]
    assert QUESTIONS == ("add_remove", "zero_out", "replace_one")
    assert costs[1] < costs[0] == costs[2]
    for way in QUESTIONS:  # screening alone holds for each
        alone = Accountant(DELTA, adjacency=way).add(GaussianScreening(10, 5, 0.1, 1.0)).epsilon()
        assert alone.adjacency == way and alone.epsilon > 0


def test_renyi_events_answer_their_own_question_only():
    bound = RenyiBound(3.0, 0.1, 20, 1, "zero_out")
    for question in ("replace_one", "add_remove"):
        with pytest.raises(ValueError, match=f"adjacency must be '{question}'.*got 'zero_out'"):
            Accountant(DELTA, adjacency=question).add(bound)
        accountant = Accountant(DELTA).add(bound)
        with pytest.raises(ValueError, match="must be 'zero_out', what the events hold for, got"):
            accountant.epsilon(question)
    for make in (lambda: Accountant(DELTA, adjacency="swap"), lambda: accountant.epsilon("swap")):
        with pytest.raises(ValueError, match="adjacency must be one of"):
            make()


def test_public_and_unprotected_answers_beside_them():
    accountant = Accountant(DELTA).add([PublicAnswer(4), pooled(0)])
    assert accountant.epsilon().kind == "public"
    accountant.add(pooled(3))
    assert accountant.epsilon().kind == "fixed" and accountant.queries == 7
    free = accountant.copy().add(PublicAnswer(1000)).epsilon()
    assert free.epsilon == accountant.epsilon().epsilon
    assert accountant.add(UnprotectedAnswer(1)).epsilon("replace_one").kind == "none"


def test_the_log_pool_is_zcdp():
    rho = (2 * 0.75 / 20) ** 2 / 8
    for way, factor in zip(QUESTIONS, (4, 1, 4), strict=True):
        found = bounded_range_rho(2.0, -0.25, 0.5, 20, way)
        assert factor * rho < found <= factor * rho * (1 + 3 * RANGE_ERROR)
        accountant = Accountant(DELTA, adjacency=way).add([pooled(300), pooled(700)])
        guarantee, parts = accountant.epsilon(), accountant.breakdown()
        exact, order = zcdp_to_dp(1000 * factor * rho, DELTA)
        assert exact <= guarantee.epsilon <= exact * (1 + 1e-8)
        assert guarantee.order == pytest.approx(order, rel=1e-3) and guarantee.method == "zcdp"
        assert parts["mixing"] == pytest.approx(guarantee.order * 1000 * factor * rho)
        assert parts["conversion"] == c_alpha(guarantee.order, DELTA)
        assert parts["mixing"] + parts["conversion"] <= parts["total"] == guarantee.epsilon
    assert bounded_range_rho(0.0, -1.0, 1.0, 5, "zero_out") == 0.0
    assert bounded_range_rho(3.0, 0.0, 0.0, 5, "replace_one") == 0.0
    assert bounded_range_rho(1e-200, -1.0, 1.0, 5, "zero_out") > 0.0


def test_a_public_schedule_and_screening_add_up():
    screening = GaussianScreening(20, 50, 0.1, 1.0)
    accountant = Accountant(DELTA).add([screening, pooled(30), pooled(20, scale=1.0, upper=2.0)])
    rho = 30 * (1.5 / 20) ** 2 / 8 + 20 * (2.25 / 20) ** 2 / 8 + 50 * screening_rho(0.1, 1.0, 20)
    guarantee = accountant.epsilon()
    assert guarantee.epsilon == pytest.approx(zcdp_to_dp(rho, DELTA)[0], rel=1e-8)
    assert guarantee.epsilon >= zcdp_to_dp(rho, DELTA)[0]
    assert guarantee.budget is None and accountant.breakdown()["screening"] > 0


@pytest.mark.parametrize(
    "events",
    [
        [pooled(), pooled(scale=5.0, lower=-3.0, upper=4.0)],
        [pooled(1, budget=50), pooled(scale=5.0)],
        [RenyiBound(3.0, 0.1, 20, 1, "zero_out"), RenyiBound(3.0, 0.4, 20, 1, "zero_out")],
        [GaussianScreening(20, 1, 0.1, 1.0), GaussianScreening(20, 1, 0.1, 2.0), pooled(0)],
        [GaussianScreening(20, 1, 0.1, 1.0), pooled(1, budget=50)],
    ],
)
def test_what_may_follow_a_schedule_says_that_it_must_be_fixed(events):
    """No event tells whether the second setting was chosen by what the first one answered."""
    guarantee = Accountant(DELTA).add(events).epsilon()
    assert guarantee.kind == "fixed" and CONDITION in str(guarantee)


def test_a_planned_pool():
    accountant = Accountant(DELTA).add(pooled(1, budget=50))
    whole = Accountant(DELTA).add(pooled(50)).epsilon()
    assert accountant.epsilon().epsilon == whole.epsilon
    assert accountant.epsilon().budget == 50 and whole.budget is None
    accountant.add(pooled(49, budget=50))
    with pytest.raises(ValueError, match="queries must stay within the budget of 50"):
        accountant.add(pooled(1, budget=50))
    with pytest.raises(ValueError, match="settings and budget must be the same"):
        accountant.add(pooled(0, budget=50, scale=1.0))
    assert accountant.copy().add(pooled(1)).epsilon().budget is None
    screened = Accountant(DELTA).add([GaussianScreening(20, 1, 0.1, 1.0), pooled(1, budget=50)])
    assert screened.epsilon().budget is None


def test_sentences():
    accountant = Accountant(DELTA).add(clipped())
    zero_out = str(accountant.epsilon())
    assert "Up to 500 answered queries are (ε, δ)-differentially private" in zero_out
    assert "privacy loss distribution of a dominating pair" in zero_out
    assert "its slot answers the public distribution (zero-out)" in zero_out
    replace_one = str(accountant.epsilon("replace_one"))
    assert "any change of the records in one shard (replace-one)" in replace_one
    assert "2ε" not in replace_one and "zero-out" not in replace_one
    add_remove = str(accountant.epsilon("add_remove"))
    assert "lacks one shard's model (add/remove)" in add_remove and "2ε" not in add_remove
    pool = str(Accountant(DELTA).add(pooled(5)).epsilon("replace_one"))
    assert "zero-concentrated DP at its best Rényi order" in pool
    assert CONDITION in pool
    for words in (zero_out, replace_one, add_remove, pool):
        assert "rule" not in words and "None" not in words and "may be published" in words


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: clipped(lower=1.5), r"lower must be in \[0, 1\], got 1.5"),
        (lambda: clipped(upper=0.5), "upper must be >= 1, got 0.5"),
        (lambda: clipped(budget=0), "budget must be an integer >= 1, got 0"),
        (lambda: clipped(queries=-1), "queries must be an integer >= 0, got -1"),
        (lambda: clipped(num_models=0), "num_models must be an integer >= 1"),
        (lambda: pooled(lower=0.1), "lower must be finite and <= 0, got 0.1"),
        (lambda: pooled(lower=-math.inf), "lower must be finite and <= 0, got -inf"),
        (lambda: pooled(upper=-0.1), "upper must be finite and >= 0, got -0.1"),
        (lambda: pooled(scale=-1.0), "scale must be finite and >= 0, got -1.0"),
        (lambda: pooled(lower="a"), "lower must be a number, got 'a'"),
        (lambda: pooled(budget=1.5), "budget must be an integer, got 1.5"),
        (lambda: bounded_range_rho(1.0, -1.0, 1.0, 3, "swap"), "adjacency must be one of"),
    ],
)
def test_errors_in_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def pool_law(q, clipped_ratios, scale):
    logits = np.log(q) + scale * clipped_ratios.mean(axis=0)
    p = np.exp(logits - logits.max())
    return p / p.sum()


def test_no_log_pool_beats_its_bound():
    """Random pools, half of them extremal: the Rényi divergence at six orders, both ways."""
    generator, worst = np.random.default_rng(11), 0.0
    for _ in range(4000):
        models, vocabulary = int(generator.choice([1, 2, 3, 10])), int(generator.integers(2, 7))
        lower, upper = -generator.exponential(1), generator.exponential(1)
        scale = generator.uniform(0.2, 3)
        q = generator.dirichlet(np.full(vocabulary, generator.choice([0.3, 1.0, 5.0]))) + 1e-9
        shape = (models + 1, vocabulary)
        ratios = np.clip(generator.normal(0, 3, shape), lower, upper)
        if generator.random() < 0.5:
            ratios = np.where(generator.random(shape) < 0.5, lower, upper)
        p = pool_law(q / q.sum(), ratios[:-1], scale)
        emptied, replaced = ratios[:-1].copy(), ratios[:-1].copy()
        emptied[0], replaced[0] = 0.0, ratios[-1]
        for way, other in (("zero_out", emptied), ("replace_one", replaced)):
            law = pool_law(q / q.sum(), other, scale)
            rho = bounded_range_rho(scale, lower, upper, models, way)
            for order in (1.01, 1.5, 2.0, 4.0, 18.0, 100.0):
                for a, b in ((p, law), (law, p)):
                    # A law of bounded range: no overflow at these orders.
                    log = order * np.log(a) + (1 - order) * np.log(b)
                    top = log.max()
                    loss = (top + math.log(np.exp(log - top).sum())) / (order - 1)
                    assert loss <= order * rho + 1e-11
                    worst = max(worst, loss / (order * rho) if rho > 1e-6 else 0.0)
    assert worst > 0.95


def test_the_bounded_range_bound_is_tight():
    """Two tokens at the ends of the range, near-equal masses: η → 0 attains it."""
    eta, order = 1e-2, 2.0
    p = np.array([0.5, 0.5])
    other = p * np.exp([-eta / 2, eta / 2])
    other /= other.sum()
    loss = math.log(float(np.sum(p**order * other ** (1 - order)))) / (order - 1)
    rho = bounded_range_rho(1.0, -eta / 2, eta / 2, 1, "zero_out")
    assert 0.999 * order * rho < loss <= order * rho
