"""Multi-precision oracles for the operators, at 70 digits and from exactly the given bits.

They are independent of the code under test: the equations are summed as they are written (P^a
Q^(1-a)). With 70 digits and unbounded exponents, neither the excess form nor logarithms are needed.
Only small vocabularies are fast enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import mpmath as mp
from mpmath import mpf
from torch import Tensor

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


def exact_weight(weight: float, complement: float) -> tuple[mpf, mpf]:
    """Return the pair that (weight, complement) stands for: the smaller of the two is exact."""
    if complement < weight:
        return ONE - mpf(complement), mpf(complement)
    return mpf(weight), ONE - mpf(weight)


def mix(p: Sequence[mpf], q: Sequence[mpf], weight: mpf, complement: mpf) -> list[mpf]:
    return [weight * a + complement * b for a, b in zip(p, q, strict=True)]


class Ball:
    """The weights w with D<->_a(w p + (1 - w) q || q) <= R, for one pair of rows."""

    def __init__(self, private: Tensor, public: Tensor) -> None:
        self.p, self.q = softmax(private), softmax(public)
        self.masked = any(a > 0 and b == 0 for a, b in zip(self.p, self.q, strict=True))
        self.tokens = [(b, a / b) for a, b in zip(self.p, self.q, strict=True) if b > 0]

    def excess(self, weight: mpf, complement: mpf, order: float) -> mpf:
        """Return (a - 1) D<->_a = log max(F, G)."""
        eta = mpf(order) - 1
        forward, reverse = [], []
        for q, r in self.tokens:
            rho = weight * r + complement
            if rho == 0:
                return INF
            power = _power(rho, eta)
            forward.append(q * rho * power)
            reverse.append(q / power)
        return mp.log(max(mp.fsum(forward), mp.fsum(reverse)))

    def feasible(self, weight: mpf, complement: mpf, order: float, radius: float) -> bool:
        if weight == 0:
            return True
        if self.masked:
            return False
        return self.excess(weight, complement, order) <= (mpf(order) - 1) * mpf(radius)

    def admits(self, weight: float, complement: float, order: float, radius: float) -> bool:
        """Tell whether a returned pair of doubles is feasible."""
        return self.feasible(*exact_weight(weight, complement), order, radius)

    def nearly_maximal(
        self, weight: float, complement: float, order: float, radius: float, tolerance: float
    ) -> bool:
        """Tell whether the optimum is at most weight / (1 - tolerance), by one evaluation."""
        if complement == 0 or self.masked:
            return True
        more = max(exact_weight(weight, complement)[0], mpf(5e-324)) / (1 - mpf(tolerance))
        return more >= 1 or not self.feasible(more, 1 - more, order, radius)

    def optimum(self, order: float, radius: float, digits: int = 25) -> tuple[mpf, mpf]:
        """Return (weight, complement) of the largest feasible weight.

        The smaller of the two has ``digits`` digits.
        """
        if self.masked:
            return ZERO, ONE
        if self.feasible(ONE, ZERO, order, radius):
            return ONE, ZERO
        half = mpf(0.5)
        upper = self.feasible(half, half, order, radius)
        target = (mpf(order) - 1) * mpf(radius)

        def gap(log_small: mpf) -> mpf:
            small = mp.exp(log_small)
            pair = (1 - small, small) if upper else (small, 1 - small)
            # The log of the constraint is nearly linear in log(small), far out and near the ball.
            return mp.log(max(self.excess(*pair, order), mpf(10) ** -60)) - mp.log(target)

        low = high = mp.log(half)
        step = ONE
        while (gap(low) <= 0) == upper:
            high, low, step = low, low - step, 2 * step
        root = _illinois(gap, low, high, digits)
        small = mp.exp(root)
        return (1 - small, small) if upper else (small, 1 - small)


def _illinois(function, low: mpf, high: mpf, digits: int) -> mpf:
    f_low, f_high = function(low), function(high)
    side = 0
    while abs(high - low) > mpf(10) ** -digits:
        middle = (low * f_high - high * f_low) / (f_high - f_low)
        f_middle = function(middle)
        if f_middle == 0:
            return middle
        if (f_middle > 0) == (f_low > 0):
            low, f_low = middle, f_middle
            f_high = f_high / 2 if side == -1 else f_high
            side = -1
        else:
            high, f_high = middle, f_middle
            f_low = f_low / 2 if side == 1 else f_low
            side = 1
        if abs(f_middle) < mpf(10) ** -(digits + 5):
            return middle
    return (low + high) / 2


def projected(
    private: Tensor, public: Tensor, weight: Tensor, complement: Tensor
) -> tuple[list[list[mpf]], list[mpf]]:
    """Return ([p_bar_i], q) of one position.

    Args:
        private: (N, V) logits.
        public: (V,) logits.
        weight, complement: (N,).
    """
    q = softmax(public)
    pairs = zip(weight.tolist(), complement.tolist(), strict=True)
    bars = [
        mix(softmax(row), q, *exact_weight(w, c))
        for row, (w, c) in zip(private, pairs, strict=True)
    ]
    return bars, q


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


def leave_one_out(
    private: Tensor,
    public: Tensor,
    weight: Tensor,
    complement: Tensor,
    orders: Sequence[float],
    adjacency: str,
) -> list[list[mpf]]:
    """Return the loss of every model at every order, [N][K], at the given weights."""
    bars, q = projected(private, public, weight, complement)
    p = mean(bars)
    return [
        [both_ways(p, neighbour(bars, q, i, adjacency), a) for a in orders]
        for i in range(len(bars))
    ]


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
    private_lse: Sequence[float] | None = None,
) -> tuple[list[mpf], mpf, list[mpf]]:
    """Return (p, log-normaliser, spans) of one position.

    Args:
        private: (N, V) logits.
        public: (V,) logits.
        private_lse: log-sum-exps of the private rows to use instead of the exact ones.
    """
    q = softmax(public)
    held = [v for v in range(len(q)) if q[v] > 0]
    a, b = mpf(lower), mpf(upper)
    if private_lse is None:
        rows = [[mp.log(p) if p else -mp.inf for p in softmax(row)] for row in private]
    else:
        rows = [
            [mpf(z) - lse for z in row.tolist()]
            for row, lse in zip(private, private_lse, strict=True)
        ]
    ratios = [{v: min(max(row[v] - mp.log(q[v]), a), b) for v in held} for row in rows]
    counted = [u for i, u in enumerate(ratios) if active is None or active[i]]
    share = mpf(scale) / (slots or len(ratios))
    weight = [ZERO] * len(q)
    for v in held:
        weight[v] = q[v] * mp.exp(share * mp.fsum(u[v] for u in counted))
    total = mp.fsum(weight)
    spans = [max(u.values()) - min(u.values()) for u in ratios]
    return [w / total for w in weight], mp.log(total), spans
