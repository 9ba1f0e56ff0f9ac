"""Privacy events: frozen records of what a mechanism did, which the accountant composes.

A mechanism emits events and does no accounting. Every answered query appears in exactly one of the
answering events: `LeaveOneOutLoss`, `RenyiBound`, `ClippedAnswer`, `BoundedRangeAnswer`,
`IndividualCharge`, `PublicAnswer` or `UnprotectedAnswer`. A noisy screening before the answer
appears in a `GaussianScreening` as well. A `Caveat` names an assumption that was not met, and the
`Binding` whose answers these are.

Shapes: N = `num_models`, B = queries of the event, K = number of Rényi orders. An event with a bad
field raises a ValueError that names the field, its value and what is allowed.

As JSON, in ledgers and states, events and other dataclasses give back every bit: numbers keep the
digits that give the same float64 again, infinity is the string "inf", and arrays are base64 of
little-endian float64. The declared type of a field decides how it is read.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from adapmixed.limits import (
    NEIGHBOURS,
    active_tokens,
    check_box,
    check_clip,
    check_count,
    check_flag,
    check_models,
    check_number,
    check_option,
    check_optional_queries,
    check_queries,
    check_scale,
    check_sigma,
)

CAVEATS = {
    "seeded": "The randomness was seeded: there is no privacy guarantee against anyone who knows "
    "or guesses the seed. If two sources were made from it, there is none against anyone.",
    "shards": "Disjointness of the shards was not verified: records that lie in several of them, "
    "or that an edit of other records can move, are not covered.",
    "positions": "Documents were named by positions in a file: an edit of their number or order "
    "can rename all later ones, and is not covered.",
    "names": "It was not recorded how documents were named: if by positions in a file, an edit "
    "of their number or order can rename all later ones, and is not covered.",
    "base": "The public model was not compared with the one that the adapters were trained on.",
}
"""Assumptions that may not hold, and what a guarantee then says."""


@dataclass(frozen=True)
class Event:
    """Any privacy event.

    Attributes:
        method: how it is composed to a total, as `Guarantee.method`; None for one that fits any.
    """

    method: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.name in _CHECKS:
                _set(self, **{entry.name: _CHECKS[entry.name](getattr(self, entry.name))})


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "num_models": check_models,
    "queries": partial(check_count, "queries", minimum=0),
    "budget": partial(check_optional_queries, name="budget"),
    "weight": partial(check_number, "weight", least=0.0, most=1.0),
    "sigma": check_sigma,
    "epsilon": partial(check_number, "epsilon", least=0.0, infinite=True),
    "published": partial(check_flag, "published"),
}
"""What a field of this name must be in every event."""


@dataclass(frozen=True)
class GaussianScreening(Event):
    """Noisy screening of `queries` queries, which is paid for whatever its outcome.

    Algorithm 1, lines 1-8: Gaussian noise N(0, sigma²) is added to
    mean_i(weight p_i + (1 - weight) q) on a support that q chooses, *before* re-scaling. The L2
    sensitivity is √2 weight / num_models. So one query costs α (weight / (num_models sigma))² at
    every Rényi order α (the paper's theorem on noisy screening).

    Attributes:
        num_models: N ≥ 1.
        queries: number of screened queries, ≥ 0.
        weight: λ_s in [0, 1].
        sigma: standard deviation of the noise, >= 1e-6.
    """

    method: ClassVar[str] = "renyi"

    num_models: int
    queries: int
    weight: float
    sigma: float


@dataclass(frozen=True)
class LeaveOneOutLoss(Event):
    """Realised losses D↔_α(p ‖ p') of every model at every answered query.

    Two are equal if their orders and neighbours are, whatever the losses.

    Attributes:
        orders: K distinct Rényi orders α, each > 1 and finite, fixed before the first query.
        loss: (N, B, K) float64, upper bounds, ≥ 0, +inf allowed, never NaN. Kept as a read-only
            copy.
        adjacency: "add_remove" (p' = p_{-i}) or "zero_out" (p' = p - (p̄_i - q)/N).
    """

    method: ClassVar[str] = "renyi"

    orders: tuple[float, ...]
    loss: NDArray[np.float64] = field(compare=False)
    adjacency: str

    def __post_init__(self) -> None:
        if not isinstance(self.orders, Iterable) or isinstance(self.orders, str):
            raise ValueError(f"orders must be a sequence of Rényi orders, got {self.orders!r}")
        orders = tuple(check_number("orders", order, above=1.0) for order in self.orders)
        if not orders or len(set(orders)) != len(orders):
            raise ValueError(f"orders must be one or more distinct Rényi orders, got {orders!r}")
        _set(self, orders=orders, loss=checked_array("loss", self.loss, len(orders)))
        check_models(self.num_models)
        check_option("adjacency", self.adjacency, NEIGHBOURS)

    @property
    def num_models(self) -> int:
        """N, the number of models whose losses are recorded."""
        return int(self.loss.shape[0])

    @property
    def queries(self) -> int:
        """B, the number of queries answered."""
        return int(self.loss.shape[1])


@dataclass(frozen=True)
class RenyiBound(Event):
    """A fixed Rényi bound on the loss of each of `queries` queries.

    Attributes:
        order: Rényi order α > 1.
        epsilon: bound on D↔_α of one query under zero-out, fixed in advance; +inf allowed.
        num_models: N ≥ 1.
        queries: number of queries answered here, ≥ 0.
        published: True for a number of the published data-independent bound of PMixED. That bound
            is not valid (docs/theory/errata.md), and a guarantee made from it says so.
        budget: number of queries that the bound was planned for. The first query charges all of
            them, so the decision to stop may depend on the answers. None charges every query as it
            comes; their number must then be fixed in advance.
    """

    method: ClassVar[str] = "renyi"

    order: float
    epsilon: float
    num_models: int
    queries: int
    published: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, order=check_number("order", self.order, above=1.0))

    @property
    def orders(self) -> tuple[float, ...]:
        """The Rényi order, as of `LeaveOneOutLoss`."""
        return (self.order,)

    @property
    def adjacency(self) -> str:
        """Neighbours of the bound."""
        return "add_remove" if self.published else "zero_out"


@dataclass(frozen=True)
class ClippedAnswer(Event):
    """Queries answered by ClippedMixing, the mean of N models clipped to a box around q.

    The guarantee composes a dominating pair (`clipped_mixing_pair`) `budget` times. So the box, N
    and the number of queries are fixed in advance, and the first query charges the whole budget.
    The contexts and the decision to stop may depend on the answers.

    Attributes:
        lower: c of the nominal box of p̄_i/q, a ratio in [0, 1]. The accounted box is wider by
            `BOX_ERROR`.
        upper: C of the nominal box, ≥ 1 and finite.
        num_models: N ≥ 1.
        queries: number of queries answered here, ≥ 0.
        budget: number of queries that the guarantee is for, in [1, 2^40].
    """

    method: ClassVar[str] = "pld"

    lower: float
    upper: float
    num_models: int
    queries: int
    budget: int

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = check_box(self.lower, self.upper)
        _set(self, lower=low, upper=high, budget=check_queries(self.budget, "budget"))


@dataclass(frozen=True)
class BoundedRangeAnswer(Event):
    """Queries answered by ClippedLogPool, p ∝ q exp((scale/N) Σ_i clip(log p_i/q, a, b)).

    To empty one shard changes log p within a range of η = scale (b - a)/N, for replace-one within
    2η (docs/theory/clipped-log-pool.md). docs/theory/bounded-range.md composes the ranges.
    Events without a budget may have different settings if their schedule is fixed in advance.

    Attributes:
        scale: κ ≥ 0, finite.
        lower: a ≤ 0, finite, a log-ratio.
        upper: b ≥ 0, finite, a log-ratio.
        num_models: N ≥ 1, a public constant.
        queries: number of queries answered here, ≥ 0.
        budget: number of queries that the guarantee is for. The first query charges all of them,
            and all events must have the same settings. None charges every query as it comes; their
            number must then be fixed in advance.
    """

    method: ClassVar[str] = "bounded range"

    scale: float
    lower: float
    upper: float
    num_models: int
    queries: int
    budget: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = check_clip(self.lower, self.upper)
        _set(self, scale=check_scale(self.scale, low, high), lower=low, upper=high)


@dataclass(frozen=True)
class IndividualCharge(Event):
    """The charge of each member for answers under per-shard budgets.

    Two are equal if their orders are, whatever the charges.

    Attributes:
        order: Rényi order > 1 if charges are D↔_order, None if they are ρ of zCDP.
        charge: (N, B) float64, upper bounds ≥ 0; 0 if the member answered the public distribution.
            Kept as a read-only copy.
    """

    method: ClassVar[str] = "per-shard budget"

    order: float | None
    charge: NDArray[np.float64] = field(compare=False)

    def __post_init__(self) -> None:
        if self.order is not None:
            _set(self, order=check_number("order", self.order, above=1.0))
        _set(self, charge=checked_array("charge", self.charge))
        check_models(self.num_models)

    @property
    def num_models(self) -> int:
        """N, the number of models."""
        return int(self.charge.shape[0])

    @property
    def queries(self) -> int:
        """B, the number of queries answered."""
        return int(self.charge.shape[1])


@dataclass(frozen=True)
class PublicAnswer(Event):
    """Queries answered from public values only, which cost nothing.

    Attributes:
        queries: number of queries, ≥ 0.
    """

    queries: int


@dataclass(frozen=True)
class UnprotectedAnswer(Event):
    """Queries answered from private distributions without any protection.

    Attributes:
        queries: number of queries, ≥ 0.
    """

    queries: int


@dataclass(frozen=True)
class Caveat(Event):
    """An assumption of every guarantee that is not known to hold for these answers.

    It costs nothing, and every later guarantee names it.

    Attributes:
        name: one of `CAVEATS`.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in CAVEATS:
            raise ValueError(f"name must be one of {(*CAVEATS,)}, got {self.name!r}")


@dataclass(frozen=True)
class Binding(Event):
    """The mechanism and ensemble whose charges add up to one total. It costs nothing.

    Attributes:
        mechanism: the mechanism's `repr`.
        num_models: N.
        order: Rényi order of the individual charges; None without one.
        largest: largest individual charge of one answer, if answers have a bounded range.
        ensemble: the ensemble's fingerprint; None for logits made by hand.
        active_tokens: K of the active vocabulary; None if members speak about all tokens.
        unit: the column whose every name has a member of its own; None if shards are protected.
    """

    mechanism: str
    num_models: int
    order: float | None
    largest: float | None
    ensemble: str | None
    active_tokens: int | None
    unit: str | None = None


@dataclass(frozen=True)
class Origin:
    """The ensemble that rows come from, and the tokens about which its members speak.

    Attributes:
        ensemble: fingerprint of the ensemble; None if it is not known.
        caveats: names of assumptions that were not verified. Every guarantee names them.
        active_tokens: K of the active vocabulary; None if members speak about all tokens.
        unit: the column whose every name has a member of its own; None if shards are protected.
    """

    ensemble: str | None = None
    caveats: tuple[str, ...] = ("shards", "base")
    active_tokens: int | None = None
    unit: str | None = None

    @staticmethod
    def of(ensemble: Any, active: int | None) -> Origin:
        """Return the origin of an `Ensemble`'s rows with this active vocabulary."""
        speaking = active_tokens(active, ensemble.vocab_size)
        return Origin(ensemble.fingerprint, ensemble.unverified, speaking, ensemble.unit)

    def caveats_of(self, seeded: bool) -> tuple[Caveat, ...]:
        """Return the caveats of answers to these rows, with seeded randomness or not."""
        names = ("seeded", *self.caveats) if seeded else self.caveats
        return tuple(Caveat(name) for name in names)


BY_HAND = Origin()
"""Origin of logits whose ensemble is not known."""


def setting_of(event: Any) -> tuple[Event, int]:
    """Return an event of no query, which is the key of its sums, and its number of queries."""
    if isinstance(event, LeaveOneOutLoss):
        return replace(event, loss=event.loss[:, :0]), event.queries
    if isinstance(event, IndividualCharge):
        return replace(event, charge=event.charge[:, :0]), event.queries
    if isinstance(event, Caveat | Binding):
        return event, 0
    return replace(event, queries=0), event.queries


Pay = Callable[[Sequence[Event], NDArray[np.float64] | None], NDArray[np.bool_] | None]
"""A function that charges the events of an answer, or under budgets the (N, B) charges of its
members. It returns which members were charged, (N, B) bool; None for the whole ensemble."""


def checked_array(name: str, values: Any, *orders: int) -> NDArray[np.float64]:
    """Return a read-only copy of a float64 array of upper bounds, (N, B, *orders).

    Args:
        name: name of the argument, for messages.
        values: float64 numpy array.
        orders: K, if the array has orders.

    Raises:
        ValueError: the type or shape is another one, or an entry is NaN or below 0.
    """
    # A narrower type has already lost digits that no error bound covers.
    if not isinstance(values, np.ndarray) or values.dtype != np.float64:
        kind = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{name} must be a float64 numpy array, got {kind}")
    if values.ndim != 2 + len(orders) or values.shape[2:] != orders or len(values) < 1:
        wanted = ", ".join(["N, B", *map(str, orders)])
        raise ValueError(f"{name} must have shape ({wanted}), N >= 1, got {values.shape}")
    if np.isnan(values).any() or (values < 0).any():
        raise ValueError(f"{name} must be >= 0 and not NaN in every entry")
    kept: NDArray[np.float64] = values.copy()
    kept.setflags(write=False)
    return kept


def _set(event: object, **fields: object) -> None:
    for name, value in fields.items():
        object.__setattr__(event, name, value)


# Events and other dataclasses as JSON

T = TypeVar("T")

EVENTS: dict[str, type] = {kind.__name__: kind for kind in Event.__subclasses__()}
"""Classes of events by their names."""


def to_json(value: Any) -> Any:
    """Return a dataclass, an accountant, an array, or a number or several as a JSON value.

    An event has its class name under "event".
    """
    if is_dataclass(value):
        name = type(value).__name__
        head = {"event": name} if EVENTS.get(name) is type(value) else {}
        return head | {entry.name: to_json(getattr(value, entry.name)) for entry in fields(value)}
    if hasattr(value, "state"):
        return value.state()
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, dtype="<f8").tobytes()
        return {"shape": list(value.shape), "data": base64.b64encode(data).decode("ascii")}
    if isinstance(value, Mapping):
        return [[to_json(key), to_json(item)] for key, item in value.items()]
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return "inf" if value == math.inf else value


def canonical(value: Any) -> str:
    """Return JSON text without spaces, in ASCII; raise ValueError for NaN and infinities."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def exactly(kind: type, value: Any) -> Any:
    """Return the value if it is of exactly this type, so that True is not an integer."""
    if type(value) is not kind:
        raise ValueError(f"must be {kind.__name__}, got {value!r}")
    return value


def check_keys(name: str, written: Any, keys: Iterable[str]) -> dict[str, Any]:
    """Return the object if it has these keys and no others; raise ValueError otherwise."""
    if set(exactly(dict, written)) != set(keys):
        raise ValueError(f"{name} must have {', '.join(keys)}, got {', '.join(written)}")
    return dict(written)


def _real(value: Any) -> float:
    if value == "inf":
        return math.inf
    return check_number("number", exactly(float, value))


def _array(written: Any) -> NDArray[np.float64]:
    check_keys("array", written, {"shape", "data"})
    values = np.frombuffer(base64.b64decode(written["data"], validate=True), dtype="<f8")
    shape = [exactly(int, length) for length in written["shape"]]
    if min(shape, default=0) < 0 or math.prod(shape) != len(values):
        raise ValueError(f"must hold {shape} numbers, got {len(values)}")
    return values.astype(np.float64).reshape(shape)


READERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: partial(exactly, kind) for kind in (int, str, bool)},
    "float": _real,
    "tuple[float, ...]": lambda written: tuple(map(_real, exactly(list, written))),
    "NDArray[np.float64]": _array,
    "Mapping[Event, int]": lambda written: {
        read_event(event): check_count("queries", queries, 0) for event, queries in written
    },
}
"""How a field of a declared type is read. Other modules add their own."""


def from_json(kind: type[T], written: Any) -> T:
    """Return the object of this class that `to_json` has written.

    Raises:
        ValueError: a field is missing, unknown, of another type, or not valid for the class.
    """
    types = {entry.name: str(entry.type) for entry in fields(kind)}  # type: ignore[arg-type]
    values = check_keys(kind.__name__, written, types)
    for name, declared in types.items():
        if values[name] is not None or not declared.endswith(" | None"):
            try:
                values[name] = READERS[declared.removesuffix(" | None")](values[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} {error}") from error
    return kind(**values)


def read_event(written: Any) -> Event:
    """Return the event that `to_json` has written.

    Raises:
        ValueError: the event is unknown, so it cannot be charged, or a field is not valid.
    """
    values = dict(exactly(dict, written))
    name = values.pop("event", None)
    if name not in EVENTS:
        raise ValueError(f"event must be one of {', '.join(EVENTS)}, got {name!r}")
    event: Event = from_json(EVENTS[name], values)
    return event
