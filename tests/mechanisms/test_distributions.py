"""The distribution of an answer is the same in scores, samples and charges, at every token."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from exact import answered_from_q, log_probs, mean, members, settled, uncharged
from mechanism_cases import BASELINES, MECHANISMS, MODELS, SCREENED, VOCAB, every, logits, propose
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.limits import LEAST_PUBLIC
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    NextToken,
)
from adapmixed.rng import SeededRandom
from adapmixed_ext.reference import sampling_weights


def scored(name: str, positions: int) -> Tensor:
    """Return the probabilities, (B, V), through the public interface."""
    return log_probs(MECHANISMS[name], *logits(positions), seed=5)


@pytest.mark.parametrize("name", [n for n in MECHANISMS if n != "pmixed-published-subsampled"])
def test_what_is_scored_what_is_sampled_and_what_is_charged_is_one_distribution(name: str) -> None:
    """log_prob, the sampler's probabilities and the weights of the proposal agree to 1e-13."""
    private, public = logits(12)
    proposal = settled(propose(name))
    found = scored(name, 12).exp()
    sampled = proposal._distribution.probabilities()
    torch.testing.assert_close(found, sampled, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(found.sum(1), torch.ones(12).double(), rtol=0.0, atol=1e-13)
    if name in BASELINES:
        return
    if name.startswith("clipped"):
        return _by_formula(name, private, public, found)
    for b in range(12):
        exact = mean(members(proposal, b)[0])
        expected = torch.tensor([float(x) for x in exact], dtype=torch.float64)
        torch.testing.assert_close(found[b], expected, rtol=1e-12, atol=0.0)


def _by_formula(name: str, private: Tensor, public: Tensor, found: Tensor) -> None:
    q = public.double().softmax(1)
    if name == "clipped-log-pool":
        logs = private.double().log_softmax(2) - q.log()
        ratio = (logs.clamp(-0.5, 0.5).mean(0) * 1.5).exp()
        expected = q * ratio / (q * ratio).sum(1, keepdim=True)
    else:
        expected = torch.stack([_boxed(row.double().softmax(1), q) for row in private]).mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def _boxed(p: Tensor, q: Tensor) -> Tensor:
    """Return clip(s p, 0.6 q, 1.7 q), with s from bisection such that the sum is 1."""
    low, high = torch.full((len(p), 1), 1e-9), torch.full((len(p), 1), 1e9)
    low, high = low.double(), high.double()
    for _ in range(200):
        scale = (low * high).sqrt()
        above = (scale * p).clamp(0.6 * q, 1.7 * q).sum(1, keepdim=True) > 1
        low, high = torch.where(above, low, scale), torch.where(above, scale, high)
    return (low * p).clamp(0.6 * q, 1.7 * q)


@every
def test_tokens_are_drawn_from_the_distribution_to_the_last_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number of draws would show that digits are missing, so the bits are compared."""
    drawn: list[Tensor] = []

    def watched(probabilities: Tensor, public_logits: Tensor, *, rng: Any) -> Tensor:
        drawn.append(probabilities.clone())
        return sample(probabilities, public_logits, rng=rng)

    sample = ops.sample
    monkeypatch.setattr(ops, "sample", watched)
    proposal = settled(propose(name))
    expected = proposal._distribution.probabilities()
    proposal.release()
    assert torch.equal(torch.cat(drawn), expected)


def chi_square(tokens: Tensor, p: Tensor) -> float:
    """Return (chi2 - dof) / sqrt(2 dof), summed over rows of tokens (B, n) and p (B, V)."""
    draws = tokens.shape[1]
    observed = torch.stack([(tokens == v).sum(1) for v in range(p.shape[1])], dim=1).double()
    expected = draws * p
    assert float(expected.min()) > 5
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = p.shape[0] * (p.shape[1] - 1)
    return (statistic - freedom) / math.sqrt(2 * freedom)


@every
@pytest.mark.slow
def test_tokens_follow_the_distribution(name: str) -> None:
    """4 000 tokens from one proposal each of 6 queries, then as many from one batch."""
    draws = 4000
    private, public = logits(6)
    mechanism = MECHANISMS[name]
    if name.startswith("adapmixed"):
        # Screening decides position by position: without it every copy has the same distribution.
        mechanism = AdaPMixED(**SCREENED | dict(screen=None))
    if name in ("pmixed-published-subsampled", "noisy-aggregation"):
        return _copies_average_out(mechanism, private[:, :1], public[:1])
    batch = mechanism.propose(
        private.repeat(1, draws, 1), public.repeat(draws, 1), rng=SeededRandom(2)
    )
    p = log_probs(mechanism, private, public).exp()
    tokens = uncharged(batch).tokens.reshape(draws, 6).T
    assert abs(chi_square(tokens, p)) < 4
    # Rows of a batch draw independently: pairs of neighbouring copies follow the product.
    pairs = tokens[:, 0::2] * VOCAB + tokens[:, 1::2]
    product = (p[:, :, None] * p[:, None, :]).reshape(6, -1)
    frequent = product.amin(1) * pairs.shape[1] > 5
    assert bool(frequent.any())
    assert abs(chi_square(pairs[frequent], product[frequent])) < 4
    # So do successive calls with one source.
    rng = SeededRandom(3)
    calls = [
        uncharged(mechanism.propose(private[:, :1], public[:1], rng=rng)).tokens
        for _ in range(2000)
    ]
    assert abs(chi_square(torch.cat(calls)[None], p[:1])) < 4


def _copies_average_out(mechanism: Mechanism, private: Tensor, public: Tensor) -> None:
    """Check that tokens of copies, each with its own subset or noise, follow the copies' mean."""
    draws = 2000
    copies = private.repeat(1, draws, 1), public.repeat(draws, 1)
    tokens = uncharged(mechanism.propose(*copies, rng=SeededRandom(2))).tokens
    mean_p = log_probs(mechanism, *copies, seed=4).exp().mean(0, keepdim=True)
    assert abs(chi_square(tokens[None], mean_p)) < 4


def test_screened_tokens_follow_q_and_the_others_the_mixture() -> None:
    """With screening, the tokens of each outcome follow the distribution of that outcome."""
    draws = 6000
    generator = torch.Generator().manual_seed(8)
    public = torch.randn(1, VOCAB, generator=generator)
    private = public + 2 * torch.randn(MODELS, 1, VOCAB, generator=generator)
    mechanism = AdaPMixED(**SCREENED | dict(target_leakage=1.0))
    copies = private.repeat(1, draws, 1), public.repeat(draws, 1)
    proposal = mechanism.propose(*copies, rng=SeededRandom(1))
    tokens, screened = uncharged(proposal).tokens, answered_from_q(proposal)
    assert 1000 < int(screened.sum()) < draws - 1000
    unscreened = AdaPMixED(**SCREENED | dict(target_leakage=1.0, screen=None))
    mixed = log_probs(unscreened, private, public)[0].exp()
    q = torch.softmax(public[0].double(), -1)
    assert abs(chi_square(tokens[screened][None], q[None])) < 4
    assert abs(chi_square(tokens[~screened][None], mixed[None])) < 4
    assert abs(chi_square(tokens[~screened][None], q[None])) > 20  # they are told apart


@every
@pytest.mark.slow
def test_tokens_and_scores_agree_on_masked_tokens(name: str) -> None:
    """No token of probability 0 is drawn, and no other token is lost.

    Token 0 is masked in the public row only, token 1 in every row, token 2 in one private row.
    """
    generator = torch.Generator().manual_seed(9)
    public = torch.randn(1, VOCAB, generator=generator)
    private = public + torch.randn(MODELS, 1, VOCAB, generator=generator)
    public[:, :2] = private[:, :, 1] = private[1, :, 2] = -math.inf
    draws = 1500
    mechanism = MECHANISMS[name]
    if isinstance(mechanism, AdaPMixED):
        mechanism = AdaPMixED(**SCREENED | dict(screen=None))
    copies = private.repeat(1, draws, 1), public.repeat(draws, 1)
    tokens = uncharged(mechanism.propose(*copies, rng=SeededRandom(1))).tokens
    found = log_probs(mechanism, *copies, seed=2).exp().mean(0).tolist()
    for v, mass in enumerate(found):
        share = float((tokens == v).double().mean())
        assert abs(share - mass) <= 4 * math.sqrt(mass * (1 - mass) / draws), (v, share, mass)
    assert found[1] == 0.0


# Drawn tokens, down to where doubles end: docs/theory/numerics.md.

# Each with the least and the largest log p/q.
CASES: dict[str, tuple[Mechanism, float, float]] = {
    "box": (ClippedMixing(0.5, 2.0, 9), math.log(0.5), math.log(2.0)),
    "charged": (ClippedMixing(0.25, 8.0, order=3.0), -math.log(4), math.log(8.0)),
    "least": (ClippedMixing(3e-6, 3.0, order=2.0), math.log(3e-6), 1.1),
    "pool": (ClippedLogPool(-1.0, 2.0, 1.5), -4.5, 4.5),
    "wide-pool": (ClippedLogPool(-10.0, 20.0, 11.0), -330.0, 330.0),
}


def rows(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = torch.cat([torch.zeros(1, 3), -torch.linspace(1, 780, 1500)[None]], 1)
    return public + 3 * torch.randn(3, 1, 1503, generator=generator), public


def drawn(found: NextToken) -> list[Any]:
    """Return the log of each token's probability; one of the tail is drawn after the tail."""
    logits = found.rows.tail.logits
    columns = sampling_weights(found.probabilities(), found.rows.public)[0]
    within = sampling_weights(logits.double().softmax(-1), logits)[0]
    assert min(one for one in columns[:-1] if one) >= 2**52  # as many bits as a double can have
    one = 1074 * mpmath.log(2)
    tail = mpmath.log(columns[-1]) - one
    return [
        mpmath.log(own) - one if own else tail + mpmath.log(share) - one
        for own, share in zip(columns[:-1], within, strict=True)
    ]


def exact_log_q(public: Tensor) -> list[Any]:
    with mpmath.workdps(40):
        row = [mpmath.mpf(z) for z in public[0].tolist()]
        lse = mpmath.log(mpmath.fsum(mpmath.exp(z) for z in row))
        return [z - lse for z in row]


@pytest.mark.parametrize("name", CASES)
def test_drawn_ratios_keep_to_the_bounds_at_every_token(name: str) -> None:
    mechanism, least, most = CASES[name]
    private, public = rows(1)
    found = settled(mechanism.propose(private, public, rng=SeededRandom(0)))._distribution
    tail = []
    for log_p, log_q in zip(drawn(found), exact_log_q(public), strict=True):
        # The tail's logit is float32, which moves its tokens by as much as half of its last bit.
        slack = 1e-9 if log_q >= LEAST_PUBLIC else 4e-6
        assert least - slack <= log_p - log_q <= most + slack
        if LEAST_PUBLIC - 600 < log_q < LEAST_PUBLIC - 0.01:  # where q/t is a double
            tail.append(log_p - log_q)
    assert len(tail) > 500 and max(tail) - min(tail) < 1e-9  # one factor


@pytest.mark.parametrize("name", CASES)
def test_an_evaluated_distribution_is_the_drawn_one(name: str) -> None:
    private, public = rows(3)
    targets = torch.arange(0, public.shape[1], 7)
    found = settled(CASES[name][0].propose(private, public, rng=SeededRandom(0)))._distribution
    exact = drawn(found)
    for target in targets.tolist():
        stated = found.log_prob(torch.tensor([target])).item()
        if stated > -707.0:
            assert stated == pytest.approx(float(exact[target]), abs=1e-9)


@pytest.mark.parametrize(("lower", "upper"), [(-32.0, 32.0), (0.0, 64.0), (-64.0, 0.0)])
def test_mass_on_the_tail_raises_no_error(lower: float, upper: float) -> None:
    """An error would tell that a member has its mass where the public model has none."""
    private, public = torch.tensor([[[-2000.0, 0.0]]]), torch.tensor([[0.0, 0.0]])
    for rare in (-69.0, -71.0, -500.0, -1e4):
        public[0, 1] = rare
        proposal = settled(
            ClippedLogPool(lower, upper, 5.0).propose(private, public, rng=SeededRandom(0))
        )
        assert abs(float(proposal._distribution.probabilities().sum()) - 1.0) < 1e-12
