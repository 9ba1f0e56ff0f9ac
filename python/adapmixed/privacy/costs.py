"""The cost of one answer of each mechanism; `guarantee.parts_of` composes them.

- ClippedLogPool with clip range [a, b] and scale κ costs ρ = (κ(b - a)/N)²/8
  (`bounded_range_rho`). With per-shard budgets, one member costs `individual_rho`.
- ClippedMixing with box [c, C] costs the privacy loss distribution of the worst pair in the box
  (`clipped_mixing_pair`). With per-shard budgets, one member costs the charge that the operator
  `clip_project` returns (csrc/clip/formula.h).
- PMixED with a ball of order α and radius R costs log(1 + (e^{(α-1)R} - 1)/N)/(α-1)
  (`sound_bound`).
- AdaPMixED costs the Rényi divergence between the answers with and without each member, which the
  operator `leave_one_out` returns (csrc/leave_one_out/formula.h). One screening costs
  α (λ_s/(Nσ))² (`screening_rho` has the factor of α).
- An answer of the public model costs 0. An unprotected answer has no finite cost.

Costs are rounded up and admissible radii down, as `conversions` says.

ClippedMixing's dominating pair is two distributions on a few atoms that bound one answer's privacy
loss. The pair P*, Q* dominates P, Q if Σ (P - γ Q)_+ <= Σ (P* - γ Q*)_+ for every γ >= 0. The
exchanged pair then dominates (Q, P), and products of pairs dominate adaptive sequences. The proofs
are in docs/theory/clipped-mixing.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.conversions import log_expm1_up, lowered, softplus_up, sum_up, up

_EXP_LIMIT = 700.0  # exp and expm1 stay finite in float64 below this


def sound_bound(order: float, radius: float, num_models: float) -> float:
    """Return the loss of one query under zero-out, log(1 + (e^{(α-1)R} - 1)/N) / (α-1).

    It bounds the divergence in both directions if every projected distribution lies in the Rényi
    ball of radius R around the public one, in both directions. The supremum is attained as the mass
    of the token that carries the divergence goes to 0. With N = 1 the bound is R.
    docs/theory/pmixed.md has the proof.

    Args:
        order: Rényi order α > 1.
        radius: R ≥ 0; +inf allowed.
        num_models: N ≥ 1. If a hidden random subset weighs each member by g/N, it is N/g.

    Returns:
        The bound in nats, rounded up; +inf allowed.
    """
    if radius == 0:
        return 0.0
    share = min(1.0, up(1 / num_models))
    exponent = up((order - 1) * radius)
    if exponent <= _EXP_LIMIT:
        total = up(math.log1p(up(share * up(math.expm1(exponent)))))
    else:
        # log(1 + share (e^x - 1)) <= log(1 + share e^x)
        total = softplus_up(sum_up(exponent, math.log(share)))
    return min(radius, up(total / (order - 1)))  # by convexity the exact value is at most R


def radius_for_epsilon(order: float, epsilon: float, num_models: int) -> float:
    """Return the largest radius R with sound_bound(order, R, num_models) <= epsilon.

    R = log(1 + N (e^{(α-1)ε} - 1)) / (α-1), lowered by a few ulp until the evaluated bound is at
    most epsilon. It inverts the theorem of docs/theory/pmixed.md.

    Args:
        epsilon: Rényi cost ≥ 0 of one query; +inf allowed.

    Returns:
        R, rounded down. epsilon = 0 gives 0; epsilon = inf gives inf.
    """
    if math.isinf(epsilon):
        return math.inf
    exponent = (order - 1) * epsilon
    if exponent == 0:
        return 0.0
    growth = sum_up(log_expm1_up(exponent), math.log(num_models))
    guess = softplus_up(growth) / (order - 1)
    if math.isinf(guess):
        return epsilon  # representable and safe: the bound never exceeds the radius
    return lowered(guess, epsilon, lambda r: sound_bound(order, r, num_models) <= epsilon)


def screening_rho(weight: float, sigma: float, num_models: int) -> float:
    """Return (λ_s/(Nσ))², rounded up; one screening costs α times this at every Rényi order α.

    With noise before re-scaling, the L2 sensitivity is Δ = √2 λ_s/N, so the Rényi cost is
    α Δ²/(2σ²) = α (λ_s/(Nσ))². This is the paper's theorem on noisy screening (Algorithm 1,
    line 6); docs/theory/adapmixed.md has the proof.

    Args:
        weight: λ_s ≥ 0, weight of the private models in the screened mixture.
        sigma: σ > 0, standard deviation of the noise.
        num_models: N ≥ 1.
    """
    share = up(up(weight / sigma) / num_models)
    return 0.0 if weight == 0 else up(share * share)


RANGE_ERROR = 1e-9
"""Relative widening of the accounted range η, to which `range_rounding` is added."""


def range_rounding(scale: float, lower: float, upper: float) -> float:
    """Return twice the amount that rounding can add to the range of log p/p', in nats.

    The operator's bound is 2^-49 (1 + κ max(-a, b) + L), where L is the largest -log q of the
    tokens compared (csrc/log_pool/formula.h). Float64 has no L beyond 750. See "Rounding" in
    docs/theory/clipped-log-pool.md. Arguments are those of :func:`answer_range`.
    """
    return 2.0**-48 * (1 + scale * max(-lower, upper) + 750)


def answer_range(
    scale: float, lower: float, upper: float, num_models: int, adjacency: str
) -> float:
    """Return the range η of log p/p' of one answer, in nats, rounded up.

    η = κ (b - a)/N for "zero_out" and twice that for "replace_one". N is a public constant, so a
    missing member costs as much as an emptied one. docs/theory/clipped-log-pool.md has the proof.

    Args:
        scale: κ ≥ 0.
        lower: a ≤ 0, in log units.
        upper: b ≥ 0, in log units.
        num_models: N ≥ 1.
        adjacency: "zero_out" or "replace_one".
    """
    nominal = scale * (upper - lower) / num_models
    if nominal == 0 and (scale == 0 or upper == lower):
        return 0.0
    # A few roundings of 2^-53 here are far below RANGE_ERROR and one unit in the last place.
    wide = nominal * (1 + RANGE_ERROR) + range_rounding(scale, lower, upper)
    span = math.nextafter(wide, math.inf)
    return 2 * span if adjacency == "replace_one" else span


def bounded_range_rho(
    scale: float, lower: float, upper: float, num_models: int, adjacency: str
) -> float:
    """Return the zCDP cost ρ = η²/8 of one answer of range η, rounded up.

    The answer costs α ρ at every Rényi order α, in both directions; see
    docs/theory/clipped-log-pool.md. Arguments and errors are those of :func:`answer_range`.
    """
    span = answer_range(scale, lower, upper, num_models, adjacency)
    return math.nextafter(math.nextafter(span * span, math.inf) / 8, math.inf) if span else 0.0


def individual_rho(
    span: NDArray[np.float64], scale: float, lower: float, upper: float, num_models: int
) -> NDArray[np.float64]:
    """Return the individual zCDP charge ρ_i = (κ span_i/N)²/8 of every model, rounded up.

    span_i = max u_i - min u_i is the range of model i's own clipped log-ratios, so the charge is
    for zero-out. It is widened as in :func:`bounded_range_rho`. docs/theory/per-shard-budgets.md
    has the proof. Other arguments are those of :func:`answer_range`.

    Args:
        span: float64 of any shape, in [0, b - a].

    Returns:
        ρ_i, float64 of the shape of `span`.
    """
    wide = span * (scale / num_models) * (1 + RANGE_ERROR) + range_rounding(scale, lower, upper)
    eta = wide * (1 + 2.0**-50)
    return np.asarray(eta * eta / 8 * (1 + 2.0**-50), dtype=np.float64)


BOX_ERROR = 1e-7
"""Relative widening of the accounted box beyond the nominal one.

