"""ClippedMixing: dominating pairs, and what rounding costs.

A dominating pair is two distributions on a few atoms that bound one answer's privacy loss: (P*, Q*)
dominates (P, Q) if Σ (P - γ Q)_+ <= Σ (P* - γ Q*)_+ for every γ >= 0. The exchanged pair then
dominates (Q, P), and products of pairs dominate adaptive sequences (docs/privacy.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from adapmixed.checks import check_box, check_count, check_order, check_question

BOX_ERROR = 1e-7
"""Relative widening of the accounted box beyond the nominal one.

A pair for a wider box dominates. With N >= 2 and lower > 0 it covers every answer that is computed
within a relative error of BOX_ERROR lower / (2 N upper) per token of the exact mixture. Where the
operators do not keep to that, `answer_error` is accounted besides.
"""

MAX_VOCABULARY = 2**20
"""V up to which `ROW_SUMS` holds."""

ROW_SUMS = 4e-12
"""e₀: by which the operator's rows of a position may differ in sum."""

LEAST_LOWER = 1e-30
"""The lowest c > 0: with c below it a ratio may be lost where doubles end."""

_SUM_ERROR = 1e-9  # of the masses that a caller may hand in


@dataclass(frozen=True)
class DominatingPair:
    """Two distributions on common atoms: masses `p` and `q`, each >= 0 with sum 1 (within 1e-9).

    An atom may have mass 0 in one of the two (an infinite ratio), not in both.
    """

    p: tuple[float, ...]
    q: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("p", "q"):
            masses = tuple(float(mass) for mass in getattr(self, name))
            object.__setattr__(self, name, masses)
            if not masses or not all(mass >= 0 for mass in masses):
                raise ValueError(f"{name} must be one or more masses >= 0, got {masses!r}")
            if not abs(math.fsum(masses) - 1) <= _SUM_ERROR:
                raise ValueError(f"{name} must sum to 1, got {math.fsum(masses)!r}")
        if len(self.p) != len(self.q):
            raise ValueError(
                f"p and q must have the same number of atoms, got {len(self.p)} and {len(self.q)}"
            )
        if any(a == 0 and b == 0 for a, b in zip(self.p, self.q, strict=True)):
            raise ValueError("atoms must have a mass > 0 in p or in q, got one that has neither")

    def exchanged(self) -> DominatingPair:
        """The pair (q, p), which dominates the other order (docs/privacy.md, section 11)."""
        return DominatingPair(self.q, self.p)

    def hockey_stick(self, epsilon: float) -> float:
        """Σ (p - e^epsilon q)_+: the δ that one answer has at this epsilon (any real number).

        H_γ of docs/privacy.md, section 11, at γ = e^epsilon.
        """
        ratio = math.exp(epsilon)
        return math.fsum(max(0.0, a - ratio * b) for a, b in zip(self.p, self.q, strict=True))

    def renyi(self, order: float) -> float:
        """D_order(p ‖ q), without cancellation for near-equal distributions; +inf allowed.

        Both sum to 1, so Σ q f(p/q) with f(x) = x^α - 1 - α (x - 1) is Σ p^α q^{1-α} - 1.
        A bound for every answer that the pair dominates: docs/privacy.md, section 11.
        """
        order, excess = check_order(order), []
        for a, b in zip(self.p, self.q, strict=True):
            if b == 0:
                return math.inf
            ratio = a / b
            power = order * math.log(ratio) if ratio > 0 else -math.inf
            if power > 700:
                return math.inf
            excess.append(b * (math.expm1(power) - order * (ratio - 1)))
        return math.log1p(max(0.0, math.fsum(excess))) / (order - 1)

    def largest_loss(self) -> float:
        """max |log(p/q)|: the pure ε of one answer, both ways (docs/privacy.md, section 11).

        +inf allowed.
        """
        pairs = zip(self.p, self.q, strict=True)
        return max(math.inf if 0 in pair else abs(math.log(pair[0] / pair[1])) for pair in pairs)


