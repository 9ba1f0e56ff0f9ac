"""mixture and log_prob: the distribution a token is drawn from."""

from __future__ import annotations

import math

import cases
import mpmath as mp
import oracle
import pytest
import torch
from cases import Case
from mpmath import mpf

import adapmixed_ext
from adapmixed_ext import reference

SMALL = cases.small()
WIDE = cases.wide()
TOLERANCE = 1e-6


@pytest.mark.parametrize("case", SMALL, ids=cases.ids(SMALL))
def test_against_the_oracle(case: Case, device: torch.device) -> None:
    case = case.to(device)
    positions, vocab = case.public.shape
    for order, radius in ((18.0, 3.6), (64.0, 9.5)):
        projection = adapmixed_ext.project(case.private, case.public, order=order, radius=radius)
        mixture = adapmixed_ext.mixture(case.private, case.public, projection)
        assert mixture.dtype == torch.float64 and mixture.shape == (positions, vocab)
        bars = [
            oracle.projected(
                case.private[:, b], case.public[b], projection.weight[:, b],
                projection.complement[:, b],
            )[0]
            for b in range(positions)
        ]  # fmt: skip
        for b in range(positions):
            truth = oracle.mean(bars[b])
            assert abs(mixture[b].sum().item() - 1) < 1e-9
            for v in range(vocab):
                got = mixture[b, v].item()
                assert abs(mpf(got) - truth[v]) <= TOLERANCE * truth[v] + mpf(1e-300), (b, v, got)
        for v in range(vocab):
            targets = torch.full((positions,), v, device=device)
            log_prob = adapmixed_ext.log_prob(case.private, case.public, projection, targets)
            assert log_prob.dtype == torch.float64 and log_prob.shape == (positions,)
            for b in range(positions):
                exact, got = oracle.mean(bars[b])[v], log_prob[b].item()
                if exact == 0:
                    assert got == -math.inf
                else:
                    log_exact = mp.log(exact)
                    bound = TOLERANCE + 1e-12 * abs(log_exact)
                    assert abs(mpf(got) - log_exact) <= bound, (b, v, got, mp.nstr(log_exact, 17))


@pytest.mark.parametrize("case", WIDE, ids=cases.ids(WIDE))
def test_wide_vocabularies(case: Case, device: torch.device) -> None:
    moved = case.to(device)
    projection = adapmixed_ext.project(moved.private, moved.public, order=18.0, radius=3.6)
    pair = (projection.weight.cpu(), projection.complement.cpu())
    truth = reference.mixture(case.private, case.public, pair)
    mixture = adapmixed_ext.mixture(moved.private, moved.public, projection).cpu()
    torch.testing.assert_close(mixture, truth, rtol=TOLERANCE, atol=1e-300)
    targets = torch.tensor([0, case.public.shape[1] - 1])[: case.public.shape[0]]
    log_prob = adapmixed_ext.log_prob(
        moved.private, moved.public, projection, targets.to(device)
    ).cpu()
    exact = reference.log_prob(case.private, case.public, pair, targets)
    torch.testing.assert_close(log_prob, exact, rtol=0.0, atol=TOLERANCE)


def test_a_bare_weight_is_a_projection(device: torch.device) -> None:
    case = cases.ordinary()[3].to(device)
    generator = torch.Generator().manual_seed(5)
    weight = torch.rand(2, 2, generator=generator, dtype=torch.float64).to(device)
    truth = reference.mixture(case.private, case.public, weight)
    mixture = adapmixed_ext.mixture(case.private, case.public, weight)
    torch.testing.assert_close(mixture, truth, rtol=TOLERANCE, atol=0.0)
    targets = torch.tensor([3, 16], device=device)
    log_prob = adapmixed_ext.log_prob(case.private, case.public, weight, targets)
    picked = mixture.gather(-1, targets.unsqueeze(-1)).squeeze(-1).log()
    torch.testing.assert_close(log_prob, picked, rtol=0.0, atol=1e-6)


def test_a_token_outside_the_public_support_has_probability_zero(device: torch.device) -> None:
    case = {case.name: case for case in cases.masked()}["masked-public"].to(device)
    projection = adapmixed_ext.project(case.private, case.public, order=18.0, radius=3.6)
    assert adapmixed_ext.mixture(case.private, case.public, projection)[0, 4].item() == 0.0
    four = torch.tensor([4], device=device)
    log_prob = adapmixed_ext.log_prob(case.private, case.public, projection, four)
    assert log_prob.item() == -math.inf