A pair for a wider box dominates. With N >= 2 and lower > 0, it covers every answer whose
probabilities have a relative error of at most BOX_ERROR lower / (2 N upper). If the operators do
not keep to that, `answer_error` is accounted in addition.
"""

ROW_SUMS = 4e-12
"""e₀, the largest difference between the sums of the operator's rows of one position."""


@dataclass(frozen=True)
class DominatingPair:
    """Two distributions p and q on common atoms.

    Attributes:
        atoms: the masses ≥ 0 of each atom in p and in q. Both have sum 1 within 1e-9. One of the
            two may be 0, which is an infinite ratio.
    """

    atoms: tuple[tuple[float, float], ...]

    def exchanged(self) -> DominatingPair:
        """Return the pair (q, p), which dominates the other order of the neighbours.

        See docs/theory/clipped-mixing.md.
        """
        return DominatingPair(tuple((b, a) for a, b in self.atoms))

    def renyi(self, order: float) -> float:
        """Return D_α(p ‖ q), without cancellation for near-equal distributions.

        It bounds the divergence of every answer that the pair dominates; see
        docs/theory/clipped-mixing.md. Both sum to 1, so Σ q f(p/q) with
        f(x) = x^α - 1 - α (x - 1) is Σ p^α q^{1-α} - 1.

        Args:
            order: Rényi order α > 1.

        Returns:
            The divergence in nats; +inf allowed.
        """
        excess = []
        for a, b in self.atoms:
            if b == 0:
                return math.inf
            ratio = a / b
            power = order * math.log(ratio) if ratio > 0 else -math.inf
            if power > 700:
                return math.inf
            excess.append(b * (math.expm1(power) - order * (ratio - 1)))
        return math.log1p(max(0.0, math.fsum(excess))) / (order - 1)

    def largest_loss(self) -> float:
        """Return max |log(p/q)|, the pure ε of one answer in both orders; +inf allowed.

        See docs/theory/clipped-mixing.md.
        """
        return max(math.inf if 0 in (a, b) else abs(math.log(a / b)) for a, b in self.atoms)


