"""PMixED's published analysis is reproduced, but guarantees nothing."""

from __future__ import annotations

import math

import pytest
import torch
from exact import answered_from_q, costs, log_probs, mixtures, uncharged
from oracle import one_way
from pmixed_cases import DELTA, answer, budget, published, rows
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.evaluation.diagnostics import Diagnostics
from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy import Accountant, RenyiBound
from adapmixed.rng import SeededRandom
from adapmixed_ext import reference
from adapmixed_lab.reproduce.published import PublishedPMixED, published_bound, subsampled_rdp


def paper_leakage(order: float, per_query: float, models: int) -> float:
    """Return the lemma's β."""
    if models == 1:
        return per_query / order
    grown = math.log1p(models * math.expm1((order - 1) * per_query))
    return grown / (4 * (order - 1) * order)


@pytest.mark.parametrize("models", [1, 2, 80, 100])
@pytest.mark.parametrize("order", [2.5, 6.0, 18.0])
def test_published_radius_is_the_lemmas(order: float, models: int) -> None:
    mechanism = published(order, 0.007, 100)
    expected = paper_leakage(order, mechanism.per_query, models) * order
    assert mechanism.radius(models) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("models", [1, 2, 5])
def test_published_radius_with_subsampling_spends_equation_12(models: int) -> None:
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
    (event,) = costs(answer(mechanism, private, public, seed=9))
    expected_event = RenyiBound(
        3.0, mechanism.per_query, models, positions, True, mechanism.queries
    )
    assert event == expected_event


def test_published_empty_subsets_answer_q_and_are_charged_all_the_same() -> None:
    private, public = 5 * torch.randn(3, 4, 6), torch.randn(4, 6)
    mechanism = published(3.0, 0.02, sample_rate=1e-9)
    distribution = log_probs(mechanism, private, public)
    exact = torch.log_softmax(public.double(), -1)
    torch.testing.assert_close(distribution, exact, rtol=0.0, atol=1e-13)
    proposal = answer(mechanism, private, public)
    (event,) = costs(proposal)
    assert (event.epsilon, event.queries) == (mechanism.per_query, 4)
    # An empty subset is not told apart, because S is never revealed.
    assert not bool(answered_from_q(proposal).any())


def test_diagnostics_show_no_weights_of_subsets() -> None:
    """The utility theorem is about a mean over all members."""
    private, public = torch.randn(3, 4, 6), torch.randn(4, 6)
    targets = torch.zeros(4, dtype=torch.int64)
    mixed = []
    for rate in (1.0, 0.5):
        mechanism, found = published(3.0, 0.02, sample_rate=rate), Diagnostics()
        proposal = mechanism.propose(private, public, targets=targets, rng=SeededRandom(0))
        found.add(proposal, uncharged(proposal), targets)
        mixed.append(found.diagnosis().weights is not None)
    assert mixed == [True, False]


def test_published_analysis_needs_integer_orders_under_subsampling() -> None:
    with pytest.raises(ValueError, match="order must be an integer .*got 2.5"):
        published(2.5, 0.1, sample_rate=0.5)
    published(2.5, 0.1)


def test_guarantee_of_the_published_analysis_promises_nothing() -> None:
    mechanism = PublishedPMixED(8.0, DELTA, 4, 6)
    events = costs(answer(mechanism, torch.zeros(3, 4, 5), torch.zeros(4, 5)))
    guarantee = Accountant(DELTA).add(events).guarantee()
    assert guarantee.kind == "published"
    assert guarantee.epsilon == pytest.approx(8.0)


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
