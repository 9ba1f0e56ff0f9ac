"""The oracle of the operators, from exactly the given bits and independent of the code under test.

Its equations are computed for whole tensors in numpy's extended precision: 64-bit mantissas,
exponents to e^11356. That is 11 bits more than a double, so that cancellation of that size still
leaves the operators' bounds decidable. With ``exact=True`` the same equations are computed in
mpmath numbers of 70 digits, which decide what is in doubt. On platforms whose long double is a
double, that is every value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, count
from typing import Any

import mpmath as mp
import numpy as np
from mpmath import mpf
from numpy.typing import NDArray
from plans import Setting
from torch import Tensor

from adapmixed_ext import _C, Clipping, reference

Array = NDArray[Any]  # of np.longdouble, or of mpf
FRACTION_BITS = 974  # a fraction of 2^-100 is counted in 2^-1074
EPS = float(np.finfo(np.longdouble).eps)
DEEP = 0.9 * float(np.log(np.finfo(np.longdouble).max))  # larger exponents overflow or underflow
INF = np.inf
mp.mp.dps = 70


def array(tensor: Tensor, exact: bool = False) -> Array:
    values = tensor.detach().double().cpu().numpy()
    return values.astype(object) * mpf(1) if exact else values.astype(np.longdouble)


def alike(values: Array, number: float) -> Any:
    """Return a number of the type of these values."""
    return mpf(number) if values.dtype == object else np.longdouble(number)


def _either(extended: Any, exact: Any) -> Callable[[Any], Array]:
    """Return a function of arrays of either type."""
    of_each = np.frompyfunc(exact, 1, 1)

    def either(values: Any) -> Any:
        return (of_each if np.asarray(values).dtype == object else extended)(values)

    return either


exp, log = _either(np.exp, mp.exp), _either(np.log, mp.log)


def log_softmax(logits: Tensor, exact: bool = False) -> Array:
    values = array(logits, exact)
    values = values - values.max(-1, keepdims=True)
    return values - log(exp(values).sum(-1, keepdims=True))


def softmax(logits: Tensor, exact: bool = False) -> Array:
    return exp(log_softmax(logits, exact))


def log_sum_exp(values: Array) -> Array:
    """Return the log-sum-exp over the last axis; +inf if a value is +inf."""
    top = values.max(-1)
    shift = np.where(abs(top) == INF, 0, top)
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(top == INF, INF, shift + log(exp(values - shift[..., None]).sum(-1)))


class RowPairs:
    """Pairs of rows (M, V); weights are (..., M), any leading axes."""

    def __init__(self, private: Tensor, public: Tensor, exact: bool = False) -> None:
        logs = (log_softmax(rows, exact) for rows in (private, public))
        log_p, self.log_q = np.broadcast_arrays(*logs)
        absent = self.log_q == -INF
        self.masked = (absent & (log_p != -INF)).any(-1)
        self.equal = (log_p == self.log_q).all(-1)
        log_q = np.where(absent, 0, self.log_q)
        self.log_r = np.where(absent, 0, log_p - log_q)
        reach = abs(np.where(self.log_r == -INF, 0, self.log_r)).max(-1)
        self.reach = np.maximum(reach, abs(log_q).max(-1))
        self.exact = exact
        near = exact or self.reach.max(initial=0) < DEEP
        self._ratio = exp(self.log_r) if near else None

    def _log_mix(self, weight: Array) -> Array:
        """Return log(w r + 1 - w), with an absolute error of EPS if it is near 0."""
        w = weight[..., None]
        c = 1 - w
        with np.errstate(divide="ignore", invalid="ignore"):
            if self._ratio is not None:
                return np.where(c == 0, self.log_r, log(w * self._ratio + c))
            high, low = np.broadcast_arrays(np.log(w) + self.log_r, np.log(c))
            high, low = np.maximum(high, low), np.minimum(high, low)
            return np.where(np.isneginf(low), high, high + np.log1p(np.exp(low - high)))

    def excess(self, weight: Array, order: float) -> Array:
        """Return (a - 1) D<->_a(w p + (1 - w) q || q) = log max(F, G), (..., M)."""
        a = alike(self.log_q, order)
        log_rho = self._log_mix(weight)
        forward = log_sum_exp(self.log_q + a * log_rho)
        return np.maximum(forward, log_sum_exp(self.log_q + (1 - a) * log_rho))

    def uncertainty(self, order: float) -> Array | float:
        """Return how far rounding may move ``excess``: about as far as rounding its result does."""
        return 0.0 if self.exact else EPS * (64 + 8 * order * np.minimum(self.reach, DEEP))

    def sides(
        self, weight: Array, order: float, radius: Array | float
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Tell which weights are feasible beyond doubt, and which are not beyond doubt."""
        target = (alike(self.log_q, order) - 1) * radius
        doubt = self.uncertainty(order) + (0.0 if self.exact else 1e-12) * target
        excess = self.excess(weight, order)
        # Of equal rows only the last digit would make the excess nonzero.
        inside = (weight == 0) | (self.equal | (excess <= target - doubt)) & ~self.masked
        return inside, ~self.equal & (excess > target + doubt)


