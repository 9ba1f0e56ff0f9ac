"""The paper's own analysis is reproduced: its bound, which fails, its PMixED and its rule.

Two-token ensembles are evaluated with 120 digits. The audit `bounds` searches for others.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import mpmath
import pytest
import torch
from exact import answered_from_q, costs, exactly, log_probs, losses, mixtures, stated, uncharged
from oracle import one_way
from paper_cases import (
    DELTA,
    MODELS,
    POSITIONS,
    SEED,
    SETTINGS,
    answer,
    budget,
    ensemble,
    published,
    rows,
)
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.evaluation.utility import Utility
from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy import Accountant, LeaveOneOutLoss, RenyiBound
from adapmixed.privacy.conversions import c_alpha
from adapmixed.privacy.costs import sound_bound
from adapmixed.rng import SeededRandom
from adapmixed_ext import reference
from adapmixed_lab.reproduce.published import (
    FixedLoss,
    PaperRule,
    published_bound,
    published_target_leakage,
    subsampled_rdp,
)

SCREENED = AdaPMixED(**SETTINGS, adjacency="add_remove")


@pytest.mark.parametrize("models", [1, 2, 5, 80, 100])
def test_published_radius_is_the_lemmas_and_spends_equation_12(models: int) -> None:
    for order in (2.5, 6.0, 18.0):
        mechanism = published(order, 0.007, 100)
        grown = math.log1p(models * math.expm1((order - 1) * mechanism.per_query)) / (order - 1)
        expected = mechanism.per_query if models == 1 else grown / 4
        assert mechanism.radius(models) == pytest.approx(expected, rel=1e-12)
    mechanism = published(3.0, 0.007, 100, sample_rate=0.1)
    beta = mechanism.radius(models) / 3

    def amplified(leakage: float) -> float:
        return subsampled_rdp(0.1, [published_bound(k, leakage, models) for k in (2, 3)])

    assert amplified(beta * (1 - 1e-12)) <= mechanism.per_query < amplified(beta * (1 + 1e-9))


def test_published_law_is_algorithm_2_with_the_subset_of_the_same_noise() -> None:
    positions, models, vocab, rate = 40, 4, 5, 0.5
    generator = torch.Generator().manual_seed(6)
    public = torch.randn(positions, vocab, generator=generator)
    private = public + torch.randn(models, positions, vocab, generator=generator)
    mechanism = published(3.0, 0.02, sample_rate=rate)
    rng = SeededRandom(9)
    normal = torch.stack([ops.gaussian(models, sigma=1.0, rng=rng) for _ in range(positions)], 1)
    chosen = torch.special.ndtr(normal) < rate
    assert set(chosen.sum(0).tolist()) == {0, 1, 2, 3, 4}  # empty and full subsets occur
    distribution = log_probs(mechanism, private, public, seed=9)
    for b in range(positions):
        members = chosen[:, b].nonzero()[:, 0].tolist()
        expected = torch.softmax(public[b].double(), -1)
        if members:
            rows, radius = (
                (private[members, b, None], public[None, b]),
                mechanism.radius(len(members)),
            )
            weight = reference.project(*rows, order=3.0, radius=radius)
            expected = reference.mixture(*rows, weight)[0]
        atol = 3e-5 if members else 1e-13
        torch.testing.assert_close(distribution[b], expected.log(), rtol=0.0, atol=atol)
    proposal = answer(mechanism, private, public, seed=9)
    # An empty subset is charged as others, and not told apart, because S is never revealed.
    assert not bool(answered_from_q(proposal).any())
    (event,) = costs(proposal)
    expected_event = RenyiBound(
        3.0, mechanism.per_query, models, positions, True, mechanism.queries
    )
    assert event == expected_event


def test_there_is_no_utility_of_subsets() -> None:
    """The utility theorem is about a mean over all members."""
    private, public = torch.randn(3, 4, 6), torch.randn(4, 6)
    targets = torch.zeros(4, dtype=torch.int64)
    mixed = []
    for rate in (1.0, 0.5):
        mechanism, utility = published(3.0, 0.02, sample_rate=rate), Utility()
        proposal = mechanism.propose(private, public, targets=targets, rng=SeededRandom(0))
        utility.add(proposal, uncharged(proposal), targets)
        mixed.append(utility.report() is not None)
    assert mixed == [True, False]


# The counterexample, through the operators: q = (1 - 1e-8, 1e-8), order 3, beta 0.01, N = 80; one
# model raises the rare token to the edge of its ball, the others lower it to theirs.

ORDER, LEAKAGE, N, RARE = 3.0, 0.01, 80, 1e-8


def counterexample() -> tuple[Tensor, Tensor]:
    public = rows([[1 - RARE, RARE]])
    raises = rows([[0.0, 1.0]])
    lowers = rows([[1.0, 0.0]])
    return torch.stack([raises] + [lowers] * (N - 1)), public


def test_the_published_bound_is_broken_by_the_published_mechanism() -> None:
    private, public = counterexample()
    claimed = published_bound(ORDER, LEAKAGE, N)
    assert claimed == pytest.approx(0.0016924, abs=5e-8)
    mechanism = published(ORDER, claimed * (1 + 1e-9))
    assert mechanism.radius(N) == pytest.approx(LEAKAGE * ORDER, rel=1e-6)
    proposal = answer(mechanism, private, public)
    (event,) = costs(proposal)
    assert event.published and event.epsilon == pytest.approx(claimed, rel=1e-6)
    here, removed = mixtures(proposal).mean, mixtures(proposal).without(0, "add_remove")
    # 0.27903 with the exact weights, of which no one is exceeded.
    assert 0.276 < float(one_way(here, removed, [ORDER])[0, 0]) < 0.27904
    # The other direction is safe.
    assert float(one_way(removed, here, [ORDER])[0, 0]) <= math.log(N / (N - 1))


def test_the_data_dependent_loss_and_the_sound_bound_hold_on_the_counterexample() -> None:
    private, public = counterexample()
    mechanism = AdaPMixED(ORDER, LEAKAGE, screen=None, adjacency="add_remove")
    proposal = mechanism.propose(private, public, rng=SeededRandom(0))
    charges = proposal._proposed.losses[:, 0, 0]
    assert 0.276 < float(charges[0]) < 0.27904
    assert float(charges[0]) > 160 * published_bound(ORDER, LEAKAGE, N)
    assert float(charges[1:].max()) < 0.01
    # The budget whose sound radius is the counterexample's.
    per_query = math.log1p(math.expm1(2 * LEAKAGE * ORDER) / N) / 2
    sound = budget(ORDER, per_query)
    assert sound.radius(N) == pytest.approx(LEAKAGE * ORDER, rel=1e-9)
    proposal = answer(sound, private, public)
    (event,) = costs(proposal)
    raised, lowered = mixtures(proposal).losses([0, N - 1], [ORDER], "zero_out")[:, 0, 0]
    assert max(raised, lowered) <= event.epsilon
    assert float(raised) > 0.93 * event.epsilon  # the supremum as the mass vanishes


# The tables of docs/theory/pmixed.md, with 120 digits, at order 3.


def larger(p, q):
    """Return the larger D_3 of two distributions on two tokens, by the rare one's masses."""
    ways = (a**3 / b**2 + (1 - a) ** 3 / (1 - b) ** 2 for a, b in ((p, q), (q, p)))
    return mpmath.log(max(ways)) / 2


