"""The total of realised Rényi losses and of Rényi bounds: per model and order, or the paper's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.conversions import c_alpha
from adapmixed.privacy.events import LOSS_ABSOLUTE_ERROR, LeaveOneOutLoss, RenyiBound
from adapmixed.privacy.fixed_totals import Result
from adapmixed.privacy.rounding import array_add_up, times_up


@dataclass(frozen=True)
class RenyiTotal:
    """Running totals of one accountant. Immutable: adding gives another one, or a ValueError.

    `mixing` is (N, K) upper bounds per model, or (1, 1) for rule "paper".
    """

    delta: float
    rule: str
    order_weights: tuple[float, ...] | None = None
    orders: tuple[float, ...] = ()
    mixing: NDArray[np.float64] | None = field(default=None, compare=False)
    conversion: NDArray[np.float64] | None = field(default=None, compare=False)
    plan: tuple[int, float] | None = None  # budget and bound per query of a planned RenyiBound
    planned_queries: int = 0  # answered of them
    bounded: bool = False
    realised: bool = False
    published: bool = False

    def add(self, event: LeaveOneOutLoss | RenyiBound) -> RenyiTotal:
        """With one event more."""
        orders = event.orders if isinstance(event, LeaveOneOutLoss) else (event.order,)
        self._check_orders(orders)
        # An event without queries still declares the mechanism: its orders stay fixed even if
        # every answer turns out to be public, since an order chosen by the outcome is not valid.
        changes: dict[str, object] = {"orders": orders}
        if self.conversion is None:
            changes["conversion"] = replace(self, orders=orders).conversion_costs()
        if isinstance(event, RenyiBound):
            charged = event.queries
            if event.budget is not None:
                charged = self._charged(event, event.budget)
                changes["plan"] = (event.budget, event.epsilon)
                changes["planned_queries"] = self.planned_queries + event.queries
            amount = np.full((1, 1), times_up(charged, event.epsilon))
            changes["bounded"] = self.bounded or event.budget is None
            changes["published"] = self.published or event.published
        else:
            amount = _event_totals(event, self.rule)
            changes["realised"] = True
        rows = 1 if self.rule == "paper" else event.num_models
        before = np.zeros((rows, len(orders))) if self.mixing is None else self.mixing
        return replace(self, **changes, mixing=array_add_up(before, amount))  # type: ignore[arg-type]

    def evaluate(self, rho: float) -> Result:
        """max over models of min over orders of E_{i,α} + α rho + c_α(w_α δ).

        docs/privacy.md, section 4 for one order, section 5 for several.
        """
        assert self.mixing is not None and self.conversion is not None
        # Screening costs order times rho at every order.
        screening = np.array([times_up(order, rho) for order in self.orders])
        spent = array_add_up(self.mixing, screening)
        totals = array_add_up(spent, self.conversion)
        model = int(totals.min(axis=1).argmax())
        column = int(totals[model].argmin())
        return Result(
            mixing=float(self.mixing[model, column]),
            screening=float(screening[column]),
            conversion=float(self.conversion[column]),
            total=max(0.0, float(totals[model, column])),
            order=self.orders[column],
        )

    def conversion_costs(self) -> NDArray[np.float64]:
        """(K,) c_α(w_α δ) of the orders; shares of δ are rounded down: they sum to at most δ.

        docs/privacy.md, section 5.
        """
        orders = self.orders
        if len(orders) == 1 and self.order_weights is None:
            return np.array([c_alpha(orders[0], self.delta)])
        uniform = math.nextafter(1 / len(orders), 0.0)
        weights = self.order_weights or (uniform,) * len(orders)
        shares = [
            self.delta if weight == 1 else math.nextafter(weight * self.delta, 0.0)
            for weight in weights
        ]
        return np.array(list(map(c_alpha, orders, shares)))

    @property
    def budget(self) -> int | None:
        """How many queries a planned bound covers; None beside costs that are not planned."""
        return self.plan[0] if self.plan and not self.bounded else None

    def _check_orders(self, orders: tuple[float, ...]) -> None:
        if self.rule == "paper" and len(orders) > 1:
            raise ValueError(f"rule 'paper' allows one order, got orders {orders!r}")
        if self.order_weights is not None and len(self.order_weights) != len(orders):
            raise ValueError(
                f"order_weights must have one weight per order, got {len(self.order_weights)} "
                f"weights for orders {orders!r}"
            )
        if self.orders and self.orders != orders:
            raise ValueError(
                f"orders must be the same in every event, got {orders!r} after {self.orders!r}"
            )

    def _charged(self, event: RenyiBound, budget: int) -> int:
        """How many queries this event pays for: all of the budget at once and nothing later."""
        plan = (budget, event.epsilon)
        if self.plan is not None and self.plan != plan:
            raise ValueError(
                f"budget and epsilon must be the same in every event, got {plan!r} after "
                f"{self.plan!r}"
            )
        answered = self.planned_queries + event.queries
        if answered > budget:
            raise ValueError(
                f"queries must stay within the budget of {budget} that the guarantee was planned "
                f"for, got {answered}"
            )
        return budget if self.plan is None else 0


def _event_totals(event: LeaveOneOutLoss, rule: str) -> NDArray[np.float64]:
    """Σ_t of the inflated losses, rounded up: (N, K), or (1, 1) after max_i for rule "paper"."""
    with np.errstate(over="ignore"):  # overflow to inf is the safe direction
        loss = event.loss * (1 + event.loss_error) + LOSS_ABSOLUTE_ERROR
        if rule == "paper":
            loss = loss.max(axis=0, keepdims=True)
        # Any order of summation of B terms >= 0 errs by at most B units of 2^-53, relatively.
        slack = 1 + (event.queries + 8) * 2.0**-52
        return np.asarray(loss.sum(axis=1) * slack, dtype=np.float64)
