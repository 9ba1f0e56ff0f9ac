"""The guarantee that follows from the totals of all charges, as numbers and as a sentence.

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adapmixed.limits import check_number, check_queries, check_question
from adapmixed.privacy.composition import (
    adaptive_epsilon,
    bounded_range_epsilon,
    clipped_mixing_epsilon,
)
from adapmixed.privacy.conversions import (
    add_up,
    c_alpha,
    gdp_to_dp,
    rdp_to_dp,
    replace_one_epsilon,
    times_up,
    up,
)
from adapmixed.privacy.costs import answer_range, bounded_range_rho, screening_rho
from adapmixed.privacy.events import (
    CAVEATS,
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    GaussianScreening,
    PublicAnswer,
    RenyiBound,
)

if TYPE_CHECKING:
    from adapmixed.privacy.accountant import Account

_NEIGHBOURS = {
    "zero_out": "{removed} and its member answers the public distribution (zero-out)",
    "add_remove": "the mean is taken over all members but one (the paper's leave-one-out)",
    "replace_one": "any change of {content} (replace-one)",
}

_BASES = {
    "pld": "privacy loss distribution of a dominating pair",
    "bounded range": "composition of answers whose log-ratio has a bounded range",
    "per-shard budget": "a budget of every {unit} that was fixed beforehand",
    "gaussian": "exact composition of Gaussian mechanisms",
}

WEAK_EPSILON, WEAK_DELTA = 10.0, 1e-3
"""Largest ε and δ that a fixed guarantee states without a warning. Both are conventions."""

_LARGEST = 1400.0  # ε of replace-one; beyond it nothing is stated

_WEAK_EPSILON = (
    "Warning, a weak guarantee: ε above 10 allows one shard to change the probability of an "
    "outcome by the factor e^ε, more than 22 000."
)
_WEAK_DELTA = (
    "Warning, a weak guarantee: δ above 0.001 is met even by a method that reveals a whole shard "
    "with probability δ."
)


@dataclass(frozen=True)
class Guarantee:
    """The privacy guarantee of the accounted answers; `str()` states it in full.

    Attributes:
        epsilon: ε, rounded up; +inf allowed. None if and only if `kind` is "none".
        delta: δ in [0, 1]; 0 for "public" and 1 for "none".
        kind: "public", "fixed", "data-dependent, ex-post" (then `epsilon` is private),
            "published" (the number of an invalid bound) or "none".
        adjacency: neighbours of the statement: "zero_out", "replace_one" or "add_remove" (the
            paper's leave-one-out). None if nothing private was used, or nothing was protected.
        method: how the total is composed: "renyi" (at fixed orders), "pld" (privacy loss
            distributions), "bounded range" (of log-ratios), "gaussian" or "per-shard budget"; None
            in the same cases.
        order: Rényi order that gives `epsilon`; None without one.
        orders: all Rényi orders fixed in advance, over which δ was split.
        queries: number of answered queries.
        public_queries: number of those queries that used public values only.
        budget: for "fixed", number of private answers that the guarantee was planned for. It covers
            them whenever they stop. None if it covers exactly `queries` answers at their settings;
            the sentence then says that number and schedule must have been fixed in advance.
        caveats: names of `CAVEATS`, the assumptions that did not hold or were not checked. The
            sentence names each.
        unit: the protected unit, one whole "shard", or with quotes "'user'" for everything under
            one name of that column. If members hold something else, name that:
            `dataclasses.replace(guarantee, unit="reference text")`.
        replaced: for "fixed" and "zero_out", ε of replace-one at the same δ, rounded up, if the
            composition states it. None: the sentence says what follows from ε and δ.
    """

    epsilon: float | None
    delta: float
    kind: str
    adjacency: str | None = None
    method: str | None = None
    order: float | None = None
    orders: tuple[float, ...] = ()
    queries: int = 0
    public_queries: int = 0
    budget: int | None = None
    caveats: tuple[str, ...] = ()
    unit: str = "shard"
    replaced: float | None = None

    def __post_init__(self) -> None:
        for name in ("epsilon", "replaced"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least=0.0, infinite=True)
        if not isinstance(self.unit, str) or not self.unit.strip():
            raise ValueError(f"unit must be the name of one protected unit, got {self.unit!r}")

    def __str__(self) -> str:
        return " ".join([self._statement(), *self.warnings])

    @property
    def warnings(self) -> list[str]:
        """A sentence if a fixed ε or δ is weak, and one for each caveat.

        They do not depend on private data.
        """
        weak = weak_warnings(self.epsilon or 0.0, self.delta) if self.kind == "fixed" else []
        return weak + [CAVEATS[name] for name in self.caveats]

    @property
    def limited(self) -> bool:
        """False if ε is fixed for each answer, but no plan and no budget limits their sum."""
        return self.kind != "fixed" or self.budget is not None or self.method == "per-shard budget"

    @property
    def neighbours(self) -> str:
        """What differs between neighbours, as a phrase."""
        removed, _, content = self._phrases("the records in one shard")
        return _NEIGHBOURS[self.adjacency or ""].format(removed=removed, content=content)

    def _phrases(self, records: str) -> tuple[str, str, str]:
        """Return phrases: the unit is removed, it as a whole, what changes inside it.

        The last one is `records` if the unit is a shard.
        """
        one = f"one {self.unit}"
        if self.unit[0] in "'\"":
            return f"all text of {one} is removed", f"everything of {one}", f"the records of {one}"
        whole = f"one whole {self.unit}"
        return f"{one} is emptied", whole, records if self.unit == "shard" else one

    def _statement(self) -> str:
        answers, whole = _answered(self.queries), self._phrases("")[1]
        if self.epsilon is None:
            return (
                f"There is no privacy guarantee for the {answers}: at least one was drawn from "
                f"private distributions without protection."
            )
        if self.kind == "public":
            return f"ε = 0, δ = 0 for {whole}: the {answers} used public values only."
        pair = f"ε = {format_epsilon(self.epsilon)} at δ = {float(self.delta)!r}"
        basis = f"{self._basis()}; neighbouring: {self.neighbours}"
        if self.kind == "published":
            return (
                f"{pair} for {whole} over {answers} is the number claimed by the "
                f"published data-independent bound ({basis}). That bound is "
                f"known to be invalid and can understate the loss without limit: no privacy "
                f"guarantee follows from this number."
            )
        if self.kind == "fixed":
            return self._fixed(pair, basis, whole)
        return (
            f"{pair} for {whole} over {answers}, data-dependent and ex-post "
            f"({basis}). This value depends on the private data and must not be "
            f"published; it is not (ε, δ)-DP with a constant ε; it covers the removal of a "
            f"member, not the addition of one."
        )

    def _fixed(self, pair: str, basis: str, whole: str) -> str:
        count, condition = self.queries if self.budget is None else self.budget, ""
        whose, verb = f"Up to {_answered(count)}", "is" if count == 1 else "are"
        if self.method == "per-shard budget":
            whose, verb = f"All answers ({self.queries} so far)", "are"
        elif self.budget is None:
            whose = f"The {_answered(count)}"
            condition = " if the number of queries and the settings of each were fixed, too"
        elif self.public_queries:
            whose += f", not counting {self.public_queries} from public values only,"
        words = (
            f"{whose} {verb} (ε, δ)-differentially private for {whole} with {pair}, "
            f"a guarantee fixed in advance that may be published{condition} ({basis})."
        )
        if self.adjacency == "zero_out":
            words += f" {self.inside()}"
        return words

    def inside(self) -> str:
        """Return the sentence about replace-one that follows from zero-out, rounded up.

        They are `replaced` at the same δ or, without it, (2ε, (1 + e^ε) δ). If that δ reaches 1,
        the latter state nothing, but the mechanism's own bound may.
        """
        change = (
            f"Any change of {self._phrases('the records inside one shard')[2]} (replace-one) is"
        )
        epsilon = self.epsilon or 0.0
        replaced = 2 * epsilon if self.replaced is None else self.replaced
        if max(epsilon, replaced) > _LARGEST:
            return f"{change} not covered by this statement."
        delta = float(self.delta)
        if self.replaced is None:
            passed = (1 + Decimal(epsilon).exp()) * Decimal(repr(delta))
            delta = float(Context(prec=2, rounding=ROUND_CEILING).create_decimal(passed))
            if delta >= 1:
                return (
                    f"{change} not covered by this statement; adjacency='replace_one' states its "
                    "own ε."
                )
        return f"{change} covered with ε = {format_epsilon(replaced)} at δ = {delta!r}."

    def _basis(self) -> str:
        if self.method in _BASES:
            return _BASES[self.method].format(unit=self.unit)
        if self.order is None:
            return "no Rényi order"
        # Only here the distribution's rounding is not charged (docs/theory/numerics.md).
        exact = "for tokens drawn from the exact mixture"
        if len(self.orders) > 1:
            listed = ", ".join(f"{order:g}" for order in self.orders)
            return (
                f"δ split over the Rényi orders {listed} fixed beforehand, {self.order:g} binding, "
                f"{exact}"
            )
        return f"Rényi order {self.order:g} fixed beforehand, {exact}"


def weak_warnings(epsilon: float, delta: float) -> list[str]:
    """Return a sentence for each of ε and δ of a fixed guarantee that is weak."""
    weak = [_WEAK_EPSILON] if epsilon > WEAK_EPSILON else []
    return weak + ([_WEAK_DELTA] if delta > WEAK_DELTA else [])


def _answered(queries: int) -> str:
    return f"{queries} answered {'query' if queries == 1 else 'queries'}"


def format_epsilon(epsilon: float) -> str:
    """Return ε as text with four significant digits, rounded up."""
    if math.isinf(epsilon):
        return "inf"
    rounded = Context(prec=4, rounding=ROUND_CEILING).create_decimal(Decimal(epsilon))
    return f"{rounded.normalize():f}" if epsilon > 1e-6 or epsilon == 0 else f"{rounded:e}"


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
    delta = account.delta if delta is None else delta
    adjacency = check_question(adjacency or account.adjacency)
    kind, queries, public = account.kind, account.queries, account.counts.get(PublicAnswer(0), 0)
    unit = None if account.binding is None else account.binding.unit
    unit = "shard" if unit is None else repr(unit)
    if kind in ("none", "public"):
        epsilon, delta = (None, 1.0) if kind == "none" else (0.0, 0.0)
        return Guarantee(epsilon, delta, kind, queries=queries, public_queries=public, unit=unit)
    parts = parts_of(account, delta, adjacency)
    orders, neighbours = account.renyi or ((), "zero_out")
    plans = {getattr(event, "budget", None) for event in account.counts if event.method}
    replaced, largest = None, getattr(account.budget, "largest", None)
    bounded = account.method == "bounded range" or largest is not None
    if kind == "fixed" and adjacency == "zero_out" and bounded:
        replaced = parts_of(account, delta, "replace_one").total
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
        budget=plans.pop() if len(plans) == 1 else None,
        caveats=tuple(name for name in CAVEATS if Caveat(name) in account.counts),
        unit=unit,
        replaced=replaced,
    )


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
    budget: Any = account.budget  # never None after a charge of individual costs
    if account.method == "per-shard budget":
        total = budget.epsilon(delta, adjacency)
    elif account.method == "pld":
        box = account.of(ClippedAnswer)[0]
        arguments = box.lower, box.upper, box.num_models, box.budget
        total = clipped_mixing_epsilon(*arguments, delta, adjacency)
    elif account.method == "bounded range":
        total = _bounded_range(account, delta, adjacency)
    else:
        return _renyi(account, delta, adjacency)
    return Breakdown(total, 0.0, 0.0, total, getattr(budget, "order", None))


def _bounded_range(account: Account, delta: float, adjacency: str) -> float:
    pools = account.of(BoundedRangeAnswer)
    settings = [(p.scale, p.lower, p.upper, p.num_models, adjacency) for p in pools]
    if len(pools) == 1:
        span = answer_range(*settings[0])
        return bounded_range_epsilon(span, account.charged[pools[0]], delta)
    costs = [bounded_range_rho(*setting) for setting in settings]
    rho = 0.0
    for pool, cost in zip(pools, costs, strict=True):
        rho = float(add_up(rho, times_up(account.charged[pool], cost)))
    return adaptive_epsilon(rho, max(costs), delta)


def _renyi(account: Account, delta: float, adjacency: str) -> Breakdown:
    rho = 0.0
    for event in account.of(GaussianScreening):
        cost = screening_rho(event.weight, event.sigma, event.num_models)
        rho = float(add_up(rho, times_up(account.charged[event], cost)))
    if account.renyi is None:
        # Screenings alone are μ-Gaussian DP together for μ² = Σ Δ²/σ² = 2ρ, exactly (Dong, Roth and
        # Su 2022); see docs/theory/adapmixed.md.
        total = gdp_to_dp(up(math.sqrt(up(2 * rho))), delta)
        return Breakdown(0.0, total, 0.0, total)
    orders, _ = account.renyi
    mixing = np.zeros((1, len(orders))) if account.total is None else account.total
    for bound in account.of(RenyiBound):
        mixing = add_up(mixing, times_up(account.charged[bound], bound.epsilon))
    screening = np.array([times_up(order, rho) for order in orders])
    spent = add_up(mixing, screening)
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
    sums = add_up(spent, conversion)
    model = int(sums.min(axis=1).argmax())
    column = int(sums[model].argmin())
    return Breakdown(
        mixing=float(mixing[model, column]),
        screening=float(screening[column]),
        conversion=float(conversion[column]),
        total=max(0.0, float(sums[model, column])),
        order=orders[column],
    )


def _conversions(orders: tuple[float, ...], delta: float) -> NDArray[np.float64]:
    """Return (K,) float64, c_α(δ/K) of K orders; see docs/theory/adapmixed.md.

    The shares of δ are rounded down, so that their sum is at most δ.
    """
    share = delta if len(orders) == 1 else math.nextafter(delta / len(orders), 0.0)
    return np.array([c_alpha(order, share) for order in orders])


def sum_of(accounts: Sequence[Account], lost: Sequence[Guarantee]) -> tuple[Guarantee, str]:
    """Return the guarantee of all charges of several accounts, and words about it.

    They are composed if that is proved, else added. Of lost accounts the guarantee alone is known.
    """
    nothing = Guarantee(None, 1.0, "none")
    if any(account.kind not in ("fixed", "public") for account in accounts):
        return nothing, "no ε, as a ledger has none that is fixed in advance."
    if any(part.epsilon is None for part in lost):  # ε of replace-one covers zero-out, too
        return nothing, "no sum, until a ledger is back whose ε the register does not have."
    ways = {account.adjacency for account in accounts} | {str(part.adjacency) for part in lost}
    way = ways.pop() if len(ways) == 1 else "zero_out"
    parts = [*(guarantee_of(account, adjacency=way) for account in accounts), *lost]
    epsilons, how = [part.epsilon or 0.0 for part in parts], "their ε and δ added; "
    epsilon, delta = math.fsum(epsilons), float(sum(Decimal(repr(part.delta)) for part in parts))
    if delta >= 1:
        return nothing, "no ε, as the δ of all ledgers add up to 1 or more."
    if math.isfinite(epsilon) and math.fsum([*epsilons, -epsilon]) > 0:  # it was rounded down
        epsilon = math.nextafter(epsilon, math.inf)
    composed = None if lost else _composed(accounts, way)
    if composed is not None and composed < epsilon:
        epsilon, delta, how = composed, accounts[0].delta, "all answers composed; "
    exact = bool(lost) or any(part.method == "renyi" for part in parts)
    how = how * (len(parts) > 1) + "for tokens drawn from the exact mixture; " * exact
    words = f"ε = {format_epsilon(epsilon)} at δ = {delta!r} ({how}{way.replace('_', '-')})."
    units = {part.unit for part in parts}
    unit = units.pop() if len(units) == 1 else "shard"
    return Guarantee(epsilon, delta, "fixed", way, unit=unit), words


def _composed(accounts: Sequence[Account], way: str) -> float | None:
    """Return ε of all answers as those of one account; None if they have no joint total."""
    settings = {(account.delta, account.epsilon) for account in accounts}
    if len(settings) != 1 or accounts[0].epsilon is not None:
        return None
    joint, queries = replace(accounts[0], adjacency=way, counts={}), Counter[Any]()
    charged: list[tuple[Any, int]] = [x for account in accounts for x in account.charged.items()]
    for event, count in charged:
        if event.method:  # the plans' numbers add up
            plan = {"budget": 1 if isinstance(event, ClippedAnswer) else None}
            queries[replace(event, **plan) if hasattr(event, "budget") else event] += count
    try:
        for event, count in queries.items():
            whole = {"budget": count} if isinstance(event, ClippedAnswer) else {}
            joint = joint.added([replace(event, queries=check_queries(count, least=0), **whole)])
    except ValueError:  # of several mechanisms, boxes, orders or N, or too many
        return None
    return parts_of(joint, joint.delta, way).total
