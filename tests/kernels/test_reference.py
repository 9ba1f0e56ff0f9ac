"""The plain reference against multi-precision arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import cases
import mpmath as mp
import oracle
import pytest
import torch
from cases import Case
from mpmath import mpf

from adapmixed_ext import reference

ALL = cases.small() + cases.corners()
PAIRS = [
    (1.01, 1e-6), (1.5, 0.5), (2.0, 1e-3), (3.0, 0.03), (18.0, 3.6), (64.0, 9.5), (1024.0, 0.03),
    (1.01, 50.0),
]  # fmt: skip
LOSS_ORDERS = (1.01, 2.0, 18.0, 64.0)


@pytest.mark.parametrize("case", ALL, ids=cases.ids(ALL))
@pytest.mark.slow
def test_project_is_the_optimum(case: Case) -> None:
    for order, radius in PAIRS:
        weight, complement = reference.project(
            case.private, case.public, order=order, radius=radius
        )
        assert weight.shape == complement.shape == case.private.shape[:2]
        for i, b in case.rows:
            ball = oracle.Ball(case.private[i, b], case.public[b])
            exact_w, exact_c = ball.optimum(order, radius)
            w, c = oracle.exact_weight(weight[i, b].item(), complement[i, b].item())
            where = (order, radius, i, b, mp.nstr(exact_w), mp.nstr(exact_c))
            smaller, exact = (c, exact_c) if exact_c < exact_w else (w, exact_w)
            assert mp.almosteq(smaller, exact, rel_eps=1e-8, abs_eps=mpf(3e-308)), where
            # Feasible up to the rounding of the constraint in float64.
            assert w == 0 or ball.excess(w, c, order) <= (order - 1) * radius * (1 + 1e-9), where


@pytest.mark.parametrize("case", ALL, ids=cases.ids(ALL))
def test_renyi_divergence(case: Case) -> None:
    orders = (1.01, 2.0, 18.0, 1024.0)
    forward, backward = reference.renyi_divergence(case.private, case.public, orders)
    assert forward.shape == backward.shape == (*case.private.shape[:2], len(orders))
    for i, b in case.rows:
        p, q = oracle.softmax(case.private[i, b]), oracle.softmax(case.public[b])
        for k, order in enumerate(orders):
            for value, truth in (
                (forward, oracle.renyi(p, q, order)), (backward, oracle.renyi(q, p, order))
            ):  # fmt: skip
                assert _close(value[i, b, k].item(), truth, 1e-7, 1e-12), (i, b, order)


@pytest.mark.parametrize("case", ALL, ids=cases.ids(ALL))
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
@pytest.mark.slow
def test_leave_one_out(case: Case, adjacency: str) -> None:
    for order, radius in ((2.0, 0.5), (18.0, 3.6), (64.0, 9.5)):
        pair = reference.project(case.private, case.public, order=order, radius=radius)
        loss = reference.leave_one_out(
            case.private, case.public, pair, orders=LOSS_ORDERS, adjacency=adjacency
        )
        for b in range(case.public.shape[0]):
            truth = oracle.leave_one_out(
                case.private[:, b], case.public[b], pair[0][:, b], pair[1][:, b],
                LOSS_ORDERS, adjacency,
            )  # fmt: skip
            for i, row in enumerate(truth):
                for k, value in enumerate(row):
                    got = loss[i, b, k].item()
                    assert _close(got, value, 1e-8, 1e-13), (order, i, b, LOSS_ORDERS[k])


def test_slots_that_are_absent_answer_the_public_distribution() -> None:
    case = cases.ordinary()[3]
    padded = torch.cat([case.private, case.public.expand(3, *case.public.shape)])
    weight = torch.full(padded.shape[:2], 0.5, dtype=torch.float64)
    for adjacency in ("add_remove", "zero_out"):
        whole = reference.leave_one_out(
            padded, case.public, weight, orders=(6.0,), adjacency=adjacency
        )
        part = reference.leave_one_out(
            case.private, case.public, weight[:2], orders=(6.0,), adjacency=adjacency, num_models=5
        )
        torch.testing.assert_close(part, whole[:2], rtol=1e-11, atol=0.0)


@pytest.mark.parametrize("case", ALL, ids=cases.ids(ALL))
def test_screen(case: Case) -> None:
    positions, vocab = case.public.shape
    for top_k, sigma, order in ((1, 0.01, 2.0), (5, 0.01, 18.0), (vocab + 3, 1e-6, 3.0)):
        generator = torch.Generator().manual_seed(7)
        noise = sigma * torch.randn(positions, top_k, generator=generator, dtype=torch.float64)
        divergence, passed = reference.screen(
            case.private, case.public, noise, weight=0.3, order=order, threshold=0.5, top_k=top_k
        )
        for b in range(positions):
            truth = oracle.screening(
                case.private[:, b], case.public[b], noise[b], weight=0.3, order=order, top_k=top_k
            )
            assert _close(divergence[b].item(), truth, 1e-8, 1e-12), (b, top_k, order)
            assert passed[b].item() == (divergence[b].item() <= 0.5)


@pytest.mark.parametrize("case", ALL, ids=cases.ids(ALL))
def test_mixture_and_log_prob(case: Case) -> None:
    pair = reference.project(case.private, case.public, order=18.0, radius=3.6)
    mixture = reference.mixture(case.private, case.public, pair)
    positions, vocab = case.public.shape
    for b in range(positions):
        bars, _ = oracle.projected(case.private[:, b], case.public[b], pair[0][:, b], pair[1][:, b])
        truth = oracle.mean(bars)
        for v in range(vocab):
            assert _close(mixture[b, v].item(), truth[v], 1e-11, 1e-300), (b, v)
    targets = torch.arange(positions) % vocab
    log_prob = reference.log_prob(case.private, case.public, pair, targets)
    picked = mixture.gather(-1, targets.unsqueeze(-1)).squeeze(-1).log()
    torch.testing.assert_close(log_prob[picked > -600], picked[picked > -600])


@pytest.mark.parametrize("case", ALL, ids=cases.ids(ALL))
def test_log_pool(case: Case) -> None:
    models, positions = case.private.shape[:2]
    active = torch.arange(models * positions).reshape(models, positions) % 3 != 1
    for lower, upper, scale, extra in ((-0.25, 1.0, 2.0, 0), (-34.0, 30.0, 0.5, 2)):
        log_p, log_normaliser, span = reference.log_pool(
            case.private, case.public, lower=lower, upper=upper, scale=scale,
            num_models=models + extra, active=active,
        )  # fmt: skip
        for b in range(positions):
            truth, exact_normaliser, spans = oracle.log_pool(
                case.private[:, b], case.public[b], lower=lower, upper=upper, scale=scale,
                slots=models + extra, active=active[:, b].tolist(),
            )  # fmt: skip
            assert _close(log_normaliser[b].item(), exact_normaliser, 1e-12, 1e-10), b
            for i, exact in enumerate(spans):
                assert _close(span[i, b].item(), exact, 1e-12, 1e-10), (i, b)
            for v, p in enumerate(truth):
                got = log_p[b, v].item()
                assert got == -math.inf if p == 0 else _close(got, mp.log(p), 1e-12, 1e-10), (b, v)


def test_sampling_weights() -> None:
    probabilities = torch.tensor([[0.5, 0.5 - 1e-9, 1e-9, 0.0, 1e-30, 0.0]], dtype=torch.float64)
    public = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, -math.inf]])
    weights = reference.sampling_weights(probabilities, public)
    exact = [int(Fraction(p) * 2**1074) for p in probabilities[0].tolist()]
    assert weights == [[*exact[:3], 1, exact[4], 0]]


def _close(got: float, truth: mpf, relative: float, absolute: float) -> bool:
    if mp.isinf(truth):
        return math.isinf(got) and got > 0
    return abs(mpf(got) - truth) <= relative * abs(truth) + absolute
