"""The checks: extended precision agrees with 70 digits, and wrong answers are noticed."""

from __future__ import annotations

import dataclasses

import cases
import checks
import mpmath as mp
import numpy as np
import oracle
import pytest
from cases import Case, Plan
from checks import Report
from mpmath import mpf

import adapmixed_ext

SMALL = [call for call in map(cases.fuzzed, range(400)) if call[0].private.numel() <= 150]


@pytest.mark.parametrize("part", range(3))
def test_extended_precision_is_that_of_70_digits(part: int) -> None:
    """A seeded sample of calls shows that extended precision can be trusted."""
    chosen = SMALL[part::3][:20]
    assert len(chosen) == 20
    for case, plan in chosen:
        private, public, seed = case.private, case.public, plan.seed
        (order, radius), loss_order, way = plan.balls[0], plan.orders[0], plan.adjacencies[0]
        result = adapmixed_ext.project(private, public, order=order, radius=radius)
        i, b = seed % private.shape[0], seed % private.shape[1]
        weight = result.weight[:, b]
        exact = oracle.exact_loss(private[:, b], public[b], weight, i, loss_order, way)
        if not mp.isinf(exact):
            mixtures = oracle.Mixtures.of_weights(private, public, result.weight)
            other = mpf(str(mixtures.losses([i], [loss_order], way)[0, b, 0]))
            assert abs(other - exact) <= 1e-12 * exact + 1e-15, (case.name, other, exact)
        p, q = oracle.softmax(private[i, b]), oracle.softmax(public[b])
        exact = oracle.renyi(p, q, loss_order)
        if not mp.isinf(exact):
            rows = (oracle.log_softmax(logits) for logits in (private[i, b], public[b]))
            other = mpf(str(oracle.one_way(*map(np.exp, rows), [loss_order])[0]))
            assert abs(other - exact) <= 1e-12 * exact + 1e-15, (case.name, other, exact)
        setting = plan.pools[0]
        pool = oracle.Pool(private, public, setting)
        p, normaliser, spans = oracle.log_pool(
            private[:, b], public[b], lower=setting.lower, upper=setting.upper,
            scale=setting.scale, slots=len(private) + setting.extra,
        )  # fmt: skip
        bound = 2e-3 * pool.log_error[b].max()  # what the operators may be off by
        for one, exact in zip(
            (pool.log_normaliser[b], *pool.span[:, b], *pool.log_p[b]),
            (normaliser, *spans, *(mp.log(x) if x else -mp.inf for x in p)), strict=True,
        ):  # fmt: skip
            good = mpf(str(one)) == exact or abs(mpf(str(one)) - exact) <= bound
            assert good, (case.name, one, exact)
        ball = oracle.Ball(private[i, b], public[b])
        if ball.masked:
            continue
        rows = oracle.Rows(private[i, b : b + 1], public[b : b + 1])
        excess = ball.excess(mpf(weight[i].item()), order)
        error = abs(mpf(str(rows.excess(oracle.array(weight[i : i + 1]), order)[0])) - excess)
        assert error <= mpf(str(rows.uncertainty(order)[0])), (case.name, mp.nstr(error))


class Wrong:
    """The operators, one field of whose answers is multiplied by a factor."""

    def __init__(self, operator: str, field: str, factor: float) -> None:
        self.operator, self.field, self.factor = operator, field, factor

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object, **named: object) -> object:
            found = getattr(adapmixed_ext, name)(*arguments, **named)
            if name != self.operator:
                return found
            if not self.field:
                return found * self.factor
            fields = {self.field: getattr(found, self.field) * self.factor}
            return dataclasses.replace(found, **fields)

        return call


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
    checks.CHECKS[check](case, plan, adapmixed_ext, right)
    checks.CHECKS[check](case, plan, Wrong(operator, field, factor), wrong)
    assert not right.failures and wrong.failures
