"""What judges the operators: the plain reference, the oracle and the checks.

Extended precision agrees with 70 digits, and wrong answers are noticed. The reference is closer to
the oracles than any bound of the operators.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import cases
import checks
import fuzzed
import numpy as np
import oracle
import plans
import pytest
import reports
import torch
from mpmath import mpf
from oracle import Mixtures, array
from plans import INF, Case, Plan
from reports import Report
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import reference

SMALL = [call for call in map(fuzzed.fuzzed, range(400)) if call[0].private.numel() <= 150]


def computed(
    case: Case, plan: Plan, weight: Tensor, exact: bool
) -> tuple[list[oracle.Array], oracle.RowPairs, oracle.Pool]:
    """Return a loss and a divergence, the first pair of rows, and the pool of one position."""
    private, public = case.private, case.public
    mixtures = oracle.Mixtures.of_weights(private, public, weight, exact=exact)
    losses = mixtures.losses([0], plan.orders[:1], plan.adjacencies[0])
    p, q = oracle.softmax(private[0], exact), oracle.softmax(public, exact)
    divergence = oracle.one_way(p, q, plan.orders[:1])
    rows, pool = oracle.RowPairs(private[0], public, exact), plan.pools[0]
    return [losses, divergence], rows, oracle.Pool(private, public, pool, exact=exact)


@pytest.mark.parametrize("part", range(3))
def test_extended_precision_is_that_of_70_digits(part: int) -> None:
    """A seeded sample of calls shows that extended precision can be trusted."""
    chosen = SMALL[part::3][:20]
    assert len(chosen) == 20
    for case, plan in chosen:
        first, b = (plan.seed % size for size in case.private.shape[:2])
        rows = case.private.roll(-first, 0)[:, b : b + 1], case.public[b : b + 1]
        (order, radius), single = plan.balls[0], Case(case.name, *rows)
        weight = adapmixed_ext.project(*rows, order=order, radius=radius).weight
        wide, wide_rows, pool = computed(single, plan, weight, False)
        exact, exact_rows, truth = computed(single, plan, weight, True)
        pairs = [(*pair, 1e-12 * abs(pair[1]) + 1e-15) for pair in zip(wide, exact, strict=True)]
        bound = 2e-3 * pool.log_error.max()  # what the operators may be off by
        for name in ("log_normaliser", "span", "log_p"):
            pairs.append((getattr(pool, name), getattr(truth, name), bound))
        if not wide_rows.masked.any():
            excess = exact_rows.excess(oracle.array(weight[0], True), order)
            near = wide_rows.excess(oracle.array(weight[0]), order)
            pairs.append((near, excess, wide_rows.uncertainty(order)))
        for value, other, error in pairs:
            digits = np.array([mpf(str(number)) for number in value.flat]).reshape(other.shape)
            error = np.asarray(error).astype(float)
            off = np.where(abs(other) == np.inf, digits != other, abs(digits - other) > error)
            assert not off.any(), (case.name, value, other)


@pytest.mark.parametrize(
    "operator,field,factor",
    [
        ("project", "weight", 1 + 2.1e-4), ("project", "weight", 1 - 2.1e-4),
        ("project", "weight", 0.0),
        ("leave_one_out", "", 1 - 1e-4), ("leave_one_out", "", 1 + 1.1e-4),
        ("mixture", "", 1 + 2e-6), ("mixture", "", 1 + 1e-11), ("log_prob", "", 1 + 2e-6),
        ("log_pool", "span", 1 + 1e-11), ("log_pool", "log_normaliser", 1 + 1e-11),
        ("clip_project", "charge", 1 - 1.1e-5), ("clip_project", "charge", 1 + 1.1e-5),
        ("clip_project", "log_scale", 1 + 1e-8), ("screen", "divergence", 1 + 2e-5),
        ("screen", "divergence", 1 - 2e-5),
    ],
)  # fmt: skip
def test_wrong_answers_are_noticed(operator: str, field: str, factor: float) -> None:
    case = Case("right", *plans.logits(5, 3, 1, 9, 2.0, 1.0))
    plan = Plan(balls=((3.0, 0.03),), weighings=((3.0, 0.03),), boxes=((0.6, 1.65),))
    check = "mixture" if operator == "log_prob" else operator
    right, wrong = Report(), Report()

    def scaled(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = call(*arguments, **named)
        if call.__name__ != operator:
            return result
        if not field:
            return result * factor
        return dataclasses.replace(result, **{field: getattr(result, field) * factor})

    checks.CHECKS[check](case, plan, adapmixed_ext, right)
    checks.CHECKS[check](case, plan, reports.Through(scaled), wrong)
    assert not right.failures and wrong.failures


ALL = cases.small() + cases.corners()
PAIRS = [
    (1.01, 1e-6), (1.5, 0.5), (2.0, 1e-3), (3.0, 0.03), (18.0, 3.6), (64.0, 9.5), (1024.0, 0.03),
    (1.01, 50.0),
]  # fmt: skip


@pytest.mark.parametrize("case", ALL, ids=plans.ids(ALL))
@pytest.mark.slow
def test_project_is_the_optimum(case: Case) -> None:
    """The weight is feasible; a larger one is not."""
    private, public = case.private[-1, -1:], case.public[-1:]
    rows, step = oracle.RowPairs(private, public, exact=True), mpf(1e-8)
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


@pytest.mark.parametrize("case", ALL, ids=plans.ids(ALL))
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
    both = reference.renyi_divergence(private, public, orders)
    for got, exact in zip(
        both, (oracle.one_way(p, q, orders), oracle.one_way(q, p, orders)), strict=True
    ):
        report.compare("renyi", array(got), exact, 1e-7 * abs(np.nan_to_num(exact)) + 1e-12)
    assert not report.failures, report.failures[:5]


@pytest.mark.parametrize("case", ALL, ids=plans.ids(ALL))
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


@pytest.mark.parametrize("case", ALL, ids=plans.ids(ALL))
def test_log_pool(case: Case) -> None:
    models, positions = case.private.shape[:2]
    report, active = Report(), torch.arange(models * positions).reshape(models, positions) % 3 != 1
    for setting in (plans.POOLS[0], plans.Setting(-34.0, 30.0, 0.5, 2)):
        pool = reference.log_pool(
            case.private, case.public, **setting.options(models), active=active
        )
        truth = oracle.Pool(case.private, case.public, setting, active=active)
        exact = truth.log_p, truth.log_normaliser, truth.span
        for name, got, value in zip(("log p", "normaliser", "span"), pool, exact, strict=True):
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
