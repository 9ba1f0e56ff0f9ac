"""Checks of the ball: project, and leave_one_out, mixture and log_prob of its weights or others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mpmath as mp
import numpy as np
import oracle
import torch
from mpmath import mpf
from numpy.typing import NDArray
from oracle import Array, Mixtures, array
from plans import INF, Case, Plan
from reports import ENOUGH, LEAST, LEAST_RADIUS, LOSS_ERROR, LOSS_FLOOR, SUM_ERROR, Report, copied
from torch import Tensor


def weight_tolerance(order: float) -> float:
    """Return the relative error that `project` states for a weight."""
    return min(2e-4 + 1e-5 / (order - 1), 0.999)


def check_project(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    private, public = case.private, case.public
    rows = case.distinct_rows()
    i, b = (torch.tensor(index) for index in zip(*rows, strict=True))
    lse = [oracle.log_sum_exp(array(logits)) for logits in (private, public)]
    balls = case.balls or plan.balls
    for order in dict.fromkeys(order for order, _ in balls):
        radii = [radius for a, radius in balls if a == order]
        results = [ops.project(private, public, order=order, radius=radius) for radius in radii]
        for ball, radius in zip(results, radii, strict=True):
            ball.check()
            report.expect(ball.weight.dtype == torch.float64, "project: dtype")
            report.expect(ball.weight.shape == private.shape[:2], "project: shape")
            full = copied(private, public) & (radius > 0)
            report.expect((ball.weight[full] == 1).all(), "project: a member like the public model")
            for got, exact in zip((ball.private_lse, ball.public_lse), lse, strict=True):
                bound = 3e-14 + 5e-16 * abs(exact)
                report.compare("project: log-sum-exp", array(got), exact, bound)
        weights = torch.stack([ball.weight[i, b] for ball in results])
        close = case.close and order >= 1.01
        check_weights(private[i, b], public[b], weights, order, radii, report, close=close)


def check_weights(
    private: Tensor,
    public: Tensor,
    weight: Tensor,
    order: float,
    radii: Sequence[float],
    report: Report,
    *,
    close: bool = True,
) -> None:
    """Check that weights are feasible and near the optimum at one order and every radius.

    Args:
        private, public: M pairs of rows, each (M, V).
        weight: (R, M), one row for each radius.
        close: whether weights must be near the optimum.
    """
    report.values += weight.numel()
    weights = array(weight)
    sound = (weights >= 0) & (weights <= 1)
    radius = np.array(radii)[:, None]
    judged = weights_hold(oracle.RowPairs(private, public), weights, order, radius, close)
    for k, row in zip(*np.nonzero(~(sound & judged[0] & judged[1])), strict=True):
        if len(report.failures) >= ENOUGH:
            break
        rows = oracle.RowPairs(private[row : row + 1], public[row : row + 1], exact=True)
        exact = array(weight[k, row : row + 1], exact=True)
        held = sound[k, row], *weights_hold(rows, exact, order, radii[k], close)
        at = f"row {row} order {order} radius {radii[k]}: {weights[k, row]!r}"
        for good, fault in zip(held, ("no weight", "infeasible", "too small"), strict=True):
            report.expect(good, f"project: {fault}:", at)


def weights_hold(
    rows: oracle.RowPairs, weight: Array, order: float, radius: Any, close: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Tell which weights are feasible, and which are near the optimum, both beyond doubt."""
    inside, _ = rows.sides(weight, order, radius)
    more = np.maximum(weight, LEAST) / (1 - oracle.alike(weight, weight_tolerance(order)))
    free = (weight == 1) | rows.masked | (not close) | (radius < LEAST_RADIUS) | (more >= 1)
    _, beyond = rows.sides(np.minimum(more, 1), order, radius)
    return inside, free | beyond


def weighings(case: Case, plan: Plan, ops: Any) -> list[tuple[Any, Tensor]]:
    """Return projections, and weights that are none, each with its weights (N, B)."""
    projections = [
        ops.project(case.private, case.public, order=order, radius=radius)
        for order, radius in plan.weighings
    ]
    weights = [weight.expand(case.private.shape[:2]).contiguous() for weight in case.weights]
    if plan.random_weights:
        generator = torch.Generator().manual_seed(6)
        shape = case.private.shape[:2]
        weights.append(torch.rand(shape, dtype=torch.float64, generator=generator))
        weights[-1][0] = 0.0
        weights.append(torch.ones(shape, dtype=torch.float64))
    return [(p, p.weight) for p in projections] + [(w, w) for w in weights]


