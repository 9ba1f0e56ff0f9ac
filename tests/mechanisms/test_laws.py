"""The law of an answer: what is scored, what is sampled and what is charged."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from exact import all_log_probs, mean, slots
from protocol_cases import MECHANISMS, MODELS, SCREENED, VOCAB, every, logits, propose
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms import AdaPMixED, Mechanism
from adapmixed.mechanisms.law import SplitLaw
from adapmixed.rng import SeededRandom


def log_probs(name: str, positions: int) -> Tensor:
    """(B, V) through the public interface."""

    def answer(targets: Tensor) -> Tensor:
        log_prob = propose(name, positions, targets=targets).release().log_prob
        assert log_prob is not None
        return log_prob

    return all_log_probs(answer, VOCAB, positions)


@every
def test_the_law_is_a_distribution(name: str) -> None:
    total = log_probs(name, 12).exp().sum(1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("name", [n for n in MECHANISMS if n != "pmixed-published-subsampled"])
def test_what_is_scored_what_is_sampled_and_what_is_charged_is_one_law(name: str) -> None:
    """log_prob, the sampler's probabilities and the weights of the proposal agree to 1e-13."""
    private, public = logits(12)
    proposal = propose(name)
    law = proposal.law
    sampled = ops.mixture(law.private_logits, law.public_logits, law.projection)
    scored = log_probs(name, 12).exp()
    torch.testing.assert_close(scored, sampled, rtol=1e-13, atol=0.0)
    for b in range(12):
        rows = law.private_logits if name == "public" else private
        exact = mean(slots(proposal, rows, public, b)[0])
        expected = torch.tensor([float(x) for x in exact], dtype=torch.float64)
        torch.testing.assert_close(scored[b], expected, rtol=1e-12, atol=0.0)


def test_unprotected_is_the_plain_mean() -> None:
    private, _ = logits(12)
    expected = torch.softmax(private.double(), -1).mean(0)
    scored = log_probs("unprotected", 12).exp()
    torch.testing.assert_close(scored, expected, rtol=1e-13, atol=0.0)