class Mixtures:
    """Mixtures (..., B, V) of rows p_bar (..., N, B, V), and of q (B, V) in the other slots."""

    def __init__(self, bars: Array, q: Array, slots: int = 0) -> None:
        self.bars, self.q = bars, q
        self.models = max(slots, bars.shape[-3])
        self._absent = (self.models - bars.shape[-3]) * q
        self.mean = (bars.sum(-3) + self._absent) / self.models

    @classmethod
    def of_weights(
        cls, private: Tensor, public: Tensor, weight: Tensor, slots: int = 0, exact: bool = False
    ) -> Mixtures:
        """Return mixtures at weights (..., N, B)."""
        p, q = softmax(private, exact), softmax(public, exact)
        w = array(weight, exact)[..., None]
        return cls(w * p + (1 - w) * q, q, slots)

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
        losses = []
        for p, q in ((self.mean, self.without(i, adjacency)) for i in models):
            losses.append(np.maximum(one_way(p, q, orders), one_way(q, p, orders)))
        return np.stack(losses, -3)


def boxed(p: Array, q: Array, lower: float, upper: float) -> Array:
    """Return clip(s p, c q, C q) with sum 1 for one pair of rows, exact by sorted breakpoints.

    S(s) = sum clip(s p, c q, C q) is piecewise linear, and a search over its breakpoints finds the
    piece on which it passes 1. Where p = 0, tokens share what C q leaves, if that is more than c q.
    """
    least, most, present = lower * q, upper * q, p > 0
    covered = q[present].sum()
    if covered == 0 or lower == 1 or upper == 1:
        return q
    missing = q[~present].sum()
    if upper * covered + lower * missing <= 1:
        return np.where(present, most, (1 - upper * covered) / max(missing, EPS) * q)
    held = present & (q > 0)
    begin, end = (np.where(held, x, 0) / np.where(held, p, 1) for x in (least, most))
    breaks = np.sort(np.concatenate([begin[held], end[held]]))
    low, high = 0, len(breaks) - 1  # S <= 1 at `low` and >= 1 at `high`
    while high - low > 1:
        middle = (low + high) // 2
        if np.clip(breaks[middle] * p, least, most).sum() <= 1:
            low = middle
        else:
            high = middle
    at = breaks[low]
    slope = p[held & (begin <= at) & (at < end)].sum()
    gap = 1 - np.clip(at * p, least, most).sum()
    return np.clip((at + gap / slope if slope > 0 else at) * p, least, most)


def charges(bars: Array, q: Array, lower: float, orders: Sequence[float], slots: int) -> Array:
    """Return the charges (..., K) of p_bar (..., V), the larger of both directions."""
    n = np.longdouble(slots)
    w = ((n - 1) * lower + 1) / n
    ratio = np.where(q > 0, bars / np.where(q > 0, q, 1), 1)
    p, y = ((n - 1) * lower + ratio) / n, (ratio - 1) / n

    def excess(x: Array, order: float) -> Array:  # (1 + x)^a - 1 - a x
        with np.errstate(divide="ignore", over="ignore"):
            return np.expm1(order * np.log1p(x)) - order * x

    costs = []
    for order in orders:
        forward = (q * w * excess(y / w, order)).sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            reverse = np.where(q > 0, q * p * excess(-y / p, order), 0).sum(-1)
        most = np.fmax(np.where((p == 0).any(-1), np.inf, reverse), np.maximum(forward, 0))
        costs.append(np.log1p(most) / (order - 1))
    return np.stack(costs, -1)


def clipped(private: Tensor, public: Tensor, clipping: Clipping) -> Array:
    """Return the rows (N, B, V) that a clipping stands for; members that take no part answer q."""
    log_p, q = log_softmax(private), softmax(public)
    scale, residual = array(clipping.log_scale), array(clipping.residual)
    x = np.exp(np.minimum(scale, 1e3)[..., None] + np.where(log_p < -600, 0, log_p))
    x = np.clip(x, clipping.lower * q, clipping.upper * q)
    bars = np.where(log_p < -600, residual[..., None] * q, x)
    on = np.ones(bars.shape[:2], bool) if clipping.active is None else clipping.active.numpy()
    return np.where(on[..., None], bars, q)


def one_way(p: Array, q: Array, orders: Sequence[float]) -> Array:
    """Return D_a(P || Q) for finite a > 1.

    A token with P = Q = 0 adds nothing; one with P > 0 = Q makes it +inf.
    """
    with np.errstate(divide="ignore"):
        log_p, log_ratio = log(p), log(p / np.where(q > 0, q, 1))
    log_ratio = np.where(p > 0, np.where(q > 0, log_ratio, INF), 0)
    values = []
    for order in orders:
        eta = alike(p, order) - 1
        values.append(log_sum_exp(log_p + eta * log_ratio) / eta)
    return np.maximum(np.stack(values, -1), 0)


