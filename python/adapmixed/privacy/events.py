"""Privacy events: what a mechanism did, as frozen records that the accountant composes.

A mechanism never accounts: it emits events. Every answered query appears in exactly one of the
answering events (`LeaveOneOutLoss`, `RenyiBound`, `ClippedAnswer`, `BoundedRangeAnswer`,
`IndividualCharge`, `PublicAnswer`, `UnprotectedAnswer`). A noisy screening before the answer
appears in a `GaussianScreening` besides. A `Caveat` is no answer: it says what the answers lacked.

Shapes: N = `num_models`, B = queries of the event, K = number of Rényi orders.
Errors are ValueErrors that name the field, its value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.checks import (
    check_box,
    check_clip,
    check_count,
    check_flag,
    check_measure,
    check_neighbours,
    check_optional_count,
    check_order,
    check_real,
)

LOSS_ABSOLUTE_ERROR = 1e-12
"""Absolute error that is added to every realised loss, zeros included: below it an operator may
answer 0 for a loss that is not."""

CAVEATS = ("seeded", "shards", "positions", "names", "base", "tokenizer")
"""Seeded randomness; shards not known to be disjoint; shards assigned by positions in a file, or
by names that were not recorded; a public model or tokenizer that was not compared with that of the
adapters."""


@dataclass(frozen=True)
class GaussianScreening:
    """Noisy screening of `queries` queries (Algorithm 1, lines 1-8), paid whatever the outcome.

    Gaussian noise N(0, sigma²) is added to mean_i(weight p_i + (1 - weight) q) on a support chosen
    by q, *before* re-scaling: L2 sensitivity √2 weight / num_models, hence a Rényi cost of
    order (weight / (num_models sigma))² per query at every order.
    """

    num_models: int
    queries: int
    weight: float
    sigma: float

    def __post_init__(self) -> None:
        _set(self, num_models=check_count("num_models", self.num_models))
        _set(self, queries=check_count("queries", self.queries, 0))
        _set(self, weight=check_real("weight", self.weight), sigma=check_real("sigma", self.sigma))
        if self.weight > 1:
            raise ValueError(f"weight must be in [0, 1], got {self.weight!r}")
        if self.sigma == 0:
            raise ValueError("sigma must be > 0, got 0.0")


@dataclass(frozen=True, eq=False)
class LeaveOneOutLoss:
    """Realised losses D↔_order(p ‖ p') of every model at every answered query.

    Args:
        orders: K distinct Rényi orders, each > 1 and finite, fixed before the first query.
        loss: (N, B, K) float64, >= 0, +inf allowed, never NaN. Kept as a read-only copy.
        adjacency: "add_remove" (p' = p_{-i}) or "zero_out" (p' = p - (p̄_i - q)/N).
        loss_error: relative error bound of `loss`. The accountant charges
            loss (1 + loss_error) + 1e-12 for each, zeros included.
    """

    orders: tuple[float, ...]
    loss: NDArray[np.float64]
    adjacency: str
    loss_error: float

    def __post_init__(self) -> None:
        if not isinstance(self.orders, Iterable) or isinstance(self.orders, str):
            raise ValueError(f"orders must be a sequence of Rényi orders, got {self.orders!r}")
        orders = tuple(check_order(order, "orders") for order in self.orders)
        if not orders or len(set(orders)) != len(orders):
            raise ValueError(f"orders must be one or more distinct Rényi orders, got {orders!r}")
        shape = (None, None, len(orders))
        _set(self, orders=orders, loss=checked_array("loss", self.loss, shape))
        _set(self, adjacency=check_neighbours(self.adjacency))
        _set(self, loss_error=check_real("loss_error", self.loss_error))

    @property
    def num_models(self) -> int:
        """N, the number of models whose loss is recorded."""
        return int(self.loss.shape[0])

    @property
    def queries(self) -> int:
        """B, the number of queries answered."""
        return int(self.loss.shape[1])


@dataclass(frozen=True)
class RenyiBound:
    """A zero-out Rényi bound `epsilon` at one `order` for each of `queries` queries.

    The bound is fixed beforehand and may be +inf. `published=True` marks a number of the published
    data-independent bound of PMixED, which is not valid (docs/privacy.md); a guarantee made from it
    says so.

    `budget`: how many queries the bound was planned for, all charged with the first: when to stop
    may then depend on the answers. None charges every query as it comes, for a fixed number.
    """

    order: float
    epsilon: float
    num_models: int
    queries: int
    published: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        _set(self, order=check_order(self.order))
        _set(self, epsilon=check_real("epsilon", self.epsilon, infinite=True))
        check_flag("published", self.published)
        _check_counts(self)


@dataclass(frozen=True)
class ClippedAnswer:
    """`queries` queries answered by ClippedMixing: the mean of N models clipped to a box around q.

    The guarantee composes a dominating pair (`clipped_mixing_pair`) `budget` times. The box, N and
    the number of queries are therefore fixed beforehand, and the whole budget is charged with the
    first query. Contexts, and when to stop, may depend on the answers.

    Args:
        lower, upper: the nominal box of p̄_i/q, 0 <= lower <= 1 <= upper < inf. The accounted box
            is wider by `BOX_ERROR`.
        num_models: N >= 1.  queries: answered here.
        budget: how many queries the guarantee is for, >= 1.
    """

    lower: float
    upper: float
    num_models: int
    queries: int
    budget: int

    def __post_init__(self) -> None:
        low, high = check_box(self.lower, self.upper)
        _set(self, lower=low, upper=high, budget=check_count("budget", self.budget))
        _check_counts(self)


@dataclass(frozen=True)
class BoundedRangeAnswer:
    """`queries` queries answered by ClippedLogPool: p ∝ q exp((scale/N) Σ_i clip(log p_i/q, a, b)).

    Emptying one shard changes the log-ratio within a range η = scale (b - a)/N: (η²/8)-zCDP each.
    Replace-one has 2η (docs/privacy.md, section 12). Costs add up. Settings may differ between
    events without a budget if their schedule is fixed beforehand.

    Args:
        scale: κ >= 0, finite.  lower, upper: a <= 0 <= b, finite, in log units.
        num_models: N >= 1, a public constant.  queries: answered here.
        budget: how many queries the guarantee is for, all charged with the first; settings are then
            the same in every event. None: each is charged as it comes, their number being fixed
            beforehand.
    """

    scale: float
    lower: float
    upper: float
    num_models: int
    queries: int
    budget: int | None = None

    def __post_init__(self) -> None:
        low, high = check_clip(self.lower, self.upper)
        _set(self, scale=check_real("scale", self.scale), lower=low, upper=high)
        _check_counts(self)


@dataclass(frozen=True, eq=False)
class IndividualCharge:
    """What each model pays for answers under a per-shard budget.

    Args:
        measure: "renyi" or "zcdp".
        order: the Rényi order > 1 for "renyi", None for "zcdp".
        charge: (N, B) float64, upper bounds >= 0, 0 if a member answered q. Kept as a read-only
            copy.
    """

    measure: str
    order: float | None
    charge: NDArray[np.float64]

    def __post_init__(self) -> None:
        _set(self, order=check_measure(self.measure, self.order))
        _set(self, charge=checked_array("charge", self.charge, (None, None)))

    @property
    def num_models(self) -> int:
        """N."""
        return int(self.charge.shape[0])

    @property
    def queries(self) -> int:
        """B, the number of queries answered."""
        return int(self.charge.shape[1])


@dataclass(frozen=True)
class PublicAnswer:
    """`queries` queries answered from public values only: they cost nothing."""

    queries: int

    def __post_init__(self) -> None:
        _set(self, queries=check_count("queries", self.queries, 0))


@dataclass(frozen=True)
class UnprotectedAnswer:
    """`queries` queries answered from private distributions without any protection."""

    queries: int

    def __post_init__(self) -> None:
        _set(self, queries=check_count("queries", self.queries, 0))


@dataclass(frozen=True)
class Caveat:
    """What every guarantee takes for granted and these answers did not have: one of `CAVEATS`.

    It costs nothing; the guarantee says it from then on.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in CAVEATS:
            raise ValueError(f"name must be one of {CAVEATS}, got {self.name!r}")


Event = (
    GaussianScreening
    | LeaveOneOutLoss
    | RenyiBound
    | ClippedAnswer
    | BoundedRangeAnswer
    | IndividualCharge
    | PublicAnswer
    | UnprotectedAnswer
    | Caveat
)
"""Any privacy event."""


def checked_array(name: str, values: Any, shape: tuple[int | None, ...]) -> NDArray[np.float64]:
    """Return a read-only copy of a float64 array of upper bounds.

    Args:
        shape: the lengths, None for any; the first is at least 1.

    Raises:
        ValueError: another type or shape, or an entry that is NaN or below 0.
    """
    # Values of a narrower type have already lost digits that no error bound accounts for.
    if not isinstance(values, np.ndarray) or values.dtype != np.float64:
        found = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{name} must be a float64 numpy array, got {found}")
    fits = values.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, values.shape, strict=True)
    )
    if not fits or values.shape[0] < 1:
        wanted = ", ".join("any" if one is None else str(one) for one in shape)
        raise ValueError(f"{name} must have shape ({wanted}), N >= 1, got {values.shape}")
    if np.isnan(values).any() or (values < 0).any():
        raise ValueError(f"{name} must be >= 0 and not NaN in every entry")
    kept: NDArray[np.float64] = values.copy()
    kept.setflags(write=False)
    return kept


def _check_counts(event: RenyiBound | ClippedAnswer | BoundedRangeAnswer) -> None:
    _set(event, num_models=check_count("num_models", event.num_models))
    _set(event, queries=check_count("queries", event.queries, 0))
    _set(event, budget=check_optional_count("budget", event.budget))


def _set(event: object, **fields: object) -> None:
    for name, value in fields.items():
        object.__setattr__(event, name, value)
