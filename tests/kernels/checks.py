"""Checks of project and leave_one_out against their documented bounds.

Extended precision decides most values. mpmath decides the doubtful ones, and all that look wrong.
So every reported failure is a failure at 70 digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mpmath as mp
import numpy as np
import oracle
import torch
from extended import Array, Mixtures, Rows, array, exact_pair
from mpmath import mpf
from numpy.typing import NDArray
from torch import Tensor

LOSS_FLOOR = 1e-9
DIVERGENCE_ERROR = (1e-5, 1e-12)
LEAST = 1e-12  # below this optimum any smaller weight is allowed
LEAST_RADIUS = 1e-5  # below it, too
ENOUGH = 3  # failures reported for one call, because mpmath is slow
ADJACENCIES = ("add_remove", "zero_out")


@dataclass
class Report:
    """The failures, the number of checked values, and the largest errors seen."""

    failures: list[str] = field(default_factory=list)
    values: int = 0
    decided: int = 0  # by mpmath
    worst: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, errors: Array) -> None:
        if errors.size:
            self.worst[name] = max(self.worst.get(name, 0.0), float(errors.max()))

    def add(self, other: Report) -> None:
        self.failures += other.failures
        self.values += other.values
        self.decided += other.decided
        for name, value in other.worst.items():
            self.worst[name] = max(self.worst.get(name, 0.0), value)


def weight_tolerance(order: float) -> float:
    """Return the relative error that `project` states for a weight."""
    return min(2e-4 + 1e-5 / (order - 1), 0.999)


def loss_tolerance(order: float) -> float:
    """Return how far a loss may lie above the exact one, relative, beside LOSS_FLOOR."""
    return 1e-4 if order <= 32 else 4e-4


def check_weights(
    private: Tensor,
    public: Tensor,
    weight: Tensor,
    complement: Tensor,
    order: float,
    radii: Sequence[float],
    where: object = "",
) -> Report:
    """Check that weights are feasible and near the optimum at one order and every radius.

    Args:
        private, public: M pairs of rows, each (M, V).
        weight, complement: (R, M), one row for each radius.
    """
    report = Report(values=weight.numel())
    rows = Rows(private, public)
    given = array(weight), array(complement)
    sound = (given[0] >= 0) & (given[0] <= 1) & (given[1] >= 0) & (given[1] <= 1)
    sound &= abs(given[0] + given[1] - 1) < 1e-15
    target = (np.longdouble(order) - 1) * np.array(radii, np.longdouble)[:, None]
    doubt = rows.uncertainty(order) + 1e-12 * target
    at = rows.excess(*exact_pair(*given), order)
    feasible = (given[0] == 0) | (at <= target - doubt) & ~rows.masked
    free = (given[1] == 0) | rows.masked
    free |= np.array([radius < LEAST_RADIUS for radius in radii])[:, None]
    tolerance = weight_tolerance(order)
    more = np.maximum(given[0], LEAST) / (1 - np.longdouble(tolerance))
    beyond = rows.excess(np.minimum(more, 1), np.maximum(1 - more, 0), order)
    maximal = free | (more >= 1) | (beyond > target + doubt)
    # Near the optimum the constraint is a straight line through both points.
    known = sound & ~free & (given[0] > 2 * LEAST) & np.isfinite(beyond) & (beyond > at)
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = tolerance * (target - at) / (beyond - at)
    report.note("weight", gap[known & (given[0] <= 0.5)])
    for k, row in zip(*np.nonzero(~(sound & feasible & maximal)), strict=True):
        if len(report.failures) >= ENOUGH:
            break
        w, c = weight[k, row].item(), complement[k, row].item()
        fault = "no pair" if not sound[k, row] else ""
        if not fault:
            report.decided += 1
            ball = oracle.Ball(private[row], public[row])
            fault = weight_fault(ball, w, c, order, radii[k])
        if fault:
            report.failures.append(
                f"{where} row {row} order {order} radius {radii[k]}: {fault}: {w!r}, {c!r}"
            )
    return report


def weight_fault(ball: oracle.Ball, w: float, c: float, order: float, radius: float) -> str:
    """Return which bound a weight violates at 70 digits, or "" if all hold."""
    tolerance = weight_tolerance(order)
    if ball.p == ball.q:  # only the 70th digit would make the excess nonzero
        return "weight too small" if radius > 0 and w < 1 - tolerance else ""
    if not ball.admits(w, c, order, radius):
        return "infeasible"
    if radius < LEAST_RADIUS or w < LEAST:
        return ""
    return "" if ball.nearly_maximal(w, c, order, radius, tolerance) else "weight too small"


def exact_loss(
    private: Tensor,
    public: Tensor,
    weight: Tensor,
    complement: Tensor,
    model: int,
    order: float,
    adjacency: str,
    slots: int = 0,
) -> mpf:
    """Return the loss of one model at one position.

    Args:
        private: (N, V) logits.
        public: (V,) logits.
        weight, complement: (N,).
    """
    bars, q = oracle.projected(private, public, weight, complement)
    bars += [q] * (slots - len(bars))
    return oracle.both_ways(oracle.mean(bars), oracle.neighbour(bars, q, model, adjacency), order)


def check_losses(
    private: Tensor,
    public: Tensor,
    weight: Tensor,
    complement: Tensor,
    loss: Tensor,
    orders: Sequence[float],
    adjacency: str,
    models: Sequence[int],
    where: object = "",
    slots: int = 0,
) -> Report:
    """Check losses (..., N, B, K) of some models, at weights (..., N, B), against the bounds."""
    mixtures = Mixtures(private, public, array(weight), array(complement), slots)
    return check_mixtures(
        mixtures, private, public, weight, complement, loss, orders, adjacency, models, where
    )


def check_mixtures(
    mixtures: Mixtures,
    private: Tensor,
    public: Tensor,
    weight: Tensor,
    complement: Tensor,
    loss: Tensor,
    orders: Sequence[float],
    adjacency: str,
    models: Sequence[int],
    where: object = "",
) -> Report:
    """Check losses like :func:`check_losses`, for mixtures that serve several adjacencies."""
    truth = mixtures.losses(models, orders, adjacency)
    got = array(loss)[..., list(models), :, :]
    report = Report(values=got.size)
    unbounded = may_be_unbounded(private, public)
    relative = np.array([loss_tolerance(order) for order in orders])
    with np.errstate(invalid="ignore"):
        good = (got >= truth) & (got <= truth * (1 + relative) + LOSS_FLOOR)
    good |= np.isposinf(got) & unbounded[:, None]
    if mixtures.deep:
        good[:] = False
    if not mixtures.deep:
        known = np.isfinite(truth) & np.isfinite(got) & (truth > 1e-9)
        report.note("loss", abs(got[known] / truth[known] - 1))
    for index in zip(*np.nonzero(~good), strict=True):
        if len(report.failures) >= ENOUGH:
            break
        *lead, m, b, k = index
        at = (*lead, slice(None), b)
        report.decided += 1
        exact = exact_loss(
            private[:, b], public[b], weight[at], complement[at], models[m], orders[k],
            adjacency, mixtures.models,
        )  # fmt: skip
        value = float(got[index])
        if not loss_holds(value, exact, orders[k], unbounded=bool(unbounded[b])):
            report.failures.append(
                f"{where} {adjacency} {tuple(lead)} model {models[m]} position {b} order "
                f"{orders[k]}: loss {value!r}, exact {mp.nstr(exact, 17)}"
            )
    return report


def may_be_unbounded(private: Tensor, public: Tensor) -> NDArray[np.bool_]:
    """Tell which positions have a token with q < e^-70 about which a member speaks, (B,)."""
    rare = torch.log_softmax(public.double(), -1) < -70
    return (rare & ~torch.isneginf(private).all(0)).any(-1).cpu().numpy()


def loss_holds(got: float, truth: mpf, order: float, *, unbounded: bool = False) -> bool:
    """Tell whether a loss is an upper bound that is as close as leave_one_out states."""
    if np.isinf(got):
        return got > 0 and (unbounded or (order - 1) * truth >= 600)
    sound = got >= 0 and truth <= got + mpf("1e-60")  # the oracle has 70 digits
    return sound and got <= truth * (1 + mpf(loss_tolerance(order))) + mpf(LOSS_FLOOR)
