"""The plain reference against the oracles: closer than any bound of the operators."""

from __future__ import annotations

import math
from fractions import Fraction

import cases
import numpy as np
import oracle
import pytest
import torch
from cases import INF, Case
from checks import Report
from mpmath import mpf
from oracle import Mixtures, array

from adapmixed_ext import reference

ALL = cases.small() + cases.corners()
PAIRS = [
    (1.01, 1e-6), (1.5, 0.5), (2.0, 1e-3), (3.0, 0.03), (18.0, 3.6), (64.0, 9.5), (1024.0, 0.03),
    (1.01, 50.0),
]  # fmt: skip


@pytest.mark.parametrize("case", ALL, ids=cases.ids(ALL))
@pytest.mark.slow
def test_project_is_the_optimum(case: Case) -> None:
    """The weight is feasible; a larger one is not."""
    private, public = case.private[-1, -1:], case.public[-1:]
    rows, step = oracle.Rows(private, public, exact=True), mpf(1e-8)
    for order, radius in PAIRS:
        weight = reference.project(case.private, case.public, order=order, radius=radius)
        assert weight.shape == case.private.shape[:2]
        w = oracle.array(weight[-1, -1:], exact=True)
        inside, _ = rows.sides(w, order, radius * (1 + 1e-9))
        assert inside.all(), (order, radius)  # up to the rounding of the constraint in float64
        larger = w + step * np.minimum(w, 1 - w) + mpf(2) ** -51 * w + 3e-308
        if w < 1 and larger <= 1 and not (rows.masked | rows.equal):
            _, outside = rows.sides(larger, order, radius)
            assert outside.all(), (order, radius, w)


@pytest.mark.parametrize("case", ALL, ids=cases.ids(ALL))
def test_losses_mixtures_and_divergences(case: Case) -> None:
    private, public, report = case.private, case.public, Report()
    orders = (1.01, 2.0, 18.0, 64.0)
    for order, radius in ((2.0, 0.5), (18.0, 3.6), (64.0, 9.5)):
        weight = reference.project(private, public, order=order, radius=radius)
        for absent in (0, 3):
            slots = len(private) + absent
            mixtures = Mixtures.of_weights(private, public, weight, slots)
            for adjacency in ("add_remove", "zero_out"):
                loss = reference.leave_one_out(
                    private, public, weight, orders=orders, adjacency=adjacency, num_models=slots
                )
                exact = mixtures.losses(range(len(private)), orders, adjacency)
                error = 1e-8 * abs(np.nan_to_num(exact)) + 1e-13
                report.compare(f"loss, {adjacency}", array(loss), exact, error)
        exact = Mixtures.of_weights(private, public, weight).mean
        mixture = reference.mixture(private, public, weight)
        report.compare("mixture", array(mixture), exact, 1e-11 * exact + 1e-300)
        for targets in case.targets():
            log_prob = reference.log_prob(private, public, weight, targets)
            picked = mixture.gather(-1, targets[:, None])[:, 0].log()
            torch.testing.assert_close(log_prob[picked > -600], picked[picked > -600])
    orders = (1.01, 2.0, 18.0, 1024.0)
    p, q = (oracle.softmax(rows) for rows in (private, public))
    found = reference.renyi_divergence(private, public, orders)
    for got, exact in zip(
        found, (oracle.one_way(p, q, orders), oracle.one_way(q, p, orders)), strict=True
    ):
        report.compare("renyi", array(got), exact, 1e-7 * abs(np.nan_to_num(exact)) + 1e-12)
    assert not report.failures, report.failures[:5]


@pytest.mark.parametrize("case", ALL, ids=cases.ids(ALL))
def test_screen(case: Case) -> None:
    positions, vocab = case.public.shape
    for top_k, sigma, order in ((1, 0.01, 2.0), (5, 0.01, 18.0), (vocab + 3, 1e-6, 3.0)):
        generator = torch.Generator().manual_seed(7)
        noise = sigma * torch.randn(positions, top_k, generator=generator, dtype=torch.float64)
        divergence, passed = reference.screen(
            case.private, case.public, noise, weight=0.3, order=order, threshold=0.5, top_k=top_k
        )
        for b, got in enumerate(divergence.tolist()):
            truth = oracle.screening(
                case.private[:, b], case.public[b], noise[b], weight=0.3, order=order, top_k=top_k
            )
            good = got == INF if truth == INF else abs(got - truth) <= 1e-8 * truth + 1e-12
            assert good, (b, top_k, order, got)
            assert passed[b].item() == (got <= 0.5)


@pytest.mark.parametrize("case", ALL, ids=cases.ids(ALL))
def test_log_pool(case: Case) -> None:
    models, positions = case.private.shape[:2]
    report, active = Report(), torch.arange(models * positions).reshape(models, positions) % 3 != 1
    for setting in (cases.POOLS[0], cases.Setting(-34.0, 30.0, 0.5, 2)):
        found = reference.log_pool(
            case.private, case.public, **setting.options(models), active=active
        )
        truth = oracle.Pool(case.private, case.public, setting, active=active)
        exact = truth.log_p, truth.log_normaliser, truth.span
        for name, got, value in zip(("log p", "normaliser", "span"), found, exact, strict=True):
            error = 1e-12 * abs(np.nan_to_num(value)) + 1e-10
            report.compare(name, array(got), value, error)
    assert not report.failures, report.failures[:5]


def test_sampling_weights() -> None:
    """A token with q > 0 can be drawn even if p rounds to 0; one with q = 0 cannot."""
    probabilities = torch.tensor([[0.5, 0.5 - 1e-9, 1e-9, 0.0, 1e-30, 0.0]], dtype=torch.float64)
    public = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, -math.inf]])
    weights = reference.sampling_weights(probabilities, public)
    exact = [int(Fraction(p) * 2**1074) for p in probabilities[0].tolist()]
    assert weights == [[*exact[:3], 1, exact[4], 0]]