def loss(rare, radius, members, rate):
    """Return the loss if member 0 raises the rare mass to its ball's edge, and others lower it."""
    rare, edges = mpmath.mpf(rare), []
    for end in (mpmath.mpf(1), rare * mpmath.mpf(10) ** -60):
        low, high = mpmath.mpf(0), mpmath.mpf(1)
        for _ in range(250):
            middle = (low + high) / 2
            inside = larger(rare + middle * (end - rare), rare) <= radius
            low, high = (middle, high) if inside else (low, middle)
        edges.append(rare + low * (end - rare))
    others = (1 - rate) * rare + rate * (members - 1) * edges[1] / members
    return larger(*(others + rate * edge / members for edge in (edges[0], rare)))


def test_the_sound_bound_is_attained_and_a_subset_is_not_paid_for_at_its_rate():
    with mpmath.workdps(120):
        radius, bound = mpmath.mpf("0.03"), sound_bound(3, 0.03, 80)
        ratios = [loss(f"1e-{k}", radius, 80, 1) / bound for k in (2, 6, 12, 30)]
        assert [f"{float(ratio):.3g}" for ratio in ratios[:2]] == ["0.0256", "0.589"]
        assert f"{float(ratios[2]):.5g}" == "0.99937"
        assert f"{float(1 - ratios[3]):.0g}" == "6e-13"
        g = 1 - mpmath.mpf("0.94") ** 100
        true = float(loss("1e-24", mpmath.mpf("0.15"), 100, g))
    sound, formula = (sound_bound(3, 0.15, 100 / float(rate)) for rate in (g, 0.06))
    assert 8 * formula < true <= sound
    assert [true, formula, sound] == pytest.approx([0.0011990, 0.00010495, 0.0017427], rel=5e-5)


# Poisson subsampling (equation 4 of the paper).


