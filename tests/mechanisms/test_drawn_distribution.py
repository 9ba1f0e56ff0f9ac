"""The distribution of drawn tokens, down to where doubles end: docs/theory/numerics.md."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from exact import settled
from torch import Tensor

from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.rng import SeededRandom
from adapmixed_ext.reference import sampling_weights

# Each with the least and the largest log p/q, and the log q below which tokens take q.
CASES: dict[str, tuple[Mechanism, float, float, float]] = {
    "box": (ClippedMixing(0.5, 2.0, 9), math.log(0.5), math.log(2.0), -700 - math.log(0.5)),
    "charged": (ClippedMixing(0.25, 8.0, order=3.0), -math.log(4), math.log(8.0), -698.614),
    "least": (ClippedMixing(1e-30, 3.0, order=2.0), math.log(1e-30), 1.1, -630.922),
    "pool": (ClippedLogPool(-1.0, 2.0, 1.5), -4.5, 4.5, -695.5),
    "wide-pool": (ClippedLogPool(-150.0, 180.0, 1.0), -330.0, 330.0, -370.0),
}


def rows(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = torch.cat([torch.zeros(1, 3), -torch.linspace(1, 780, 1500)[None]], 1)
    return public + 3 * torch.randn(3, 1, 1503, generator=generator), public


def drawn(mechanism: Mechanism, private: Tensor, public: Tensor) -> list[int]:
    """Return each token's weight in units of 2^-1074."""
    found = settled(mechanism.propose(private, public, rng=SeededRandom(0)))._distribution
    return sampling_weights(found.probabilities(), public)[0]


def exact_log_q(public: Tensor) -> list[Any]:
    with mpmath.workdps(40):
        row = [mpmath.mpf(z) for z in public[0].tolist()]
        lse = mpmath.log(mpmath.fsum(mpmath.exp(z) for z in row))
        return [z - lse for z in row]


@pytest.mark.parametrize("name", CASES)
def test_drawn_ratios_keep_to_the_bounds_at_every_token(name: str) -> None:
    mechanism, least, most, below = CASES[name]
    private, public = rows(1)
    depth = 0
    weights = drawn(mechanism, private, public)
    for weight, log_q in zip(weights, exact_log_q(public), strict=True):
        log_ratio = float(mpmath.log(weight) - 1074 * mpmath.log(2) - log_q)
        if log_q < below - 0.01:
            depth += 1
            units = float(mpmath.exp(log_q) * mpmath.mpf(2) ** 1074)
            assert abs(weight - units) <= 1 + 1e-12 * units
        elif log_q > below + 0.01:
            assert least - 1e-9 <= log_ratio <= most + 1e-9
            assert weight >= 2**52  # as many bits as a double can have
    assert depth > 50


@pytest.mark.parametrize("name", CASES)
def test_what_is_answered_from_q_has_the_same_bits_whatever_the_shards_are(name: str) -> None:
    mechanism, _, _, below = CASES[name]
    (private, public), (other, _) = rows(1), rows(2)
    here, there = drawn(mechanism, private, public), drawn(mechanism, other, public)
    rare = (torch.log_softmax(public[0].double(), 0) < below - 0.01).tolist()
    for one, two, is_rare in zip(here, there, rare, strict=True):
        assert one == two or not is_rare
    assert here != there


@pytest.mark.parametrize("name", CASES)
def test_an_evaluated_distribution_is_the_drawn_one(name: str) -> None:
    private, public = rows(3)
    targets = torch.arange(0, public.shape[1], 7)
    found = settled(CASES[name][0].propose(private, public, rng=SeededRandom(0)))._distribution
    weights = sampling_weights(found.probabilities(), public)[0]
    for target in targets.tolist():
        stated = found.log_prob(torch.tensor([target])).item()
        if stated > -707.0:
            exact = float(mpmath.log(weights[target]) - 1074 * mpmath.log(2))
            assert stated == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize(("lower", "upper"), [(-165.0, 165.0), (-30.0, 300.0), (-300.0, 30.0)])
def test_mass_on_tokens_that_take_q_raises_no_error(lower: float, upper: float) -> None:
    """An error would tell that a member has its mass where the public model has none."""
    private, public = torch.tensor([[[-2000.0, 0.0]]]), torch.tensor([[0.0, 0.0]])
    for rare in (-201.0, -340.0, -369.0, -371.0, -500.0):
        public[0, 1] = rare
        proposal = settled(
            ClippedLogPool(lower, upper, 1.0).propose(private, public, rng=SeededRandom(0))
        )
        assert abs(float(proposal._distribution.probabilities().sum()) - 1.0) < 1e-12


def test_settings_that_would_lose_tokens_raise() -> None:
    with pytest.raises(ValueError, match=r"scale \* \(upper - lower\) must be <= 330, got 2.0 \*"):
        ClippedLogPool(-100.0, 201.0, 2.0)
    with pytest.raises(ValueError, match=r"lower \(a ratio\) must be >= 1e-30, got 0.0"):
        ClippedMixing(0.0, 2.0, order=3.0)
    assert ClippedMixing(0.0, 2.0, 5).lower == 0.0
