"""Noisy aggregation: its sensitivity over all neighbours, its formula, and a planted fault."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from exact import costs, log_probs
from mechanism_cases import GRIDS, everything, logits, neighbours
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms import shaped
from adapmixed.privacy import Accountant, PublicAnswer
from adapmixed.rng import SeededRandom
from adapmixed_ext.inputs import likeliest
from adapmixed_lab.baselines import noisy_aggregation
from adapmixed_lab.baselines.given import unprotected
from adapmixed_lab.baselines.noisy_aggregation import NoisyAggregation

DELTA = 1e-5


def vectors(private: Tensor, public: Tensor, active: int | None, top_k: int) -> Tensor:
    """Return the vectors that get noise, (B, k)."""
    rows = shaped(private, public, active=active).with_tail()
    top = likeliest(rows.public[:, : rows.width], min(top_k, rows.width))
    return noisy_aggregation._mean_on(rows, unprotected(rows)[1], top)


def moved(grid: str, adjacency: str, top_k: int) -> float:
    """Return the largest L2 distance between neighbours, in units of √2/N."""
    private, public, rows, active = everything(grid)
    here = vectors(private, public, active, top_k)
    others = neighbours(private, public, adjacency, rows)
    found = [(vectors(other, public, active, top_k) - here).norm(dim=1).max() for other in others]
    return float(max(found)) * len(private) / math.sqrt(2)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("top_k", [1, 2, 100])
def test_the_mean_moves_by_at_most_the_stated_sensitivity(
    grid: str, adjacency: str, top_k: int
) -> None:
    found = moved(grid, adjacency, top_k)
    assert found <= 1 + 1e-11
    assert found > 0.9 or grid != "V2-N1" or top_k == 1


def test_a_mean_scaled_before_the_noise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = noisy_aggregation._mean_on

    def scaled(*arguments: Any) -> Tensor:
        found = plain(*arguments)
        return found / found.sum(-1, keepdim=True)

    assert moved("V3-N2", "replace_one", 2) <= 1
    monkeypatch.setattr(noisy_aggregation, "_mean_on", scaled)
    assert moved("V3-N2", "replace_one", 2) > 1.01


@pytest.mark.parametrize(("models", "queries", "sigma"), [(1, 1, 2.0), (64, 1000, 0.3)])
def test_the_stated_epsilon_is_that_of_the_gaussian_mechanism(
    models: int, queries: int, sigma: float
) -> None:
    """Charged one by one by the accountant, it is exact but for the widening, and never below."""
    private, public = (torch.zeros(*shape, 4) for shape in ((models, queries), (queries,)))
    ticket = NoisyAggregation(sigma).propose(private, public, rng=SeededRandom(0))
    assert costs(ticket)[1] == PublicAnswer(queries)
    accountant = Accountant(DELTA)
    accountant.charge(ticket)
    assert accountant.queries == queries and accountant.guarantee().kind == "fixed"
    stated = accountant.guarantee("replace_one").epsilon
    with mpmath.workdps(40):
        epsilon = mpmath.mpf(stated)
        mu = mpmath.sqrt(2 * queries) / (models * mpmath.mpf(sigma))
        delta = mpmath.ncdf(mu / 2 - epsilon / mu)
        delta -= mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
    assert DELTA * (1 - 1e-4) < delta <= DELTA


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_answer_is_the_clamped_noisy_vector(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = torch.tensor([0.3, -2.0, 0.01])
    monkeypatch.setattr(ops, "gaussian", lambda *_, **__: noise.double())
    private, public = logits(5)
    p, q = (one.double().softmax(-1) for one in (private, public))
    top = public.topk(3).indices.sort(-1).values  # in the order of tokens
    noisy = (p.mean(0).gather(1, top) + noise).clamp(min=0)
    expected = (1 - weight) * q
    expected.scatter_add_(1, top, weight * noisy / noisy.sum(1, keepdim=True))
    mechanism = NoisyAggregation(0.5, top_k=3, weight=weight)
    torch.testing.assert_close(
        log_probs(mechanism, private, public).exp(), expected, rtol=1e-12, atol=1e-300
    )
    noise = torch.full((3,), -2.0)  # nothing is left
    found = log_probs(NoisyAggregation(0.5, top_k=3), private, public).exp()
    kept = torch.zeros_like(q).scatter(1, top, q.gather(1, top))
    torch.testing.assert_close(found, kept / kept.sum(1, keepdim=True), rtol=1e-12, atol=0.0)


def test_the_tokens_that_can_be_drawn_are_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if members prefer others, and if the public model masks some of the top ones."""
    private, public = logits(4)
    public[:, 4:] = -math.inf
    mechanism, supports = NoisyAggregation(0.5, top_k=5), []
    monkeypatch.setattr(ops, "gaussian", lambda *_, **__: torch.ones(5).double())
    for rows in (private, -9 * private, public.expand(3, -1, -1)):
        supports.append(log_probs(mechanism, rows.contiguous(), public) > -math.inf)
    assert all(torch.equal(one, public > -math.inf) for one in supports)
