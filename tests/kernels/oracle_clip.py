"""Multi-precision oracle of the density-ratio box, at 70 digits, exact by sorted breakpoints.

It is independent of the code under test. S(s) = sum clip(s p, c q, C q) is piecewise linear, and a
search over its breakpoints finds the piece on which it passes 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import mpmath as mp
from mpmath import mpf
from oracle import INF, ONE, ZERO, both_ways, mean, neighbour, softmax
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Clipping


class Box:
    """p_bar = clip(s p, c q, C q) of one pair of rows, and its charge."""

    def __init__(self, private: Tensor, public: Tensor, lower: float, upper: float) -> None:
        self.p, self.q = softmax(private), softmax(public)
        self.p = [ZERO if p < mp.exp(-600) else p for p in self.p]  # these count as absent
        public_only = lower == 1 or upper == 1
        self.lower, self.upper = (ONE, ONE) if public_only else (mpf(lower), mpf(upper))
        self.bar = self._solve()

    def _solve(self) -> list[mpf]:
        covered = mp.fsum(q for p, q in zip(self.p, self.q, strict=True) if p > 0)
        if covered == 0 or self.lower == 1:
            return list(self.q)
        if self.upper * covered + self.lower * (1 - covered) <= 1:
            rest = (1 - self.upper * covered) / (1 - covered)
            pairs = zip(self.p, self.q, strict=True)
            return [q * (self.upper if p > 0 else rest) for p, q in pairs]
        return self._clip(self._scale())

    def _clip(self, scale: mpf) -> list[mpf]:
        return [
            min(self.upper * q, max(self.lower * q, scale * p))
            for p, q in zip(self.p, self.q, strict=True)
        ]

    def _scale(self) -> mpf:
        """Return s with S = 1, solved on the linear piece between two breakpoints."""
        moves = [
            (self.lower * q / p, self.upper * q / p, p)
            for p, q in zip(self.p, self.q, strict=True)
            if p > 0 and q > 0
        ]
        breaks = sorted({at for begin, end, _ in moves for at in (begin, end)})
        low, high = 0, len(breaks) - 1  # S <= 1 at `low` and >= 1 at `high`
        while high - low > 1:
            middle = (low + high) // 2
            if mp.fsum(self._clip(breaks[middle])) <= 1:
                low = middle
            else:
                high = middle
        at = breaks[low]
        slope = mp.fsum(p for begin, end, p in moves if begin <= at < end)
        gap = 1 - mp.fsum(self._clip(at))
        return at + gap / slope if slope > 0 else at

    def inside(self) -> mpf:
        """Return the mass of the tokens strictly inside the box, which move with s."""
        return mp.fsum(
            x for x, q in zip(self.bar, self.q, strict=True) if self.lower * q < x < self.upper * q
        )

    def at(self, log_scale: float, residual: float) -> list[mpf]:
        """Return the distribution that a returned pair stands for."""
        if log_scale == math.inf:
            scaled = [INF if p > 0 else ZERO for p in self.p]
        else:
            scaled = [mp.exp(mpf(log_scale)) * p for p in self.p]
        return [
            min(self.upper * q, max(self.lower * q, x)) if p > 0 else mpf(residual) * q
            for p, q, x in zip(self.p, self.q, scaled, strict=True)
        ]

    def charge(self, bar: Sequence[mpf], order: float, slots: int) -> mpf:
        """Return the charge of p_bar, the larger of both directions, summed as it is defined."""
        alpha, n = mpf(order), mpf(slots)
        w = ((n - 1) * self.lower + 1) / n

        def f(x: mpf) -> mpf:
            return x**alpha - 1 - alpha * (x - 1)

        forward, reverse = [], []
        for x, q in zip(bar, self.q, strict=True):
            if q == 0 or x == q:
                continue
            p = ((n - 1) * self.lower + x / q) / n
            if p == 0:
                return INF
            forward.append(q * w * f(p / w))
            reverse.append(q * p * f(w / p))
        excess = max(mp.fsum(forward), mp.fsum(reverse), ZERO)
        return mp.log1p(excess) / (alpha - 1) if excess > mpf(10) ** -60 else ZERO


def distributions(
    private: Tensor,
    public: Tensor,
    lower: float,
    upper: float,
    active: Sequence[bool] | None = None,
) -> tuple[list[list[mpf]], list[mpf]]:
    """Return ([p_bar_i], q) of one position: private (N, V), public (V,)."""
    q = softmax(public)
    on = [True] * len(private) if active is None else active
    bars = [
        Box(row, public, lower, upper).bar if used else q
        for row, used in zip(private, on, strict=True)
    ]
    return bars, q


def loss(
    bars: Sequence[Sequence[mpf]], q: Sequence[mpf], model: int, order: float, adjacency: str
) -> mpf:
    """Return the leave-one-out loss of one model; `bars` has q for each absent member."""
    return both_ways(mean(bars), neighbour(bars, q, model, adjacency), order)


def row_of(clipping: Clipping, i: int, b: int | None = None) -> Clipping:
    """Return the clipping of one model, at one position or at all."""
    at = slice(None) if b is None else slice(b, b + 1)
    model = slice(i, i + 1)
    return dataclasses.replace(
        clipping, charge=None, active=None, public_status=None,
        log_scale=clipping.log_scale[model, at], residual=clipping.residual[model, at],
        private_lse=clipping.private_lse[model, at], public_lse=clipping.public_lse[at],
        status=clipping.status[model, at],
    )  # fmt: skip


def check_row(private: Tensor, public: Tensor, clipping: Clipping, i: int, b: int) -> Box:
    """Check the distribution of one row, as the mixture of one model; return the exact box."""
    box = Box(private[i, b].cpu(), public[b].cpu(), clipping.lower, clipping.upper)
    one = row_of(clipping, i, b)
    bar = adapmixed_ext.mixture(private[i : i + 1, b : b + 1], public[b : b + 1], one)[0]
    log_scale = clipping.log_scale[i, b].item()
    rounded = abs(clipping.public_lse[b].item()) + (abs(log_scale) if log_scale < math.inf else 0)
    rounding = 1e-12 + 2**-52 * rounded
    assert abs(bar.sum().item() - 1) <= rounding
    # Tokens inside the box inherit the error of s; clipped tokens inherit the error of q.
    moving = 1e-9 + 1e-14 / max(float(box.inside()), 1e-300)
    for v, (got, exact, q) in enumerate(zip(bar.tolist(), box.bar, box.q, strict=True)):
        least, most = box.lower * q, box.upper * q
        error = moving if least < exact < most else rounding
        assert abs(mpf(got) - exact) <= error * exact + mpf(1e-300), (i, b, v, got)
        assert got >= least * (1 - mpf(rounding)) - mpf(1e-300), (i, b, v, got)
        assert got <= most * (1 + mpf(rounding)) + mpf(1e-300), (i, b, v, got)
    return box


def check_charges(
    clipping: Clipping, box: Box, i: int, b: int, orders: Sequence[float], slots: int
) -> None:
    """Check the charges of one row, which are those of the distribution that is returned."""
    assert clipping.charge is not None
    bar = box.at(clipping.log_scale[i, b].item(), clipping.residual[i, b].item())
    for got, order in zip(clipping.charge[i, b].tolist(), orders, strict=True):
        exact = box.charge(bar, order, slots)
        if math.isinf(got):
            assert (order - 1) * exact >= 600, (i, b, order, mp.nstr(exact, 17))
        else:
            more = mpf(got) - exact
            sound = more >= 0 or (got == 0 and exact <= 1e-12)  # what is charged 0 answers q
            assert sound and more <= 2e-5 * exact + 2e-12, (i, b, order, got, mp.nstr(exact, 17))