@every
def test_tokens_are_drawn_from_the_law_to_the_last_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer digits of it would show in no number of draws."""
    drawn: list[Tensor] = []

    def watched(probabilities: Tensor, public_logits: Tensor, *, rng: Any) -> Tensor:
        drawn.append(probabilities.clone())
        return sample(probabilities, public_logits, rng=rng)

    sample = ops.sample
    monkeypatch.setattr(ops, "sample", watched)
    proposal = propose(name)
    proposal.release()
    laws = proposal.law.laws if isinstance(proposal.law, SplitLaw) else (proposal.law,)
    assert torch.equal(torch.cat(drawn), torch.cat([law._probabilities() for law in laws]))


def chi_square(tokens: Tensor, law: Tensor) -> float:
    """Standardised: (chi2 - dof) / sqrt(2 dof), summed over rows of tokens (B, n), law (B, V)."""
    draws = tokens.shape[1]
    observed = torch.stack([(tokens == v).sum(1) for v in range(law.shape[1])], dim=1).double()
    expected = draws * law
    assert float(expected.min()) > 5
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = law.shape[0] * (law.shape[1] - 1)
    return (statistic - freedom) / math.sqrt(2 * freedom)


@every
def test_tokens_follow_the_law(name: str) -> None:
    """4 000 tokens from one proposal each of 6 queries, then as many from one batch."""
    draws = 4000
    private, public = logits(6)
    mechanism = MECHANISMS[name]
    if "screen" in name or name.startswith("adapmixed"):
        # Screening decides position by position: without it every copy has the same law.
        settings = SCREENED | dict(screen=None)
        mechanism = AdaPMixED(**settings)
    if name == "pmixed-published-subsampled":
        return _subsets_average_out(mechanism, private[:, :1], public[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = mechanism.propose(
            private.repeat(1, draws, 1), public.repeat(draws, 1), rng=SeededRandom(2)
        )

        def answer(targets: Tensor) -> Tensor:
            rng = SeededRandom(0)
            released = mechanism.propose(private, public, targets=targets, rng=rng).release()
            assert released.log_prob is not None
            return released.log_prob

        law = all_log_probs(answer, VOCAB, 6).exp()
    tokens = batch.release().tokens.reshape(draws, 6).T
    assert abs(chi_square(tokens, law)) < 4
    # Rows of a batch draw independently: pairs of neighbouring copies follow the product law.
    pairs = tokens[:, 0::2] * VOCAB + tokens[:, 1::2]
    product = (law[:, :, None] * law[:, None, :]).reshape(6, -1)
    frequent = product.amin(1) * pairs.shape[1] > 5
    assert bool(frequent.any())
    assert abs(chi_square(pairs[frequent], product[frequent])) < 4
    # So do successive calls with one source.
    rng = SeededRandom(3)
    calls = [
        mechanism.propose(private[:, :1], public[:1], rng=rng).release().tokens for _ in range(2000)
    ]
    assert abs(chi_square(torch.cat(calls)[None], law[:1])) < 4


def _subsets_average_out(mechanism: Mechanism, private: Tensor, public: Tensor) -> None:
    """Each copy draws its own subset: tokens follow the mean of the copies' laws."""
    draws = 2000
    copies = private.repeat(1, draws, 1), public.repeat(draws, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens = mechanism.propose(*copies, rng=SeededRandom(2)).release().tokens
        columns = []
        for v in range(VOCAB):
            targets = torch.full((draws,), v)
            scored = mechanism.propose(*copies, targets=targets, rng=SeededRandom(4)).release()
            columns.append(scored.log_prob.exp().mean(0, keepdim=True))
    assert abs(chi_square(tokens[None], torch.stack(columns, dim=1))) < 4


def test_screened_tokens_follow_q_and_the_others_the_mixture() -> None:
    """With screening on: the tokens of either outcome follow the law of that outcome."""
    draws = 6000
    generator = torch.Generator().manual_seed(8)
    public = torch.randn(1, VOCAB, generator=generator)
    private = public + 2 * torch.randn(MODELS, 1, VOCAB, generator=generator)
    mechanism = AdaPMixED(**SCREENED | dict(target_leakage=1.0))
    targets = torch.arange(VOCAB)
    copies = private.repeat(1, draws, 1), public.repeat(draws, 1)
    proposal = mechanism.propose(*copies, rng=SeededRandom(1))
    tokens, screened = proposal.release().tokens, proposal.public
    assert 1000 < int(screened.sum()) < draws - 1000
    open_law = AdaPMixED(**SCREENED | dict(target_leakage=1.0, screen=None)).propose(
        private.repeat(1, VOCAB, 1),
        public.repeat(VOCAB, 1),
        targets=targets,
        rng=SeededRandom(0),
    )
    mixed = open_law.release().log_prob.exp()
    q = torch.softmax(public[0].double(), -1)
    assert abs(chi_square(tokens[screened][None], q[None])) < 4
    assert abs(chi_square(tokens[~screened][None], mixed[None])) < 4
    assert abs(chi_square(tokens[~screened][None], q[None])) > 20  # they are told apart


@every
def test_tokens_and_scores_agree_on_masked_tokens(name: str) -> None:
    """Token 0 is masked in the public row only, token 1 in every row, token 2 in one private row:
    no token is drawn that the law gives nothing, and none is lost that it gives something."""
    generator = torch.Generator().manual_seed(9)
    public = torch.randn(1, VOCAB, generator=generator)
    private = public + torch.randn(MODELS, 1, VOCAB, generator=generator)
    public[:, :2] = private[:, :, 1] = private[1, :, 2] = -math.inf
    draws = 1500
    mechanism = MECHANISMS[name]
    if isinstance(mechanism, AdaPMixED):
        mechanism = AdaPMixED(**SCREENED | dict(screen=None))
    copies = private.repeat(1, draws, 1), public.repeat(draws, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens = mechanism.propose(*copies, rng=SeededRandom(1)).release().tokens
        law = []
        for v in range(VOCAB):
            targets = torch.full((draws,), v)
            scored = mechanism.propose(*copies, targets=targets, rng=SeededRandom(2)).release()
            law.append(float(scored.log_prob.exp().mean()))
    for v, mass in enumerate(law):
        share = float((tokens == v).double().mean())
        assert abs(share - mass) <= 4 * math.sqrt(mass * (1 - mass) / draws), (v, share, mass)
    assert law[1] == 0.0
