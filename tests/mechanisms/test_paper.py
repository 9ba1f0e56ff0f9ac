"""AdaPMixED compared with Algorithm 1 line by line, its ablations and presets; PMixED's bound."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from exact import answered_from_q, costs, log_probs, stated, uncharged
from paper_cases import DELTA, MODELS, POSITIONS, SEED, SETTINGS, VOCAB, answer, ensemble
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms import AdaPMixED, PMixED, PublicOnly
from adapmixed.mechanisms.paper import PRESETS
from adapmixed.privacy import Accountant, GaussianScreening, LeaveOneOutLoss, PublicAnswer
from adapmixed.privacy.conversions import c_alpha
from adapmixed.rng import SecureRandom, SeededRandom
from adapmixed_ext import reference
from adapmixed_ext.inputs import likeliest

propose = partial(answer, seed=SEED)


def draws(positions: int, count: int, sigma: float, seed: int) -> Tensor:
    """Return (positions, count) noise as the mechanism draws it, with one draw per position."""
    rng = SeededRandom(seed)
    return torch.stack([ops.gaussian(count, sigma=sigma, rng=rng) for _ in range(positions)])


class Steps(NamedTuple):
    """The screening divergence and whether it passed, (B,), p, (B, V), and the losses, (N, B)."""

    divergence: Tensor
    passed: Tensor
    p: Tensor
    losses: Tensor  # 0 if the screening failed


def by_hand(
    private: Tensor, public: Tensor, seed: int, noise_first: bool = True, **changes: Any
) -> Steps:
    """Run Algorithm 1 with the noise that the mechanism draws from the same seed.

    noise_first: else scores are re-scaled before, as in the authors' program, whose sensitivity is
        not the stated one.
    """
    s = SETTINGS | changes
    order, weight, rows = s["order"], s["screen_weight"], (private, public)
    top_k = min(s["screen_top_k"], public.shape[1])
    noise = draws(len(public), top_k, s["sigma"], seed)
    if not noise_first:
        scores = reference.mixture(*rows, torch.full(private.shape[:2], weight))
        noise *= scores.gather(1, public.topk(top_k).indices).sum(-1, keepdim=True)
    screened = dict(weight=weight, order=order, threshold=s["threshold"], top_k=top_k)
    divergence, passed = reference.screen(*rows, noise, **screened)
    weights = reference.project(*rows, order=order, radius=s["target_leakage"] * order) * passed
    losses = reference.leave_one_out(*rows, weights, orders=order)[..., 0]
    return Steps(divergence, passed, reference.mixture(*rows, weights), losses)


def test_algorithm_1_line_by_line() -> None:
    private, public = ensemble()
    mechanism = AdaPMixED(**SETTINGS, adjacency="add_remove")
    steps = by_hand(private, public, SEED)
    passed = steps.passed
    # The comparison means something: both outcomes, none within rounding of the threshold, and
    # noise after re-scaling would have decided otherwise.
    assert 10 < int(passed.sum()) < POSITIONS - 10
    assert (steps.divergence - SETTINGS["threshold"]).abs().min() > 1e-5
    assert not torch.equal(by_hand(private, public, SEED, noise_first=False).passed, passed)

    proposal = propose(mechanism, private, public)
    assert torch.equal(answered_from_q(proposal), ~passed)
    # The weight is the optimum up to 1e-5, from below.
    scored = log_probs(mechanism, private, public, seed=SEED)
    torch.testing.assert_close(scored, steps.p.log(), rtol=0.0, atol=3e-5)
    screening, loss, public_answers = costs(proposal)
    assert screening == GaussianScreening(MODELS, POSITIONS, 0.7, 0.06)
    assert public_answers == PublicAnswer(POSITIONS - int(passed.sum()))
    assert isinstance(loss, LeaveOneOutLoss)
    assert (loss.orders, loss.adjacency) == ((3.0,), "add_remove")
    assert loss.loss.shape == (MODELS, int(passed.sum()), 1)
    np.testing.assert_allclose(loss.loss[:, :, 0], steps.losses[:, passed].numpy(), rtol=5e-4)


def test_screened_out_queries_are_answered_from_the_public_model_exactly() -> None:
    """The answer is q up to the rounding of a mean of N equal terms, for any private models."""
    private, public = ensemble()
    private[0, 0, 1:] = -math.inf
    mechanism = AdaPMixED(**(SETTINGS | dict(threshold=0.0)))
    others = -3.0 * private.nan_to_num(neginf=-9.0)

    expected = log_probs(PublicOnly(), private, public)
    exact = torch.log_softmax(public.double(), -1)
    torch.testing.assert_close(expected, exact, rtol=0.0, atol=1e-13)
    here, there = (log_probs(mechanism, rows, public, seed=SEED) for rows in (private, others))
    assert torch.equal(here, there)
    tokens = []
    for rows in (private, others, private[:1]):
        scored = log_probs(mechanism, rows, public, seed=SEED)
        torch.testing.assert_close(scored, expected, rtol=0.0, atol=1e-14)
        proposal = propose(mechanism, rows, public)
        assert bool(answered_from_q(proposal).all())
        screening, loss, answered = costs(proposal)
        # Only the screening is charged. The order stays declared although nothing passed.
        assert screening == GaussianScreening(len(rows), POSITIONS, 0.7, 0.06)
        assert loss.loss.shape == (len(rows), 0, 1) and loss.orders == (3.0,)
        assert answered == PublicAnswer(POSITIONS)
        tokens.append(uncharged(proposal).tokens.tolist())
    assert tokens[0] == tokens[1] == tokens[2]


def test_infinite_threshold_lets_all_zero_scores_pass() -> None:
    """If all scores are negative after noise, D is +inf, which only T_s = +inf allows."""
    private, public = torch.zeros(2, 40, 4), torch.zeros(40, 4)
    for threshold, screened in ((1e300, True), (math.inf, False)):
        mechanism = AdaPMixED(
            order=3.0, target_leakage=0.1, sigma=1e6, threshold=threshold, screen_top_k=1
        )
        proposal = propose(mechanism, private, public)
        noise = draws(40, 1, 1e6, SEED)[:, 0]
        assert answered_from_q(proposal).tolist() == ((noise < 0) & screened).tolist()


def test_public_screening_is_the_noised_test_on_the_public_model_and_costs_nothing() -> None:
    private, public = ensemble()
    settings = SETTINGS | dict(sigma=0.1)
    mechanism = AdaPMixED(**(settings | dict(screen="public")))
    steps = by_hand(public.expand(1, POSITIONS, VOCAB), public, SEED, sigma=0.1)
    decisions = (~steps.passed).tolist()
    assert 5 < sum(decisions) < POSITIONS - 5
    # The private models move the noisy test on these inputs, and cannot move the public one.
    noisy = answered_from_q(propose(AdaPMixED(**settings), private, public))
    assert decisions != noisy.tolist()
    for rows in (private, -2 * private, private[:1]):
        proposal = propose(mechanism, rows, public)
        assert answered_from_q(proposal).tolist() == decisions
        assert [type(event) for event in costs(proposal)] == [LeaveOneOutLoss, PublicAnswer]
        accountant = Accountant(1e-5)
        accountant.charge(proposal)
        assert accountant.breakdown()["screening"] == 0.0


def test_noise_is_added_to_probabilities_among_all_tokens() -> None:
    """Among the active tokens alone they would be larger, and the noise less."""
    private, public = ensemble()
    q, active = public.double().log_softmax(-1), likeliest(public, 4)
    speaking = private.double().gather(2, active.expand(MODELS, -1, -1)).log_softmax(-1)
    speaking += q.gather(1, active).logsumexp(-1, keepdim=True)
    rows = q.expand(MODELS, -1, -1).scatter(2, active.expand(MODELS, -1, -1), speaking)
    mechanism = AdaPMixED(**SETTINGS)
    noisy = mechanism.propose(private, public, rng=SeededRandom(SEED), active=4)
    expected = answered_from_q(propose(mechanism, rows.float(), q.float()))
    assert torch.equal(answered_from_q(noisy), expected) and 5 < int(expected.sum()) < POSITIONS - 5


# The paper's table: order, beta, sigma, lambda, threshold, top-k (N is the ensemble's).
TABLE = {
    "wikitext-103": (18, 0.2, 1e-2, 1e-4, 4.5, 60),
    "one-billion-word": (18, 0.2, 1e-2, 1e-4, 4.5, 60),
    "pubmed": (15, 0.3, 1e-1, 1e-3, 4.5, 60),
    "air-dialogue": (15, 0.3, 1e-2, 1e-4, 4.5, 60),
}


def test_presets_are_the_papers_table() -> None:
    assert set(PRESETS) == set(TABLE)
    for name, (order, beta, sigma, weight, threshold, top_k) in TABLE.items():
        m = AdaPMixED.preset(name)
        assert (m.order, m.target_leakage, m.sigma, m.screen_weight) == (order, beta, sigma, weight)
        assert (m.threshold, m.screen_top_k) == (threshold, top_k)
        assert (m.screen, m.adjacency) == ("noisy", "zero_out")
        assert m.radius == beta * order
        private, public = ensemble()
        events = stated(propose(m, private, public))
        (loss,) = (event for event in events if isinstance(event, LeaveOneOutLoss))
        assert loss.orders == (order,)


# PMixED: the sound radius and bound.


def test_epsilon_is_for_the_neighbours_that_were_chosen() -> None:
    """It is charged with the first query; an accountant of other neighbours is not charged."""
    logits = torch.randn(4, 1, 5), torch.randn(1, 5)
    for epsilon, adjacency in product((1.0, 8.0), ("zero_out", "replace_one")):
        mechanism = PMixED(epsilon, DELTA, 40, 20.0, adjacency=adjacency)
        accountant = Accountant(DELTA, adjacency=adjacency)
        for _ in range(40):
            accountant.charge(mechanism.propose(*logits, rng=SecureRandom()))
            assert 0.99 * epsilon < accountant.guarantee().epsilon <= epsilon
        assert accountant.guarantee().kind == "fixed" and f"ε = {epsilon:g}" in str(
            accountant.guarantee()
        )
        with pytest.raises(ValueError, match="its epsilon is for zero_out; take PMixED"):
            Accountant(DELTA, adjacency="replace_one").bind(PMixED(epsilon, DELTA, 40, 20.0), 4)
    with pytest.raises(ValueError, match="epsilon of each of two zero-outs must be > "):
        PMixED(1.0, DELTA, 40, 10.0, adjacency="replace_one")
    with pytest.raises(ValueError, match="adjacency must be"):
        PMixED(1.0, DELTA, 40, 20.0, adjacency="add_remove")


def test_no_rounding_exceeds_the_configured_epsilon() -> None:
    """One unit in the last place too much would be printed as a higher digit.

    The settings include some where the conversion takes most of epsilon.
    """
    generator = random.Random(1)
    private, public = torch.randn(3, 1, 4), torch.randn(1, 4)
    for _ in range(400):
        order = generator.choice((1.5, 2.0, 3.0, 6.0, 18.0, 64.0))
        delta, queries = 10 ** generator.uniform(-9, -1), generator.choice((1, 2, 3, 20))
        conversion = max(0.0, c_alpha(order, delta))
        more = generator.choice((1e-6, 1e-3, 0.1, 1.0))
        epsilon = round(conversion * generator.choice((1.0001, 1.1, 2.0)) + more, 4)
        if epsilon <= conversion:
            continue
        (event,) = costs(answer(PMixED(epsilon, delta, queries, order), private, public))
        for events in ([event] * queries, [replace(event, queries=queries)]):
            total = Accountant(delta).add(events).guarantee().epsilon
            assert total <= epsilon, (epsilon, delta, queries, order)
