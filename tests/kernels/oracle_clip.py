"""Multi-precision oracle of the density-ratio box, at 70 digits, exact by sorted breakpoints.

It is independent of the code under test. S(s) = sum clip(s p, c q, C q) is piecewise linear, and a
search over its breakpoints finds the piece on which it passes 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mpmath as mp
from mpmath import mpf
from oracle import INF, ONE, ZERO, both_ways, mean, neighbour, softmax
from torch import Tensor


class Box:
    """p_bar = clip(s p, c q, C q) of one pair of rows, and its charge."""

    def __init__(self, private: Tensor, public: Tensor, lower: float, upper: float) -> None:
        self.p, self.q = softmax(private), softmax(public)
        # A token counts as absent if p is smaller than q by more than this factor.
        least = mp.exp(-10_000)
        pairs = zip(self.p, self.q, strict=True)
        self.p = [ZERO if p < least * q else p for p, q in pairs]
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


__all__ = ["ONE", "Box", "distributions", "loss"]
