"""The ε that follows from the totals of all charges.

Let E_i be the sum of shard i's realised losses and of the costs fixed in advance. Let P and Q be
the distributions of the transcript with and without shard i. The statements are:

- With fixed costs only: (ε, δ)-DP.
- With realised losses: P(S) <= ∫_S e^{E_i + c_α(δ)} dQ + δ, and the same with P and Q exchanged.
  This is an ex-post statement about the removal of shard i; its exponent depends on the transcript.

docs/theory has the proofs. Totals are upper bounds: losses are inflated by their error bound, and
sums are rounded up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adapmixed.limits import check_question
from adapmixed.privacy.account import FAMILIES, Account, Counted
from adapmixed.privacy.bounded_range import adaptive_epsilon, bounded_range_epsilon
from adapmixed.privacy.composition import clipped_mixing_epsilon
from adapmixed.privacy.conversions import c_alpha, gdp_to_dp, rdp_to_dp, replace_one_epsilon
from adapmixed.privacy.costs.adapmixed import screening_rho
from adapmixed.privacy.costs.clipped_log_pool import answer_range, bounded_range_rho
from adapmixed.privacy.events import (
    CAVEATS,
    BoundedRangeAnswer,
    ClippedAnswer,
    GaussianScreening,
    PublicAnswer,
    RenyiBound,
)
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.rounding import add_up, array_add_up, times_up, up


class Breakdown(NamedTuple):
    """The parts of an ε in nats, mixing + screening + conversion <= total, and its Rényi order."""

    mixing: float
    screening: float
    conversion: float  # to (ε, δ); may be negative
    total: float
    order: float | None = None


def guarantee_of(
    account: Account, delta: float | None = None, adjacency: str | None = None
) -> Guarantee:
    """Return the guarantee of all charges; without δ or neighbours, for those of the account.

    docs/concepts/guarantees.md explains its kinds; :func:`parts_of` names the theorems. The
    neighbours are "zero_out" or "replace_one".

    Raises:
        ValueError: "replace_one" was asked for a total that has no such statement.
    """
    delta = account.settings.delta if delta is None else delta
    adjacency = check_question(adjacency or account.settings.adjacency)
    kind, queries, public = account.kind, account.queries, account.public_queries
    unit = None if account.binding is None else account.binding.unit
    unit = "shard" if unit is None else repr(unit)
    if kind in ("none", "public"):
        epsilon, delta = (None, 1.0) if kind == "none" else (0.0, 0.0)
        return Guarantee(epsilon, delta, kind, queries=queries, public_queries=public, unit=unit)
    parts = parts_of(account, delta, adjacency)
    orders, neighbours = account.renyi or ((), "zero_out")
    return Guarantee(
        parts.total,
        delta,
        kind,
        adjacency=neighbours if neighbours == "add_remove" else adjacency,
        method="gaussian" if account.method == "renyi" and not orders else account.method,
        order=parts.order,
        orders=orders,
        queries=queries,
        public_queries=public,
        budget=_covered(account),
        caveats=tuple(name for name in CAVEATS if name in account.caveats),
        unit=unit,
        replaced=_replaced_epsilon(account, delta, adjacency),
    )


def _replaced_epsilon(account: Account, delta: float, adjacency: str) -> float | None:
    """Return ε of replace-one beside that of zero-out, for answers of a bounded range alone."""
    largest = None if account.budget is None else account.budget.largest
    bounded = account.method == "bounded range" or largest is not None
    if account.kind != "fixed" or adjacency != "zero_out" or not bounded:
        return None
    return parts_of(account, delta, "replace_one").total


def fixed_epsilon(account: Account, delta: float) -> float:
    """Return ε at this δ for the neighbours of the account.

    Raises:
        ValueError: the total is not fixed.
    """
    found = guarantee_of(account, delta)
    if found.kind not in ("fixed", "public") or found.epsilon is None:
        raise ValueError(
            f"epsilon must be that of a fixed total, got one of kind {found.kind!r}: "
            "guarantee() says what can be stated"
        )
    return found.epsilon


def parts_of(account: Account, delta: float, adjacency: str) -> Breakdown:
    """Return the parts of ε of all charges.

    Arguments and errors are those of :func:`guarantee_of`. The theorems are in

    - docs/theory/adapmixed.md for realised losses at one order or at several;
    - docs/theory/pmixed.md for PMixED;
    - docs/theory/clipped-mixing.md for ClippedMixing;
    - docs/theory/clipped-log-pool.md and docs/theory/bounded-range.md for ClippedLogPool;
    - docs/theory/per-shard-budgets.md for per-shard budgets.
    """
    if account.kind in ("none", "public"):
        cost = math.inf if account.kind == "none" else 0.0
        return Breakdown(cost, 0.0, 0.0, cost)
    order = None
    if account.method == "per-shard budget" and account.budget is not None:
        total, order = account.budget.epsilon(delta, adjacency), account.budget.order
    elif account.method == "pld":
        box = account.of(ClippedAnswer)[0]
        of = box.lower, box.upper, box.num_models, box.budget
        total = clipped_mixing_epsilon(*of, delta, adjacency)
    elif account.method == "bounded range":
        total = _bounded_range(account, delta, adjacency)
    else:
        return _renyi(account, delta, adjacency)
    return Breakdown(total, 0.0, 0.0, total, order)


def _bounded_range(account: Account, delta: float, adjacency: str) -> float:
    pools = account.of(BoundedRangeAnswer)
    settings = [(one.scale, one.lower, one.upper, one.num_models, adjacency) for one in pools]
    if len(pools) == 1:
        span = answer_range(*settings[0])
        return bounded_range_epsilon(span, _charged_queries(account, pools[0]), delta)
    costs = [bounded_range_rho(*setting) for setting in settings]
    rho = 0.0
    for pool, cost in zip(pools, costs, strict=True):
        rho = add_up(rho, times_up(_charged_queries(account, pool), cost))
    return adaptive_epsilon(rho, max(costs), delta)


def _charged_queries(account: Account, event: Counted) -> int:
    """Return how many queries are charged: the first one of a plan charges the whole plan."""
    budget: int | None = getattr(event, "budget", None)
    return account.counts[event] if budget is None else budget


def _renyi(account: Account, delta: float, adjacency: str) -> Breakdown:
    rho = 0.0
    for event in account.counts:
        if not isinstance(event, GaussianScreening | RenyiBound | PublicAnswer):
            raise TypeError(f"{type(event).__name__} has no cost here")
    for event in account.of(GaussianScreening):
        cost = screening_rho(event.weight, event.sigma, event.num_models)
        rho = add_up(rho, times_up(account.counts[event], cost))
    if account.renyi is None:  # screenings alone
        return _screenings(rho, delta)
    orders, _ = account.renyi
    mixing = np.zeros((1, len(orders))) if account.losses is None else account.losses.total
    for bound in account.of(RenyiBound):
        cost = times_up(_charged_queries(account, bound), bound.epsilon)
        mixing = array_add_up(mixing, np.full((1, 1), cost))
    screening = np.array([times_up(order, rho) for order in orders])
    spent = array_add_up(mixing, screening)
    if adjacency == "replace_one":
        if account.kind != "fixed":
            raise ValueError(
                "adjacency must be 'zero_out' for a total that is not fixed, got 'replace_one': a "
                "realised loss is about the removal of a member"
            )
        (order,), cost, whole = orders, float(mixing.max()), float(spent.max())
        total = replace_one_epsilon(order, whole, delta)
        once = max(0.0, rdp_to_dp(order, whole, delta) - whole)
        once = min(once, max(0.0, total - whole))
        return Breakdown(cost, whole - cost, once, total, order)
    conversion = _conversions(orders, delta)
    sums = array_add_up(spent, conversion)
    model = int(sums.min(axis=1).argmax())
    column = int(sums[model].argmin())
    return Breakdown(
        mixing=float(mixing[model, column]),
        screening=float(screening[column]),
        conversion=float(conversion[column]),
        total=max(0.0, float(sums[model, column])),
        order=orders[column],
    )


def _screenings(rho: float, delta: float) -> Breakdown:
    """Return ε of Gaussian mechanisms alone, with ρ = Σ Δ²/(2σ²), rounded up.

    They are μ-Gaussian DP together for μ² = Σ Δ²/σ² = 2ρ, exactly (Dong, Roth and Su 2022).
    docs/theory/adapmixed.md has the statement.
    """
    total = gdp_to_dp(up(math.sqrt(up(2 * rho))), delta)
    return Breakdown(0.0, total, 0.0, total)


def _conversions(orders: tuple[float, ...], delta: float) -> NDArray[np.float64]:
    """Return (K,) float64, c_α(δ/K) of K orders; see docs/theory/adapmixed.md.

    The shares of δ are rounded down, so that their sum is at most δ.
    """
    share = delta if len(orders) == 1 else math.nextafter(delta / len(orders), 0.0)
    return np.array([c_alpha(order, share) for order in orders])


def _covered(account: Account) -> int | None:
    """Return the number of queries that are planned, or None if some costs are not planned."""
    priced = [event for event in account.counts if FAMILIES[type(event)]]
    plans = {getattr(event, "budget", None) for event in priced}
    return plans.pop() if len(plans) == 1 and account.losses is None else None
