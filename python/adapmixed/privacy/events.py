"""Privacy events: what a mechanism did, as frozen records that the accountant composes.

A mechanism never accounts: it emits events. Every answered query appears in exactly one of the
answering events (`LeaveOneOutLoss`, `RenyiBound`, `ClippedAnswer`, `BoundedRangeAnswer`,
`PublicAnswer`, `UnprotectedAnswer`), and a noisy screening that preceded the answer appears in a
`GaussianScreening` besides. A `Caveat` is no answer: it says what the answers lacked; nor is a
`ReleasedCount`, which was paid before them.

Shapes: N = `num_models`, B = positions (queries) of the event, K = number of Rényi orders.
Errors are `ValueError`s that name the field, its value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.checks import (
    check_adjacency,
    check_box,
    check_clip,
    check_count,
    check_flag,
    check_measure,
    check_order,
    check_real,
)
from adapmixed.privacy.released_count import ReleasedCount

LOSS_ABSOLUTE_ERROR = 1e-12
"""Absolute error that the accountant adds to every realised loss, zeros among them: below it an
operator may answer 0 for a loss that is not."""


def _check_counts(event: RenyiBound | ClippedAnswer | BoundedRangeAnswer) -> None:
    object.__setattr__(event, "num_models", check_count("num_models", event.num_models, 1))
    object.__setattr__(event, "queries", check_count("queries", event.queries, 0))
    if event.budget is not None:
        object.__setattr__(event, "budget", check_count("budget", event.budget, 1))


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
        object.__setattr__(self, "num_models", check_count("num_models", self.num_models, 1))
        object.__setattr__(self, "queries", check_count("queries", self.queries, 0))
        object.__setattr__(self, "weight", check_real("weight", self.weight))
        object.__setattr__(self, "sigma", check_real("sigma", self.sigma))
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
            loss (1 + loss_error) + 1e-12 for each, zeros among them.
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
        # Losses of a narrower type have already lost digits that no loss_error accounts for.
        if not isinstance(self.loss, np.ndarray) or self.loss.dtype != np.float64:
            found = getattr(self.loss, "dtype", type(self.loss).__name__)
            raise ValueError(f"loss must be a float64 numpy array, got {found}")
        if self.loss.ndim != 3 or self.loss.shape[0] < 1 or self.loss.shape[2] != len(orders):
            raise ValueError(
                f"loss must have shape (num_models >= 1, positions, {len(orders)} orders), "
                f"got {self.loss.shape}"
            )
        if np.isnan(self.loss).any() or (self.loss < 0).any():
            raise ValueError("loss must be >= 0 and not NaN in every entry")
        loss = self.loss.copy()
        loss.setflags(write=False)
        object.__setattr__(self, "orders", orders)
        object.__setattr__(self, "loss", loss)
        object.__setattr__(self, "adjacency", check_adjacency(self.adjacency))
        object.__setattr__(self, "loss_error", check_real("loss_error", self.loss_error))

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
    """A Rényi bound `epsilon` at one `order` for each of `queries` queries, fixed beforehand.

    `published=True` marks the numbers of the published data-independent bound of PMixED, which is
    not valid (docs/privacy.md); a guarantee made from them says so. `epsilon` may be +inf.

    `budget`: how many queries the bound was planned for, all charged with the first: when to stop
    may then depend on the answers. None charges every query as it comes, for a fixed number.
    """

    order: float
    epsilon: float
    num_models: int
    queries: int
    adjacency: str
    published: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", check_order(self.order))
        object.__setattr__(self, "epsilon", check_real("epsilon", self.epsilon, infinite=True))
        _check_counts(self)
        object.__setattr__(self, "adjacency", check_adjacency(self.adjacency))
        check_flag("published", self.published)


@dataclass(frozen=True)
class ClippedAnswer:
    """`queries` queries answered by ClippedMixing: the mean of N models clipped to a box around q.

    The guarantee comes from a dominating pair (`clipped_mixing_pair`) composed `budget` times, so
    the box, N and the number of queries are fixed beforehand: the whole budget is charged with the
    first query. Contexts, and when to stop, may depend on the answers.

    Args:
        lower, upper: the nominal box of p̄_i/q, 0 <= lower <= 1 <= upper < inf. Accounted is one
            wider by `BOX_ERROR`.
        num_models: N >= 1.  queries: answered here.
        budget: how many queries the guarantee is for, >= 1. None is recorded, not accounted: the
            accountant refuses it.
    """

    lower: float
    upper: float
    num_models: int
    queries: int
    budget: int | None = None

    def __post_init__(self) -> None:
        low, high = check_box(self.lower, self.upper)
        object.__setattr__(self, "lower", low)
        object.__setattr__(self, "upper", high)
        _check_counts(self)


@dataclass(frozen=True)
class BoundedRangeAnswer:
    """`queries` queries answered by ClippedLogPool: p ∝ q exp((scale/N) Σ_i clip(log p_i/q, a, b)).

    With one slot emptied the log-ratio changes within a range η = scale (b - a)/N: (η²/8)-zCDP
    each. Replace-one has 2η; add/remove, which changes N, too, unless N is a public constant, where
    it has η (docs/privacy.md, section 12).
    Costs add up. scale, a and b may differ between events without a budget if their schedule is
    fixed beforehand, the guarantee's condition; else only a filter gives a guarantee.

    Args:
        scale: κ >= 0, finite.  lower, upper: a <= 0 <= b, finite, in log units.
        num_models: N >= 1.  queries: answered here.
        budget: how many queries the guarantee is for: all charged with the first; settings are then
            the same in every event. None: each as it comes, their number fixed beforehand.
        constant_models: N is a public constant, at least the number of models; else it is that.
    """

    scale: float
    lower: float
    upper: float
    num_models: int
    queries: int
    budget: int | None = None
    constant_models: bool = False

    def __post_init__(self) -> None:
        low, high = check_clip(self.lower, self.upper)
        object.__setattr__(self, "scale", check_real("scale", self.scale))
        check_flag("constant_models", self.constant_models)
        object.__setattr__(self, "lower", low)
        object.__setattr__(self, "upper", high)
        _check_counts(self)


@dataclass(frozen=True, eq=False)
class IndividualCharge:
    """What each model pays for answers under a per-model filter (`PerModelFilter`).

    Args:
        measure: one of `MEASURES`.
        order: the Rényi order > 1 for "renyi", None for "zcdp".
        charge: (N, B) float64, upper bounds >= 0, 0 where a slot answered q. Kept as a read-only
            copy.
    """

    measure: str
    order: float | None
    charge: NDArray[np.float64]

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", check_measure(self.measure, self.order))
        charge = self.charge
        if not isinstance(charge, np.ndarray) or charge.dtype != np.float64 or charge.ndim != 2:
            found = getattr(charge, "dtype", type(charge).__name__)
            raise ValueError(f"charge must be a float64 numpy array (N, B), got {found}")
        if charge.shape[0] < 1 or np.isnan(charge).any() or (charge < 0).any():
            raise ValueError("charge must have N >= 1 rows, >= 0 and not NaN in every entry")
        charge = charge.copy()
        charge.setflags(write=False)
        object.__setattr__(self, "charge", charge)

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
        object.__setattr__(self, "queries", check_count("queries", self.queries, 0))


@dataclass(frozen=True)
class UnprotectedAnswer:
    """`queries` queries answered from private distributions without any protection."""

    queries: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", check_count("queries", self.queries, 0))


CAVEATS = ("seeded", "shards", "positions", "names", "base", "tokenizer")
"""Seeded randomness; shards not known to be disjoint; shards assigned by positions in a file, or
not known by which names; a public model or tokenizer not compared with that of the adapters."""


@dataclass(frozen=True)
class Caveat:
    """What every guarantee takes for granted and the answers of this record did not have, or was
    not checked: costs nothing, and the guarantee says it from then on. One of `CAVEATS`."""

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
    | ReleasedCount
    | PublicAnswer
    | UnprotectedAnswer
    | Caveat
)
"""Any privacy event."""
