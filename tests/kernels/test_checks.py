"""The checks: extended precision agrees with 70 digits, and wrong answers are noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cases
import checks
import numpy as np
import oracle
import pytest
from cases import Case, Plan
from checks import Report
from mpmath import mpf
from torch import Tensor

import adapmixed_ext

SMALL = [call for call in map(cases.fuzzed, range(400)) if call[0].private.numel() <= 150]


def computed(
    case: Case, plan: Plan, weight: Tensor, exact: bool
) -> tuple[list[oracle.Array], oracle.Rows, oracle.Pool]:
    """Return a loss and a divergence, the first pair of rows, and the pool of one position."""
    private, public = case.private, case.public
    mixtures = oracle.Mixtures.of_weights(private, public, weight, exact=exact)
    losses = mixtures.losses([0], plan.orders[:1], plan.adjacencies[0])
    p, q = oracle.softmax(private[0], exact), oracle.softmax(public, exact)
    divergence = oracle.one_way(p, q, plan.orders[:1])
    rows, pool = oracle.Rows(private[0], public, exact), plan.pools[0]
    return [losses, divergence], rows, oracle.Pool(private, public, pool, exact=exact)


@pytest.mark.parametrize("part", range(3))
def test_extended_precision_is_that_of_70_digits(part: int) -> None:
    """A seeded sample of calls shows that extended precision can be trusted."""
    chosen = SMALL[part::3][:20]
    assert len(chosen) == 20
    for case, plan in chosen:
        first, b = (plan.seed % size for size in case.private.shape[:2])
        rows = case.private.roll(-first, 0)[:, b : b + 1], case.public[b : b + 1]
        (order, radius), one = plan.balls[0], Case(case.name, *rows)
        weight = adapmixed_ext.project(*rows, order=order, radius=radius).weight
        found, found_rows, pool = computed(one, plan, weight, False)
        exact, exact_rows, truth = computed(one, plan, weight, True)
        pairs = [(*pair, 1e-12 * abs(pair[1]) + 1e-15) for pair in zip(found, exact, strict=True)]
        bound = 2e-3 * pool.log_error.max()  # what the operators may be off by
        for name in ("log_normaliser", "span", "log_p"):
            pairs.append((getattr(pool, name), getattr(truth, name), bound))
        if not found_rows.masked.any():
            excess = exact_rows.excess(oracle.array(weight[0], True), order)
            near = found_rows.excess(oracle.array(weight[0]), order)
            pairs.append((near, excess, found_rows.uncertainty(order)))
        for value, other, error in pairs:
            given = np.array([mpf(str(number)) for number in value.flat]).reshape(other.shape)
            error = np.asarray(error).astype(float)
            off = np.where(abs(other) == np.inf, given != other, abs(given - other) > error)
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
    case = Case("right", *cases.logits(5, 3, 1, 9, 2.0, 1.0))
    plan = Plan(balls=((3.0, 0.03),), weighings=((3.0, 0.03),), boxes=((0.6, 1.65),))
    check = "mixture" if operator == "log_prob" else operator
    right, wrong = Report(), Report()

    def scaled(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        found = call(*arguments, **named)
        if call.__name__ != operator:
            return found
        if not field:
            return found * factor
        return dataclasses.replace(found, **{field: getattr(found, field) * factor})

    checks.CHECKS[check](case, plan, adapmixed_ext, right)
    checks.CHECKS[check](case, plan, checks.Through(scaled), wrong)
    assert not right.failures and wrong.failures
