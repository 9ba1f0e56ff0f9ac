"""The checks of weights and losses: they agree with 70 digits, and notice wrong answers."""

from __future__ import annotations

import cases
import checks
import extended
import mpmath as mp
import oracle
import pytest
import torch
from fuzz_cases import build
from mpmath import mpf

import adapmixed_ext

SMALL = [call for call in map(build, range(400)) if call.private.numel() <= 150]


@pytest.mark.parametrize("part", range(3))
def test_extended_precision_is_that_of_70_digits(part: int) -> None:
    """mpmath checks a seeded sample of calls, and that extended precision can be trusted."""
    chosen = SMALL[part::3][:20]
    assert len(chosen) == 20
    for call in chosen:
        private, public, order = call.private, call.public, call.order
        result = adapmixed_ext.project(private, public, order=order, radius=call.radius)
        loss_order, way = call.orders[0], call.adjacency
        loss = adapmixed_ext.leave_one_out(
            private, public, result, orders=loss_order, adjacency=way
        )
        pair = extended.array(result.weight), extended.array(result.complement)
        mixtures = extended.Mixtures(private, public, *pair)
        i, b = call.seed % private.shape[0], call.seed % private.shape[1]
        w, c = result.weight[i, b].item(), result.complement[i, b].item()
        ball = oracle.Ball(private[i, b], public[b])
        assert not checks.weight_fault(ball, w, c, order, call.radius), (call, w, c)
        exact = checks.exact_loss(
            private[:, b], public[b], result.weight[:, b], result.complement[:, b], i,
            loss_order, way,
        )  # fmt: skip
        unbounded = bool(checks.may_be_unbounded(private, public)[b])
        value = loss[i, b, 0].item()
        assert checks.loss_holds(value, exact, loss_order, unbounded=unbounded), (call, exact)
        if not mp.isinf(exact):
            other = mpf(str(mixtures.losses([i], [loss_order], way)[0, b, 0]))
            assert abs(other - exact) <= 1e-12 * exact + 1e-15, (call, other, exact)
        if ball.masked:
            continue
        rows = extended.Rows(private[i, b : b + 1], public[b : b + 1])
        at = extended.exact_pair(*(value[i : i + 1, b] for value in pair))
        excess = ball.excess(*oracle.exact_weight(w, c), order)
        error = abs(mpf(str(rows.excess(*at, order)[0])) - excess)
        assert error <= mpf(str(rows.uncertainty(order)[0])), (call, mp.nstr(error))


def test_wrong_answers_are_noticed() -> None:
    private, public = cases.logits(5, 3, 1, 9, 2.0, 1.0)
    right = adapmixed_ext.project(private, public, order=3.0, radius=0.03)
    loss = adapmixed_ext.leave_one_out(private, public, right, orders=3.0)
    for i in range(3):
        ball = oracle.Ball(private[i, 0], public[0])
        for factor, fault in ((1 + 2.1e-4, "infeasible"), (1 - 2.1e-4, "weight too small")):
            wrong = right.weight[i, 0].item() * factor
            assert checks.weight_fault(ball, wrong, 1 - wrong, 3.0, 0.03) == fault
        exact = checks.exact_loss(
            private[:, 0], public[0], right.weight[:, 0], right.complement[:, 0], i, 3.0,
            "add_remove",
        )  # fmt: skip
        got = loss[i, 0, 0].item()
        assert checks.loss_holds(got, exact, 3.0)
        assert not checks.loss_holds(float(exact) * (1 - 1e-15), exact, 3.0)
        assert not checks.loss_holds(got * (1 + 1.1e-4), exact, 3.0)


@pytest.mark.parametrize("order,radius", [(1.01, 0.5), (3.0, 0.03), (18.0, 3.6), (1024.0, 0.5)])
def test_models_and_tokens_may_come_in_any_order(order: float, radius: float) -> None:
    private, public = cases.logits(6, 5, 1, 1024, 3.0, 0.8)
    private[1, 0, 7], public[0, 9], private[..., 9] = -torch.inf, -torch.inf, -torch.inf
    generator = torch.Generator().manual_seed(6)
    models, tokens = torch.randperm(5, generator=generator), torch.randperm(1024)
    here = adapmixed_ext.project(private, public, order=order, radius=radius)
    rows = private[models][..., tokens], public[:, tokens]
    there = adapmixed_ext.project(*rows, order=order, radius=radius)
    torch.testing.assert_close(there.weight, here.weight[models], rtol=4e-4, atol=0.0)
    weight = here.weight
    for way in checks.ADJACENCIES:
        one = adapmixed_ext.leave_one_out(private, public, weight, orders=order, adjacency=way)
        two = adapmixed_ext.leave_one_out(*rows, weight[models], orders=order, adjacency=way)
        relative = checks.loss_tolerance(order)
        torch.testing.assert_close(two, one[models], rtol=relative, atol=checks.LOSS_FLOOR)
