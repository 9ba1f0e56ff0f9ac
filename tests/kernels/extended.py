"""A vectorised oracle in numpy's extended precision: 64-bit mantissas, exponents to e^11356.

Like the multi-precision oracle, it sums the equations as they are written. It has 11 bits more than
a double, so that cancellation of that size still leaves the operators' bounds decidable. On
platforms whose long double is a double, every value is doubtful, and mpmath decides it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.longdouble]
EPS = float(np.finfo(np.longdouble).eps)
DEEP = 0.9 * float(np.log(np.finfo(np.longdouble).max))  # larger exponents overflow or underflow
_INF = np.longdouble(np.inf)


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().cpu().numpy().astype(np.longdouble)


def log_softmax(logits: Tensor) -> Array:
    values = array(logits)
    values = values - values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def log_sum_exp(values: Array) -> Array:
    """Return the log-sum-exp over the last axis; +inf if a value is +inf."""
    top = values.max(-1)
    shift = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(
            top == _INF, _INF, shift + np.log(np.exp(values - shift[..., None]).sum(-1))
        )


def exact_pair(weight: Array, complement: Array) -> tuple[Array, Array]:
    """Return the pair that (weight, complement) stands for: the smaller of the two is exact."""
    upper = complement < weight
    return np.where(upper, 1 - complement, weight), np.where(upper, complement, 1 - weight)


class Rows:
    """Pairs of rows (M, V); weights are (..., M), any leading axes."""

    def __init__(self, private: Tensor, public: Tensor) -> None:
        log_p, log_q = np.broadcast_arrays(log_softmax(private), log_softmax(public))
        absent = np.isneginf(log_q)
        self.masked = (absent & ~np.isneginf(log_p)).any(-1)
        self.log_q = log_q
        self.log_r = np.where(absent, 0, log_p - np.where(absent, 0, log_q))
        reach = np.where(np.isfinite(self.log_r), abs(self.log_r), 0).max(-1)
        self.reach = np.maximum(reach, abs(np.where(absent, 0, log_q)).max(-1))
        self._ratio = np.exp(self.log_r) if self.reach.max(initial=0) < DEEP else None

    def _log_mix(self, weight: Array, complement: Array) -> Array:
        """Return log(w r + c), with an absolute error of EPS if it is near 0."""
        w, c = weight[..., None], complement[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):
            if self._ratio is not None:
                return np.where(c == 0, self.log_r, np.log(w * self._ratio + c))
            high, low = np.broadcast_arrays(np.log(w) + self.log_r, np.log(c))
            high, low = np.maximum(high, low), np.minimum(high, low)
            return np.where(np.isneginf(low), high, high + np.log1p(np.exp(low - high)))

    def excess(self, weight: Array, complement: Array, order: float) -> Array:
        """Return (a - 1) D<->_a(w p + c q || q) = log max(F, G), (..., M)."""
        a = np.longdouble(order)
        log_rho = self._log_mix(weight, complement)
        forward = log_sum_exp(self.log_q + a * log_rho)
        return np.maximum(forward, log_sum_exp(self.log_q + (1 - a) * log_rho))

    def uncertainty(self, order: float) -> Array:
        """Return how far rounding may move ``excess``: about as far as rounding its result does."""
        return EPS * (64 + 8 * order * np.minimum(self.reach, DEEP))


class Mixtures:
    """Mixtures of private (N, B, V) with the public rows (B, V) at weights (..., N, B)."""

    def __init__(
        self, private: Tensor, public: Tensor, weight: Array, complement: Array, slots: int = 0
    ) -> None:
        log_p, log_q = log_softmax(private), log_softmax(public)
        # Another oracle must decide probabilities that this precision cannot hold.
        self.deep = bool(((log_p < -DEEP) & ~np.isneginf(log_p)).any()) or bool(
            ((log_q < -DEEP) & ~np.isneginf(log_q)).any()
        )
        self.models = max(slots, len(log_p))
        self.q = np.exp(log_q)
        w, c = exact_pair(weight, complement)
        self.bars = w[..., None] * np.exp(log_p) + c[..., None] * self.q
        self._absent = (self.models - len(log_p)) * self.q
        self.mean = (self.bars.sum(-3) + self._absent) / self.models

    def without(self, model: int, adjacency: str) -> Array:
        """Return the neighbouring mixture, summed anew without subtraction."""
        if self.models == 1:
            return np.broadcast_to(self.q, self.mean.shape)
        rest = self.bars[..., :model, :, :].sum(-3) + self.bars[..., model + 1 :, :, :].sum(-3)
        rest = rest + self._absent
        if adjacency == "zero_out":
            return (rest + self.q) / self.models
        return rest / (self.models - 1)

    def losses(self, models: Sequence[int], orders: Sequence[float], adjacency: str) -> Array:
        """Return D<->_a(p || p'), (..., len(models), B, K)."""
        return np.stack(
            [divergences(self.mean, self.without(i, adjacency), orders) for i in models], -3
        )


def divergences(p: Array, q: Array, orders: Sequence[float]) -> Array:
    """Return D<->_a of probabilities (..., V): (..., K)."""
    return np.maximum(one_way(p, q, orders), one_way(q, p, orders))


def one_way(p: Array, q: Array, orders: Sequence[float]) -> Array:
    """Return D_a(P || Q) for finite a > 1.

    A token with P = Q = 0 adds nothing; one with P > 0 = Q makes it +inf.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        log_p = np.log(p)
        log_ratio = np.where(p > 0, np.log(p / q), 0)
    values = []
    for order in orders:
        eta = np.longdouble(order) - 1
        values.append(log_sum_exp(log_p + eta * log_ratio) / eta)
    return np.maximum(np.stack(values, -1), 0)