def clipped_mixing_pair(
    lower: float, upper: float, num_models: int, adjacency: str
) -> DominatingPair:
    """The pair that dominates one answer of ClippedMixing, in both orders.

    The answer is drawn from p = (1/N) Σ_i p̄_i with lower q <= p̄_i <= upper q. With
    π = (1-c)/(C-c), c = `lower`, C = `upper`, the atoms are corners of the box:

    - "zero_out": U = C (mass π), c (1-π); P = ((N-1)c + U)/N, Q = ((N-1)c + 1)/N times the mass.
    - "replace_one": (U, U') = (C, c), (c, C) (mass π each), (c, c) (1-2π), and where C + c < 2
      (C, c), (c, C) (1-π each), (C, C) (2π-1); P = ((N-1)c + U)/N, Q the same with U'.

    An atom of mass (N-1)(1-c)/N in both is added: the others' mass beyond c q. The pairs grow with
    the box and shrink with N. N is a public constant, so a missing member costs what an emptied one
    does. Proof: docs/privacy.md, section 11.

    Args:
        lower, upper: the box of p̄_i/q, 0 <= lower <= 1 <= upper, both finite.
        num_models: N >= 1.
        adjacency: "zero_out" or "replace_one".
    """
    low, high = check_box(lower, upper)
    models, adjacency = check_count("num_models", num_models), check_question(adjacency)
    if low == 1 or high == 1:  # the mean ratio is 1, so every p̄_i is q
        return DominatingPair((1.0,), (1.0,))
    # Both are exact in [1/2, 4]: high + low - 2 would lose the digits of a narrow box.
    below, above, width = 1 - low, high - 1, high - low
    raised, lowered = below / width, above / width
    if adjacency == "zero_out":
        corners = [(high, 1.0, raised), (low, 1.0, lowered)]
    elif above >= below:
        rest = (above - below) / width
        corners = [(high, low, raised), (low, high, raised), (low, low, rest)]
    else:
        rest = (below - above) / width
        corners = [(high, low, lowered), (low, high, lowered), (high, high, rest)]
    others = (models - 1) * low
    atoms = [((others + u) / models * m, (others + w) / models * m) for u, w, m in corners]
    common = (models - 1) * (1 - low) / models
    atoms.append((common, common))
    kept = [(a, b) for a, b in atoms if a > 0 or b > 0]
    return DominatingPair(tuple(a for a, _ in kept), tuple(b for _, b in kept))


def accounted_box(lower: float, upper: float) -> tuple[float, float]:
    """(lower, upper) widened by `BOX_ERROR`: what is accounted for a nominal box.

    Why that covers rounding: docs/privacy.md, section 11, "Rounding of the answer".
    A box of one point on either side (lower = 1 or upper = 1) answers q itself and stays.
    """
    low, high = check_box(lower, upper)
    if low == 1 or high == 1:
        return low, high
    return low * (1 - BOX_ERROR), high * (1 + BOX_ERROR)


def answer_error(lower: float, upper: float, num_models: int) -> float:
    """η: computed answers are within e^±η per token of what the accounted pair dominates.

    0 where the widening of the box holds the operators' rounding: N >= 2, upper/lower <= 2 500 and
    N² upper/lower <= 1.5e8; and for a box that answers q itself. Else 1.6e-11 + N 2^-52. Proof:
    docs/privacy.md, section 11, "What the kernels do"; the effect on (ε, δ): section 8.
    """
    (low, high), models = check_box(lower, upper), check_count("num_models", num_models)
    if low == 1 or high == 1:
        return 0.0
    if models > 1 and high <= 2500 * low and models * models * high <= 1.5e8 * low:
        return 0.0
    return rounding_of_distributions(models)


def rounding_of_distributions(num_models: int) -> float:
    """η = 4 e₀ + N 2^-52: computed answers are within e^±η per token of such a mean.

    Proof: docs/privacy.md, section 11, "What the kernels do".
    """
    return 4 * ROW_SUMS + check_count("num_models", num_models) * 2.0**-52


def charge_rounding(order: float, num_models: int) -> tuple[float, float]:
    """(relative, absolute): what rounding of an answer adds to a model's Rényi charge.

    The lemma's charge is for the exact mean of rows of mean 1. Rows that differ in sum leave the
    others a little less than lower q each, which is relative, and the computed answers lie within
    e^±η of that mean, which adds (2α-1)/(α-1) η. docs/privacy.md, section 13, "Rounding".

    Args:
        order: α > 1.  num_models: N >= 1.
    """
    order, eta = check_order(order), rounding_of_distributions(num_models)
    return 2 * (order + 1) * ROW_SUMS, (2 * order - 1) / (order - 1) * (1 + 2.0**-50) * eta