class Pool:
    """The exact pool up to the rounding of extended precision, as logarithms (B, V) and (N, B).

    It is computed from ``private_lse`` (N, B), the log-sum-exps that the pool used, or from the
    exact ones, ``lse``.
    """

    def __init__(
        self,
        private: Tensor,
        public: Tensor,
        setting: Setting,
        private_lse: Tensor | None = None,
        active: Tensor | None = None,
        exact: bool = False,
    ) -> None:
        models = private.shape[0]
        self.log_q = log_softmax(public, exact)
        held = self.log_q != -INF
        rows = array(private, exact)
        self.lse = log_sum_exp(rows)
        log_p = rows - (self.lse if private_lse is None else array(private_lse))[..., None]
        ratio = np.where(held, log_p - np.where(held, self.log_q, 0), 0)
        u = np.minimum(np.maximum(ratio, setting.lower), setting.upper)
        on = np.ones(u.shape[:2], bool) if active is None else active.cpu().numpy()
        share = alike(u, setting.scale) / (models + setting.extra)
        weight = self.log_q + share * (u * on[..., None]).sum(0)
        self.log_normaliser = log_sum_exp(weight)
        self.log_p = weight - self.log_normaliser[:, None]
        most = np.where(held, u, -INF).max(-1)
        self.span = most - np.where(held, u, INF).min(-1)
        # The documented bounds of u (N, B), and the bounds of log p (B, V) that follow from them.
        lse = log_sum_exp(array(public, exact))
        sizes = abs(self.lse) + abs(lse) + setting.reach
        self.ratio_error = (setting.unit(models) + 5e-14 + 5e-16 * sizes).astype(float)
        depth = np.where(held, abs(self.log_q), 0)
        rounding = 2.0**-49 * (1 + setting.scale * setting.reach + depth)
        both = 2 * setting.scale * self.ratio_error.max(0) + 1e-13 + 5e-16 * abs(lse)
        self.log_error = (rounding + both[:, None]).astype(float)


def screening(
    private: Tensor,
    public: Tensor,
    noise: Tensor,
    *,
    weight: float,
    order: float,
    top_k: int,
    divisor: int | None = None,
    active: Sequence[bool] | None = None,
) -> mpf:
    """Return the exact screening divergence of one position.

    Args:
        noise: (top_k,), in order of falling public probability.
    """
    p, q = (softmax(rows, exact=True) for rows in (private, public))
    on = np.ones(len(p), bool) if active is None else np.array(active)
    n, w = mpf(len(p) if divisor is None else divisor), mpf(weight)
    ranked = sorted((v for v in range(len(q)) if q[v] > 0), key=lambda v: (-q[v], v))[:top_k]
    # No difference of probabilities: a rest of exactly 0 must not become a rounding of 1 - 1.
    mixed = (n - w * int(on.sum())) * q[ranked] + w * p[on][:, ranked].sum(0)
    score = np.maximum(mixed / n + array(noise, exact=True)[: len(ranked)], 0)
    if score.sum() == 0:
        return mpf(INF)
    return one_way(score / score.sum(), q[ranked] / q[ranked].sum(), [order])[0]


def drawn_by_hand(p: Tensor, public: Tensor, key: bytes, counter: int) -> list[int]:
    """Return one token per row: the first whose cumulative weight exceeds the number drawn."""
    tokens = []
    for b, weights in enumerate(reference.sampling_weights(p, public)):
        number = uniform_below(key, counter, b, weights)
        tokens.append(next(v for v, end in enumerate(accumulate(weights)) if number < end))
    return tokens


def uniform_below(key: bytes, counter: int, lane: int, weights: list[int]) -> int:
    """Return a random number below the total of the weights, in units of 2^-1074.

    Its integer part, in units of 2^-100, is a 128-bit word. The word is masked to the width of 1.5
    times the sum of the weights' integer parts. Its fraction comes from two further blocks. A
    number at or above the total is rejected, and the next one is tried.
    """
    whole = sum(weight >> FRACTION_BITS for weight in weights)
    mask = (1 << (whole - 1 + whole // 2).bit_length()) - 1
    total = sum(weights)
    for number in count():
        stream, at = _C.keystream(key, counter, lane << 32 | number // 4, 1), number % 4 * 16
        draw = int.from_bytes(stream[at : at + 16], "little") & mask
        words = _C.keystream(key, counter, (lane << 32 | 2**31) + 2 * number, 2)
        fraction = int.from_bytes(words, "little") % 2**FRACTION_BITS
        if draw << FRACTION_BITS | fraction < total:
            return draw << FRACTION_BITS | fraction
    raise AssertionError