@pytest.mark.parametrize("order", [2, 18, 200])
@pytest.mark.parametrize("rate", [1e-9, 0.03, 1 - 1e-9])
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 0.7, 40.0, 1e5])
def test_subsampled_cost_against_the_exact_value(order, rate, scale):
    def formula():
        s, a = mpmath.mpf(rate), order
        total = (1 - s) ** (a - 1) * (1 + (a - 1) * s)
        for k in range(2, a + 1):
            growth = mpmath.exp((k - 1) * mpmath.mpf(scale * k))
            total += mpmath.binomial(a, k) * (1 - s) ** (a - k) * s**k * growth
        return mpmath.log(total) / (a - 1)

    cost = subsampled_rdp(rate, [scale * k for k in range(2, order + 1)])
    assert cost == pytest.approx(float(exactly(formula)), rel=1e-11)


def test_subsampling_at_the_ends_of_the_rate():
    assert subsampled_rdp(0.0, [1.0] * 17) == subsampled_rdp(0.5, [0.0] * 17) == 0.0
    assert subsampled_rdp(1.0, range(2, 19)) == pytest.approx(18.0)
    assert subsampled_rdp(0.5, [math.inf] * 2) == math.inf


def test_bad_arguments_raise():
    with pytest.raises(ValueError, match="order must be an integer .* got 2.5"):
        published(2.5, 0.1, sample_rate=0.1)
    published(2.5, 0.1)
    with pytest.raises(ValueError, match="sample_rate must be > 0, got 0.0"):
        published_target_leakage(3, 0.1, 80, 0.0)
    with pytest.raises(ValueError, match="models must be .* got 0"):
        published_target_leakage(3, 0.1, 0)
    with pytest.raises(ValueError, match="target_leakage must be >= 0"):
        published_bound(3, -0.1, 80)


# The charging rule.


@pytest.mark.parametrize("screen", ["noisy", None])
def test_the_largest_loss_of_each_query_is_charged_to_all(screen: str | None) -> None:
    inner = replace(SCREENED, screen=screen)
    private, public = ensemble()
    proposal = PaperRule(**vars(inner)).propose(private, public, rng=SeededRandom(SEED))
    realised = losses(proposal)[..., 0]
    passed = ~answered_from_q(proposal)
    assert bool(passed.all()) == (screen is None)
    (event,) = (entry for entry in stated(proposal) if isinstance(entry, LeaveOneOutLoss))
    largest = realised[:, passed].amax(0)
    assert event.loss[:, :, 0].tolist() == [largest.tolist()] * len(private)
    # The other events, and the realised losses, are AdaPMixED's own.
    original = inner.propose(private, public, rng=SeededRandom(SEED))
    assert torch.equal(losses(original), losses(proposal))
    others, same = (
        [entry for entry in stated(each) if not isinstance(entry, LeaveOneOutLoss)]
        for each in (proposal, original)
    )
    assert others == same
    guarantee = Accountant(DELTA).add(event).guarantee()
    expected = float(largest.sum()) + c_alpha(inner.order, DELTA)
    assert guarantee.epsilon == pytest.approx(expected, rel=1e-12)


def test_the_paper_rule_wants_one_order() -> None:
    words = re.escape("loss_orders must be one order, got (2.0, 3.0)")
    with pytest.raises(ValueError, match=words):
        PaperRule(**vars(SCREENED) | {"loss_orders": (2.0, 3.0)})
    PaperRule(**vars(SCREENED) | {"loss_orders": (2.0,)})


def test_fixed_loss_is_charged_for_every_query() -> None:
    private, public = ensemble()
    mechanism = FixedLoss(**SETTINGS)
    proposal = answer(mechanism, private, public, SEED)
    # log(1 + (e^{(order-1) R} - 1)/N) / (order - 1), R = 0.04 * 3
    bound = math.log1p(math.expm1(2 * 0.12) / MODELS) / 2
    (event,) = (entry for entry in stated(proposal) if isinstance(entry, RenyiBound))
    assert (event.order, event.num_models, event.queries) == (3.0, MODELS, POSITIONS)
    assert not event.published
    assert bound <= event.epsilon <= bound * (1 + 1e-12)
    assert len(costs(proposal)) == 2
    assert proposal._proposed.losses is None
    # The answers are those of the data-dependent mechanism.
    other = answer(AdaPMixED(**SETTINGS), private, public, SEED)
    assert torch.equal(answered_from_q(proposal), answered_from_q(other))
    assert torch.equal(uncharged(proposal).tokens, uncharged(other).tokens)
    # The charge does not follow the outcome: the same when nothing passes.
    nothing = answer(replace(mechanism, threshold=0.0), private, public, SEED)
    assert stated(nothing) == stated(proposal)
    accountant = Accountant(1e-5)
    accountant.charge(nothing)
    guarantee = accountant.guarantee()
    assert (guarantee.kind, guarantee.adjacency) == ("fixed", "zero_out")
