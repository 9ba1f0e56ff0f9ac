"""The guarantee that an accountant states, as numbers and as a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal

from adapmixed.limits import check_number
from adapmixed.privacy.events import CAVEATS

_NEIGHBOURS = {
    "zero_out": "{removed} and its member answers the public distribution (zero-out)",
    "add_remove": "the mean is taken over all members but one (the paper's leave-one-out)",
    "replace_one": "any change of {content} (replace-one)",
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
        removed = f"one {self.unit} is emptied"
        return _NEIGHBOURS[self.adjacency or ""].format(
            removed=f"all text of one {self.unit} is removed" if self._named else removed,
            content=self._content("the records in one shard"),
        )

    @property
    def _whole(self) -> str:
        """The unit as a phrase."""
        return f"everything of one {self.unit}" if self._named else f"one whole {self.unit}"

    @property
    def _named(self) -> bool:
        return self.unit[0] in "'\""

    def _content(self, shard: str) -> str:
        """Return what changes inside one unit, as a phrase; `shard` says it of a shard."""
        if self.unit == "shard":
            return shard
        return f"the records of one {self.unit}" if self._named else f"one {self.unit}"

    def _statement(self) -> str:
        answers = _answered(self.queries)
        if self.epsilon is None:
            return (
                f"There is no privacy guarantee for the {answers}: at least one was drawn from "
                f"private distributions without protection."
            )
        if self.kind == "public":
            return f"ε = 0, δ = 0 for {self._whole}: the {answers} used public values only."
        pair = f"ε = {format_epsilon(self.epsilon)} at δ = {float(self.delta)!r}"
        basis = f"{self._basis()}; neighbouring: {self.neighbours}"
        if self.kind == "published":
            return (
                f"{pair} for {self._whole} over {answers} is the number claimed by the "
                f"published data-independent bound ({basis}). That bound is "
                f"known to be invalid and can understate the loss without limit: no privacy "
                f"guarantee follows from this number."
            )
        if self.kind == "fixed":
            return self._fixed(pair, basis)
        return (
            f"{pair} for {self._whole} over {answers}, data-dependent and ex-post "
            f"({basis}). This value depends on the private data and must not be "
            f"published; it is not (ε, δ)-DP with a constant ε; it covers the removal of a "
            f"member, not the addition of one."
        )

    def _fixed(self, pair: str, basis: str) -> str:
        condition, verb = "", "are"
        if self.method == "per-shard budget":
            whose = f"All answers ({self.queries} so far)"
        elif self.budget is None:
            whose = f"The {_answered(self.queries)}"
            verb = "is" if self.queries == 1 else "are"
            condition = " if the number of queries and the settings of each were fixed, too"
        else:
            whose = f"Up to {_answered(self.budget)}"
            verb = "is" if self.budget == 1 else "are"
            if self.public_queries:
                whose += f", not counting {self.public_queries} from public values only,"
        words = (
            f"{whose} {verb} (ε, δ)-differentially private for {self._whole} with {pair}, "
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
        content = self._content("the records inside one shard")
        change = f"Any change of {content} (replace-one) is"
        epsilon = self.epsilon or 0.0
        found = 2 * epsilon if self.replaced is None else self.replaced
        if max(epsilon, found) > _LARGEST:
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
        return f"{change} covered with ε = {format_epsilon(found)} at δ = {delta!r}."

    def _basis(self) -> str:
        if self.method == "pld":
            return "privacy loss distribution of a dominating pair"
        if self.method == "bounded range":
            return "composition of answers whose log-ratio has a bounded range"
        if self.method == "per-shard budget":
            return f"a budget of every {self.unit} that was fixed beforehand"
        if self.method == "gaussian":
            return "exact composition of Gaussian mechanisms"
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
