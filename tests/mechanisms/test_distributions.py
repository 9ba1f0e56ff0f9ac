"""The distribution of an answer is the same in scores, samples and charges, at every token."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from exact import log_probs, mixtures, settled
from mechanism_cases import BASELINES, FORMULAS, MECHANISMS, every, logits, propose
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.limits import LEAST_PUBLIC
from adapmixed.mechanisms import (
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    NextToken,
)
from adapmixed.rng import SeededRandom
from adapmixed_ext.reference import sampling_weights


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [n for n in MECHANISMS if n != "pmixed-published-subsampled"])
def test_what_is_scored_what_is_sampled_and_what_is_charged_is_one_distribution(
    name: str, masked: bool
) -> None:
    """log_prob, the sampler's probabilities and the weights of the proposal agree to 1e-13.

    Masked are token 0 in the public row alone, 1 in every row, and 2 in one private row.
    """
    private, public = logits(12)
    if masked:
        public[:, :2] = private[:, :, 1] = private[1, :, 2] = -math.inf
    proposal = settled(MECHANISMS[name].propose(private, public, rng=SeededRandom(5)))
    found = log_probs(MECHANISMS[name], private, public, seed=5).exp()
    sampled = proposal._distribution.probabilities()
    torch.testing.assert_close(found, sampled, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(found.sum(1), torch.ones(12).double(), rtol=0.0, atol=1e-13)
    if masked:
        assert not found[:, 1].any() and bool((found[:, 3:] > 0).all())
        return
    if name in BASELINES:
        return
    if name in FORMULAS:
        expected = FORMULAS[name](private, public)
        return torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert hasattr(proposal._proposed.projection, "weight"), f"FORMULAS needs that of {name}"
    expected = torch.from_numpy(mixtures(proposal).mean.astype(float))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


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
    logits = found.rows.tail
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