def clipped_mixing_pair(
    lower: float, upper: float, num_models: int, adjacency: str
) -> DominatingPair:
    """Return the pair that dominates one answer of ClippedMixing, in both orders.

    The answer is drawn from p = (1/N) Σ_i p̄_i with c q <= p̄_i <= C q. With π = (1-c)/(C-c), the
    atoms are corners of the box:

    - "zero_out": U = C has mass π, and U = c has mass 1-π. P = ((N-1)c + U)/N and
      Q = ((N-1)c + 1)/N, each times the mass.
    - "replace_one": (U, U') = (C, c) and (c, C) have mass π each, and (c, c) has mass 1-2π.
      If C + c < 2, (C, c) and (c, C) have mass 1-π each, and (C, C) has mass 2π-1.
      P = ((N-1)c + U)/N and Q = ((N-1)c + U')/N, each times the mass.

    One more atom has mass (N-1)(1-c)/N in both, for the other members' mass beyond c q. The pairs
    grow with the box and shrink with N. N is a public constant, so a missing member costs as much
    as an emptied one. docs/theory/clipped-mixing.md has the proof.

    Args:
        lower: c of the box of p̄_i/q, in [0, 1].
        upper: C of the box, ≥ 1 and finite.
        num_models: N ≥ 1.
        adjacency: "zero_out" or "replace_one".
    """
    if lower == 1 or upper == 1:  # the mean ratio is 1, so every p̄_i is q
        return DominatingPair(((1.0, 1.0),))
    # 1 - c and C - 1 are exact in [1/2, 4]; C + c - 2 loses digits of a narrow box.
    low, high, models = lower, upper, num_models
    below, above, width = 1 - low, high - 1, high - low
    raised, lowered = below / width, above / width
    if adjacency == "zero_out":
        corners = [(high, 1.0, raised), (low, 1.0, lowered)]
    else:
        less, rest = min(raised, lowered), abs(above - below) / width
        corner = low if above >= below else high
        corners = [(high, low, less), (low, high, less), (corner, corner, rest)]
    others = (models - 1) * low
    atoms = [((others + u) / models * m, (others + w) / models * m) for u, w, m in corners]
    common = (models - 1) * (1 - low) / models
    atoms.append((common, common))
    return DominatingPair(tuple(atom for atom in atoms if any(atom)))


def accounted_box(lower: float, upper: float) -> tuple[float, float]:
    """Return the box that is accounted for a nominal one: wider by `BOX_ERROR`.

    "Rounding of the answer" in docs/theory/clipped-mixing.md proves that this covers rounding.

    Args:
        lower: c of the nominal box, in [0, 1].
        upper: C of the nominal box, ≥ 1 and finite.

    Returns:
        (lower, upper) of the accounted box.
    """
    return lower * (1 - BOX_ERROR), upper * (1 + BOX_ERROR)


def answer_error(lower: float, upper: float, num_models: int) -> float:
    """Return η such that computed answers are within e^±η per token of what the pair dominates.

    η is 0 if the wider box covers the operators' rounding, which holds if N >= 2,
    upper/lower <= 2 500 and N² upper/lower <= 1.5e8. Otherwise it is 1.6e-11 + N 2^-52. "What the
    kernels do" and the section after it in docs/theory/clipped-mixing.md have the proof.
    docs/theory/numerics.md has the effect on (ε, δ). The box is the nominal one, as in
    :func:`accounted_box`.
    """
    if num_models > 1 and upper <= 2500 * lower and num_models**2 * upper <= 1.5e8 * lower:
        return 0.0
    return rounding_of_distributions(num_models)


def rounding_of_distributions(num_models: int) -> float:
    """Return η = 4 e₀ + N 2^-52; computed answers are within e^±η per token of the exact mean.

    "Boxes that the widening does not hold" in docs/theory/clipped-mixing.md has the proof.
    """
    return 4 * ROW_SUMS + num_models * 2.0**-52


def charge_rounding(order: float, num_models: int) -> tuple[float, float]:
    """Return what rounding of an answer adds to a model's Rényi charge.

    The lemma's charge is for the exact mean of rows of sum 1. If rows differ in sum, the others
    keep a little less than lower q each, which is a relative error. The computed answers lie within
    e^±η of that mean, which adds (2α-1)/(α-1) η. See "Rounding" in
    docs/theory/per-shard-budgets.md.

    Args:
        order: Rényi order α > 1.
        num_models: N ≥ 1.

    Returns:
        (relative, absolute) errors of the charge.
    """
    eta = rounding_of_distributions(num_models)
    return 2 * (order + 1) * ROW_SUMS, (2 * order - 1) / (order - 1) * (1 + 2.0**-50) * eta
