"""Checks of every operator against its documented bounds, on any device or simulation of one.

The float64 reference or extended precision decide most values. 70 digits decide the doubtful ones,
and all that look wrong. So every reported failure is a failure at 70 digits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import fuzzed
import mpmath as mp
import numpy as np
import oracle
import torch
from ball_checks import (
    check_leave_one_out,
    check_log_prob,
    check_mixture,
    check_project,
    compare_losses,
    losses_hold,
    may_be_unbounded,
)
from mpmath import mpf
from oracle import Array, Mixtures, array
from plans import INF, Case, Plan, Source
from reports import LOSS_ERROR, LOSS_FLOOR, LSE_ERROR, NORMAL, SUM_ERROR, Report, copied
from torch import Tensor

from adapmixed_ext import Clipping, reference


def check_log_pool(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    """Check log_pool, and mixture and log_prob of its result."""
    private, public = case.private, case.public
    for setting in plan.pools:
        for active in plan.actives(case):
            options = setting.options(private.shape[0])
            pool = ops.log_pool(private, public, active=active, **options)
            report.expect(pool.log_normaliser.dtype == pool.span.dtype == torch.float64, "dtype")
            truth = oracle.Pool(private, public, setting, pool.private_lse, active)
            report.compare("pool: lse", array(pool.private_lse), truth.lse, LSE_ERROR)
            report.compare("pool: span", array(pool.span), truth.span, 2 * truth.ratio_error)
            width = Fraction(setting.upper) - Fraction(setting.lower)
            most = Fraction(float(pool.span.max()))
            report.expect(most <= width, "pool: a span above the box", setting)
            units = pool.span / setting.unit(private.shape[0])
            report.expect(torch.equal(units, units.round()), "pool: a span between two units")
            equal = copied(private, public)
            lse = pool.public_lse.expand_as(pool.private_lse)[equal]
            report.expect(torch.equal(pool.private_lse[equal], lse), "pool: lse of a public row")
            report.expect((pool.span[equal] == 0).all(), "pool: span of a public row")
            bound = truth.log_error.max(-1)
            report.compare(
                "pool: normaliser", array(pool.log_normaliser), truth.log_normaliser, bound
            )
            for targets in case.targets():
                got = array(ops.log_prob(private, public, pool, targets))
                at = np.arange(len(targets)), targets.numpy()
                report.compare("pool: log_prob", got, truth.log_p[at], truth.log_error[at])
            p = array(ops.mixture(private, public, pool))
            held = truth.log_p > NORMAL  # p below the range of a double is 0 or denormal
            report.compare(
                "pool: mixture", np.log(p[held]), truth.log_p[held], truth.log_error[held]
            )
            report.expect((p[~held] <= 2.0**-1021).all(), "pool: p is too large")
            report.expect((p[np.isneginf(truth.log_p)] == 0).all(), "pool: p without q")
            report.expect((abs(p.sum(-1) - 1) <= SUM_ERROR).all(), "pool: sums", p.sum(-1))


def row_of(clipping: Clipping, i: int, b: int | None = None) -> Clipping:
    """Return the clipping of one model, at one position or at all."""
    at = slice(None) if b is None else slice(b, b + 1)
    model = slice(i, i + 1)
    return dataclasses.replace(
        clipping, charge=None, active=None, public_status=clipping.public_status[at],
        log_scale=clipping.log_scale[model, at], residual=clipping.residual[model, at],
        private_lse=clipping.private_lse[model, at], public_lse=clipping.public_lse[at],
        status=clipping.status[model, at],
    )  # fmt: skip


def check_clip_project(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    """Check clip_project, and mixture, log_prob and leave_one_out of its result."""
    private, public = case.private, case.public
    orders, chosen = plan.clip_orders, plan.chosen_of(case)
    log_p, q = oracle.log_softmax(private), oracle.softmax(public)
    p = np.where(log_p < -600, 0, np.exp(log_p))
    for k, (lower, upper) in enumerate(plan.boxes):
        slots = plan.slots(case, k)
        got = ops.clip_project(
            private, public, lower=lower, upper=upper, orders=orders, num_models=slots
        )
        report.expect(not got.status.any(), "clip_project: status")
        equal = copied(private, public)
        report.expect((got.charge[equal] == 0).all(), "clip_project: a public row is charged")
        bars = np.stack(
            [array(ops.mixture(private[i : i + 1], public, row_of(got, i))) for i in chosen]
        )
        truth = np.stack(
            [[oracle.boxed(p[i, b], q[b], lower, upper) for b in range(len(q))] for i in chosen]
        )
        check_boxes(got, bars, truth, q, chosen, report)
        # The charges are those of the distributions that are returned.
        stand_for = oracle.clipped(private, public, got)
        exact = oracle.charges(stand_for, q, got.lower, orders, slots)
        charge = array(got.charge)
        sound = (charge >= exact) | (charge == 0) & (exact <= 1e-16)  # charged 0: it answers q
        close = (charge <= exact * (1 + 2e-5) + 2e-12) | ((np.array(orders) - 1) * exact >= 600)
        report.expect(
            (sound & close).all(), "clip_project: charge in", (lower, upper), charge, exact
        )
        actives = plan.actives(case)
        clipping = dataclasses.replace(got, active=actives[k % len(actives)])
        adjacency = plan.adjacencies[k // 2 % len(plan.adjacencies)]
        check_clipped(case, clipping, adjacency, slots, plan, ops, report)


def check_boxes(
    got: Clipping, bars: Array, truth: Array, q: Array, chosen: list[int], report: Report
) -> None:
    """Check the distributions (M, B, V) of some models, their sums and that they lie in the box."""
    sums = np.array([[math.fsum(row) for row in bar] for bar in bars])
    # If the sums agree, a rescaled mean of rows is a mean of distributions in the box.
    report.expect((sums.max(0) - sums.min(0) <= 1e-12).all(), "clip_project: sums", sums)
    log_scale = array(got.log_scale)[chosen]
    log_scale = np.where(np.isinf(log_scale), 0, log_scale)
    rounding = 1e-12 + 2.0**-52 * (abs(array(got.public_lse)) + abs(log_scale))
    report.expect((abs(sums - 1) <= rounding).all(), "clip_project: sums", sums)
    least, most, rounding = got.lower * q, got.upper * q, rounding[..., None]
    # Tokens inside the box inherit the error of s; clipped tokens inherit the error of q.
    inside = (truth > least) & (truth < most)
    moving = 1e-9 + 1e-14 / np.maximum((truth * inside).sum(-1, keepdims=True), 1e-300)
    error = np.where(inside, moving, rounding) * truth + 1e-300
    report.compare("clip_project", bars, truth, error)
    within = (bars >= least * (1 - rounding) - 1e-300) & (bars <= most * (1 + rounding) + 1e-300)
    report.expect(within.all(), "clip_project: outside the box", got.lower, got.upper)


def check_clipped(
    case: Case, clipping: Clipping, adjacency: str, slots: int, plan: Plan, ops: Any, report: Report
) -> None:
    """Check what is answered and lost if some members of a clipping take part."""
    private, public, orders = case.private, case.public, plan.clip_orders
    bars = oracle.clipped(private, public, clipping)
    bars = bars / bars.sum(-1, keepdims=True)  # their sums are checked elsewhere
    mixtures = Mixtures(bars, oracle.softmax(public), slots)
    mean = bars.mean(0)
    mixture = array(ops.mixture(private, public, clipping))
    report.compare("mixture of boxes", mixture, mean, 1e-9 * mean + 1e-300)
    sizes = abs(array(clipping.public_lse)).max() + abs(array(clipping.private_lse)).max()
    check_log_prob(case, ops, clipping, mean, report, 1e-9 + 1e-15 * sizes)
    loss = ops.leave_one_out(
        private, public, clipping, orders=orders, adjacency=adjacency, num_models=slots
    )
    exact = mixtures.losses(range(len(private)), orders, adjacency)
    unbounded = may_be_unbounded(private, public, mixtures, adjacency)[..., None]
    unbounded = unbounded | (not case.close)
    lower = exact * (1 - 1e-12) - 2e-15  # the oracle's rows carry double rounding
    good = losses_hold(array(loss), lower, orders, unbounded)
    good |= (not case.close) & (array(loss) >= lower)
    report.expect(good.all(), "loss of boxes", adjacency, loss, exact)
    if adjacency == "zero_out":
        most = array(clipping.charge) * (1 + LOSS_ERROR) + LOSS_FLOOR
        within = (array(loss) <= most) | unbounded
        report.expect(within.all(), "loss of boxes above the charge", loss, clipping.charge)


def check_screen(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    private, public = case.private, case.public
    if plan.seed:
        far, noise, options = fuzzed.far_from_public(plan.seed)
        got = ops.screen(far.private, far.public, noise, **options)
        check_screening(far, noise, options, got, report)
    for k, (top_k, sigma, order, weight) in enumerate(plan.screens):
        generator = torch.Generator().manual_seed(11)
        noise = torch.randn(len(public), top_k, generator=generator, dtype=torch.float64) * sigma
        for active in plan.actives(case):
            options = {"weight": weight, "order": order, "threshold": 0.5, "top_k": top_k}
            options |= {"num_models": plan.slots(case, k), "active": active}
            got = ops.screen(private, public, noise, **options)
            report.expect(got.divergence.dtype == torch.float64, "screen: dtype")
            report.expect(got.passed.dtype == torch.bool, "screen: dtype of passed")
            check_screening(case, noise, options, got, report)


def check_screening(
    case: Case, noise: Tensor, options: dict[str, Any], got: Any, report: Report
) -> None:
    """Check a screening with a threshold of 0.5 at every position."""
    private, public, order = case.private, case.public, options["order"]
    active = options["active"]
    equal = copied(private, public).all(0)
    truth, _ = reference.screen(private, public, noise, **options)
    for b, (value, other) in enumerate(zip(got.divergence.tolist(), truth.tolist(), strict=True)):
        report.expect(got.passed[b].item() == (value <= 0.5), "screen: passed", value)
        if not noise[b].any() and (options["weight"] == 0 or equal[b]):
            report.expect(value == 0, "screen: what does not move", value)
        if value == other or abs(value - other) <= 0.5e-6 * other + 1e-13:
            continue
        exact = oracle.screening(
            private[:, b], public[b], noise[b], weight=options["weight"], order=order,
            top_k=options["top_k"], divisor=options["num_models"],
            active=None if active is None else active[:, b].tolist(),
        )  # fmt: skip
        if mp.isinf(exact) or math.isinf(value):
            good = value == INF and (order - 1) * exact > 600
        else:
            good = value >= 0 and abs(mpf(value) - exact) <= 1e-5 * exact + 1e-12
        report.expect(good, f"screen at {b}: {value!r}, exact {mp.nstr(exact, 17)}", options)


def check_renyi_divergence(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    orders, public = case.orders or plan.renyi_orders, case.public
    for i in plan.chosen_of(case):
        sides = case.private[i], public
        equal = copied(*sides)
        for divergence, pair in zip(
            ops.renyi_divergence(*sides, orders), (sides, sides[::-1]), strict=True
        ):
            report.expect((divergence[equal] == 0).all(), "renyi: equal rows")
            check_divergence(f"renyi of {i}", divergence, pair, orders, report)


def check_divergence(
    name: str, divergence: Tensor, sides: Sequence[Tensor], orders: Sequence[float], report: Report
) -> None:
    """Check D_a of rows (B, V), one way, (B, K)."""

    def exact(b: int, k: int) -> Array:
        p, q = (oracle.softmax(rows[b], exact=True) for rows in sides)
        return oracle.one_way(p, q, [orders[k]])

    truth = oracle.one_way(*map(oracle.softmax, sides), orders)
    compare_losses(name, array(divergence), truth, exact, orders, report)


def check_sample(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    """Check draws of the case's rows, and of rows that integers hardly ever decide."""
    mixture = reference.mixture(case.private, case.public, torch.tensor(0.5).double())
    source = Source(plan.seed)
    generator = torch.Generator().manual_seed(plan.seed)
    for p, public in (
        (mixture, case.public), fuzzed.open_rows(*case.public.shape, generator),
    ):  # fmt: skip
        tokens = ops.sample(p, public, rng=source)
        drawn = public.gather(1, tokens[:, None])
        report.expect(not torch.isneginf(drawn).any(), "sample: a token with q = 0", tokens)
        expected = oracle.drawn_by_hand(p, public, bytes(source.key), source.counter)
        report.expect(tokens.tolist() == expected, "sample: not what the stream draws", tokens)


CHECKS: dict[str, Callable[[Case, Plan, Any, Report], None]] = {
    "project": check_project,
    "leave_one_out": check_leave_one_out,
    "mixture": check_mixture,
    "log_pool": check_log_pool,
    "clip_project": check_clip_project,
    "screen": check_screen,
    "renyi_divergence": check_renyi_divergence,
    "sample": check_sample,
}


def run(operators: Sequence[str], case: Case, plan: Plan, ops: Any) -> Report:
    """Check these operators on one case."""
    report = Report()
    for name in operators:
        CHECKS[name](case, plan, ops, report)
    report.failures = [f"{case.name}: {failure}" for failure in report.failures]
    return report
