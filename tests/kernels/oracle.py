"""Oracles of the operators, all from exactly the given bits and independent of the code under test.

The first half has 70 digits: the equations are summed as they are written (P^a Q^(1-a)), by mpmath,
for small vocabularies. The second half does the same for whole tensors in numpy's extended
precision: 64-bit mantissas, exponents to e^11356. It has 11 bits more than a double, so that
cancellation of that size still leaves the operators' bounds decidable. On platforms whose long
double is a double, every value is doubtful, and mpmath decides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, count

import mpmath as mp
import numpy as np
from cases import Setting
from mpmath import mpf
from numpy.typing import NDArray
from torch import Tensor

from adapmixed_ext import _C, Clipping, reference

Array = NDArray[np.longdouble]
FRACTION_BITS = 974  # a fraction of 2^-100 is counted in 2^-1074
mp.mp.dps = 70
ZERO, ONE, INF = mpf(0), mpf(1), mpf("inf")


def softmax(logits: Tensor) -> list[mpf]:
    """Return the exact distribution of one row of logits (V,)."""
    values = [mpf(z) for z in logits.double().tolist()]
    top = max(values)
    weights = [ZERO if mp.isinf(z) else mp.exp(z - top) for z in values]
    total = mp.fsum(weights)
    return [w / total for w in weights]


def renyi(p: Sequence[mpf], q: Sequence[mpf], order: float) -> mpf:
    """Return D_a(P || Q) for a > 1.

    A token with P = Q = 0 adds nothing; one with P > 0 = Q makes it +inf.
    """
    pairs = [(a, b) for a, b in zip(p, q, strict=True) if a > 0]
    if any(b == 0 for _, b in pairs):
        return INF
    eta = mpf(order) - 1
    return mp.log(mp.fsum(a * _power(a / b, eta) for a, b in pairs)) / eta


def both_ways(p: Sequence[mpf], q: Sequence[mpf], order: float) -> mpf:
    """Return D<->_a(P, Q)."""
    return max(renyi(p, q, order), renyi(q, p, order))


def _power(base: mpf, exponent: mpf) -> mpf:
    if exponent == int(exponent):
        return base ** int(exponent)
    return mp.exp(exponent * mp.log(base))


def mix(p: Sequence[mpf], q: Sequence[mpf], weight: mpf) -> list[mpf]:
    return [weight * a + (1 - weight) * b for a, b in zip(p, q, strict=True)]


class Ball:
    """The weights w with D<->_a(w p + (1 - w) q || q) <= R, for one pair of rows."""

    def __init__(self, private: Tensor, public: Tensor) -> None:
        self.p, self.q = softmax(private), softmax(public)
        self.masked = any(a > 0 and b == 0 for a, b in zip(self.p, self.q, strict=True))
        self.tokens = [(b, a / b) for a, b in zip(self.p, self.q, strict=True) if b > 0]

    def excess(self, weight: mpf, order: float) -> mpf:
        """Return (a - 1) D<->_a = log max(F, G)."""
        eta = mpf(order) - 1
        forward, reverse = [], []
        for q, r in self.tokens:
            rho = weight * r + (1 - weight)  # in this order: at weight 1 it is r
            if rho == 0:
                return INF
            power = _power(rho, eta)
            forward.append(q * rho * power)
            reverse.append(q / power)
        return mp.log(max(mp.fsum(forward), mp.fsum(reverse)))

    def admits(self, weight: mpf, order: float, radius: float) -> bool:
        """Tell whether a weight is feasible."""
        if weight == 0:
            return True
        if self.masked:
            return False
        return self.excess(weight, order) <= (mpf(order) - 1) * mpf(radius)

    def nearly_maximal(self, weight: float, order: float, radius: float, tolerance: float) -> bool:
        """Tell whether the optimum is at most weight / (1 - tolerance), by one evaluation."""
        if weight == 1 or self.masked:
            return True
        more = max(mpf(weight), mpf(1e-12)) / (1 - mpf(tolerance))
        return more >= 1 or not self.admits(more, order, radius)


def projected(private: Tensor, public: Tensor, weight: Tensor) -> tuple[list[list[mpf]], list[mpf]]:
    """Return ([p_bar_i], q) of one position.

    Args:
        private: (N, V) logits.
        public: (V,) logits.
        weight: (N,).
    """
    q = softmax(public)
    members = zip(private, weight.tolist(), strict=True)
    return [mix(softmax(row), q, mpf(w)) for row, w in members], q


def mean(rows: Sequence[Sequence[mpf]]) -> list[mpf]:
    return [mp.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def neighbour(
    bars: Sequence[Sequence[mpf]], q: Sequence[mpf], removed: int, adjacency: str
) -> list[mpf]:
    """Return the mixture after model ``removed`` is removed (add/remove) or made public."""
    others = [row for i, row in enumerate(bars) if i != removed]
    if adjacency == "zero_out":
        others.append(q)
    return mean(others) if others else list(q)


def exact_loss(
    private: Tensor,
    public: Tensor,
    weight: Tensor,
    model: int,
    order: float,
    adjacency: str,
    slots: int = 0,
) -> mpf:
    """Return the loss of one model at one position.

    Args:
        private: (N, V) logits.
        public: (V,) logits.
        weight: (N,).
    """
    bars, q = projected(private, public, weight)
    bars += [q] * (slots - len(bars))
    return both_ways(mean(bars), neighbour(bars, q, model, adjacency), order)


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
    """Return the screening divergence of one position.

    Args:
        noise: (top_k,), in order of falling public probability.
    """
    q = softmax(public)
    rows = [softmax(row) for row in private]
    on = [True] * len(rows) if active is None else active
    n = len(rows) if divisor is None else divisor
    ranked = sorted((v for v in range(len(q)) if q[v] > 0), key=lambda v: (-q[v], v))[:top_k]
    score = []
    for v, shift in zip(ranked, noise.double().tolist(), strict=False):
        # No difference of probabilities: a rest of exactly 0 must not become a rounding of 1 - 1.
        private_part = mpf(weight) * mp.fsum(
            row[v] for row, used in zip(rows, on, strict=True) if used
        )
        rest = (n - mpf(weight) * sum(on)) * q[v]
        score.append(max(ZERO, (rest + private_part) / n + mpf(shift)))
    total, base = mp.fsum(score), mp.fsum(q[v] for v in ranked)
    if total == 0:
        return INF
    return renyi([s / total for s in score], [q[v] / base for v in ranked], order)


def log_pool(
    private: Tensor,
    public: Tensor,
    *,
    lower: float,
    upper: float,
    scale: float,
    slots: int = 0,
    active: Sequence[bool] | None = None,
) -> tuple[list[mpf], mpf, list[mpf]]:
    """Return (p, log-normaliser, spans) of one position: private (N, V), public (V,)."""
    q = softmax(public)
    held = [v for v in range(len(q)) if q[v] > 0]
    a, b = mpf(lower), mpf(upper)
    rows = [[mp.log(p) if p else -mp.inf for p in softmax(row)] for row in private]
    ratios = [{v: min(max(row[v] - mp.log(q[v]), a), b) for v in held} for row in rows]
    counted = [u for i, u in enumerate(ratios) if active is None or active[i]]
    share = mpf(scale) / (slots or len(ratios))
    weight = [ZERO] * len(q)
    for v in held:
        weight[v] = q[v] * mp.exp(share * mp.fsum(u[v] for u in counted))
    total = mp.fsum(weight)
    spans = [max(u.values()) - min(u.values()) for u in ratios]
    return [w / total for w in weight], mp.log(total), spans


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


# Extended precision.

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

    def _log_mix(self, weight: Array) -> Array:
        """Return log(w r + 1 - w), with an absolute error of EPS if it is near 0."""
        w = weight[..., None]
        c = 1 - w
        with np.errstate(divide="ignore", invalid="ignore"):
            if self._ratio is not None:
                return np.where(c == 0, self.log_r, np.log(w * self._ratio + c))
            high, low = np.broadcast_arrays(np.log(w) + self.log_r, np.log(c))
            high, low = np.maximum(high, low), np.minimum(high, low)
            return np.where(np.isneginf(low), high, high + np.log1p(np.exp(low - high)))

    def excess(self, weight: Array, order: float) -> Array:
        """Return (a - 1) D<->_a(w p + (1 - w) q || q) = log max(F, G), (..., M)."""
        a = np.longdouble(order)
        log_rho = self._log_mix(weight)
        forward = log_sum_exp(self.log_q + a * log_rho)
        return np.maximum(forward, log_sum_exp(self.log_q + (1 - a) * log_rho))

    def uncertainty(self, order: float) -> Array:
        """Return how far rounding may move ``excess``: about as far as rounding its result does."""
        return EPS * (64 + 8 * order * np.minimum(self.reach, DEEP))


class Mixtures:
    """Mixtures (..., B, V) of rows p_bar (..., N, B, V), and of q (B, V) in the other slots."""

    def __init__(self, bars: Array, q: Array, slots: int = 0) -> None:
        self.bars, self.q = bars, q
        self.models = max(slots, bars.shape[-3])
        self._absent = (self.models - bars.shape[-3]) * q
        self.mean = (bars.sum(-3) + self._absent) / self.models

    @classmethod
    def of_weights(
        cls, private: Tensor, public: Tensor, weight: Tensor, slots: int = 0
    ) -> Mixtures:
        """Return mixtures at weights (..., N, B)."""
        q = np.exp(log_softmax(public))
        w = array(weight)[..., None]
        return cls(w * np.exp(log_softmax(private)) + (1 - w) * q, q, slots)

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

    found = []
    for order in orders:
        forward = (q * w * excess(y / w, order)).sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            reverse = np.where(q > 0, q * p * excess(-y / p, order), 0).sum(-1)
        most = np.fmax(np.where((p == 0).any(-1), np.inf, reverse), np.maximum(forward, 0))
        found.append(np.log1p(most) / (order - 1))
    return np.stack(found, -1)


def clipped(private: Tensor, public: Tensor, clipping: Clipping) -> Array:
    """Return the rows (N, B, V) that a clipping stands for; members that take no part answer q."""
    log_p, q = log_softmax(private), np.exp(log_softmax(public))
    scale, residual = array(clipping.log_scale), array(clipping.residual)
    x = np.exp(np.minimum(scale, 1e3)[..., None] + np.where(log_p < -600, 0, log_p))
    x = np.clip(x, clipping.lower * q, clipping.upper * q)
    bars = np.where(log_p < -600, residual[..., None] * q, x)
    on = np.ones(bars.shape[:2], bool) if clipping.active is None else clipping.active.numpy()
    return np.where(on[..., None], bars, q)


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
    ) -> None:
        models = private.shape[0]
        self.log_q = log_softmax(public)
        held = ~np.isneginf(self.log_q)
        self.lse = log_sum_exp(array(private))
        used = self.lse if private_lse is None else array(private_lse)
        log_p = array(private) - used[..., None]
        ratio = np.where(held, log_p - np.where(held, self.log_q, 0), 0)
        u = np.clip(ratio, setting.lower, setting.upper)
        on = np.ones(u.shape[:2], bool) if active is None else active.cpu().numpy()
        share = np.longdouble(setting.scale) / (models + setting.extra)
        weight = self.log_q + share * (u * on[..., None]).sum(0)
        self.log_normaliser = log_sum_exp(weight)
        self.log_p = weight - self.log_normaliser[:, None]
        most = np.where(held, u, -np.inf).max(-1)
        self.span = most - np.where(held, u, np.inf).min(-1)
        # The documented bounds of u (N, B), and the bounds of log p (B, V) that follow from them.
        lse = log_sum_exp(array(public))
        sizes = abs(self.lse) + abs(lse) + setting.reach
        self.ratio_error = (setting.unit(models) + 5e-14 + 5e-16 * sizes).astype(float)
        depth = np.where(held, abs(self.log_q), 0)
        own = 2.0**-49 * (1 + setting.scale * setting.reach + depth)
        both = 2 * setting.scale * self.ratio_error.max(0) + 1e-13 + 5e-16 * abs(lse)
        self.log_error = (own + both[:, None]).astype(float)