def check_leave_one_out(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    orders, models = case.orders or plan.orders, plan.chosen_of(case)
    for k, (projection, weight) in enumerate(weighings(case, plan, ops)):
        slots = plan.slots(case, k)
        inputs = case.private, case.public, weight, slots
        mixtures = Mixtures.of_weights(*inputs)
        for adjacency in plan.adjacencies:
            unbounded = may_be_unbounded(case.private, case.public, mixtures, adjacency)
            unbounded = unbounded | (not case.close)
            loss = ops.leave_one_out(
                *inputs[:2], projection, orders=orders, adjacency=adjacency, num_models=slots
            )
            report.expect(loss.dtype == torch.float64, "leave_one_out: dtype")
            if adjacency == "zero_out":
                idle = (weight == 0) & ~torch.from_numpy(unbounded)
                report.expect((loss[idle] == 0).all(), "leave_one_out: a weight of 0 loses")
            truth = mixtures.losses(models, orders, adjacency)
            exact = partial(exact_loss, inputs, adjacency, models, orders)
            compare_losses(
                f"leave_one_out, {adjacency}", array(loss)[models], truth, exact, orders, report,
                unbounded[models, :, None], case.close,
            )  # fmt: skip


def exact_loss(
    inputs: Any, adjacency: str, models: list[int], orders: Sequence[float], m: int, b: int, k: int
) -> Array:
    """Return a loss with 70 digits; inputs are private and public rows, weights and slots."""
    at = slice(b, b + 1)
    rows = inputs[0][:, at], inputs[1][at], inputs[2][:, at], inputs[3]
    return Mixtures.of_weights(*rows, exact=True).losses([models[m]], [orders[k]], adjacency)


def compare_losses(
    name: str,
    got: Array,
    truth: Array,
    exact: Callable[..., Array],
    orders: Sequence[float],
    report: Report,
    unbounded: NDArray[np.bool_] | bool = False,
    close: bool = True,
) -> None:
    """Compare losses (..., K) with the truth; ``exact`` of their indices decides about failures."""
    report.values += got.size
    unbounded = np.broadcast_to(unbounded, got.shape)
    good = losses_hold(got, truth, orders, unbounded, close)
    for at in zip(*np.nonzero(~good), strict=True):
        if len(report.failures) >= ENOUGH:
            break
        value, true = mpf(float(got[at])), exact(*at).reshape(1)
        low = np.maximum(true - mpf("1e-60"), 0)  # of 70 digits
        good = losses_hold(np.array([value]), low, [orders[at[-1]]], unbounded[at], close)
        report.expect(good.all(), f"{name} at {at}: {float(value)!r}, exact {mp.nstr(true[0], 17)}")


def losses_hold(
    got: Array,
    truth: Array,
    orders: Sequence[float],
    unbounded: NDArray[np.bool_] | bool = False,
    close: bool = True,
) -> NDArray[np.bool_]:
    """Tell which losses (..., K) are upper bounds that are as close as stated."""
    with np.errstate(invalid="ignore"):
        good = (got >= truth) & ((got <= truth * (1 + LOSS_ERROR) + LOSS_FLOOR) | (not close))
        infinite = unbounded | ((np.array(orders) - 1) * truth >= 600)
    return good | (got == INF) & infinite


def may_be_unbounded(
    private: Tensor, public: Tensor, mixtures: Mixtures, adjacency: str
) -> NDArray[np.bool_]:
    """Tell which rows have a token at which `leave_one_out` states +inf, (N, B).

    That is one with q < e^-70 about which a member speaks, or to which none gives e^-80 q: none of
    all members or, if one is removed, of the others.
    """
    rare = torch.log_softmax(public.double(), -1) < -70
    spoken = (rare & ~torch.isneginf(private).all(0)).any(-1).cpu().numpy()
    likely = mixtures.bars >= np.exp(np.longdouble(-80)) * mixtures.q
    others = likely.sum(-3) + mixtures.models - len(private)
    if adjacency == "add_remove" and mixtures.models > 1:
        others = others - likely
    silent = ((others == 0) & (mixtures.q > 0)).any(-1)
    return np.broadcast_to(spoken | silent, private.shape[:2])


def check_mixture(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    private, public = case.private, case.public
    for projection, weight in weighings(case, plan, ops):
        truth = Mixtures.of_weights(private, public, weight).mean
        mixture = ops.mixture(private, public, projection)
        report.expect(mixture.dtype == torch.float64, "mixture: dtype")
        report.compare("mixture", array(mixture), truth, 1e-6 * truth + 1e-300)
        sizes = [float(rows.double().logsumexp(-1).abs().max()) for rows in (private, public)]
        error = SUM_ERROR + 2.0**-52 * sum(sizes)
        report.compare("sum of mixture", array(mixture).sum(-1), truth.sum(-1), error)
        check_log_prob(case, ops, projection, truth, report)


def check_log_prob(
    case: Case, ops: Any, projection: Any, truth: Array, report: Report, error: float = 1e-6
) -> None:
    for targets in case.targets():
        got = array(ops.log_prob(case.private, case.public, projection, targets))
        with np.errstate(divide="ignore"):
            exact = np.log(truth[np.arange(len(targets)), targets.numpy()])
        report.compare("log_prob", got, exact, error + 1e-12 * abs(np.nan_to_num(exact)))
