"""Reserve and charge the tokens of a plan, in the scheduler's process.

Every number here follows from public values: requests, released tokens and the plan.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from adapmixed.errors import BudgetSpentError
from adapmixed.mechanisms import ClippedLogPool, Origin
from adapmixed.privacy import Accountant
from adapmixed.serving.query import ReservedError


@dataclass(frozen=True)
class Grants:
    """The tokens that one step may draw. It travels with vLLM's `SchedulerOutput`.

    Attributes:
        paid: number of queries charged since the step before.
        positions: for each request that draws a token in this step, the number of its tokens
            before it.
        origin: the origin that the charges name.
    """

    paid: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)


class Till:
    """Reserves every request's max_tokens, and charges blocks of tokens before they are drawn.

    What was charged for a request that ends early pays for the next tokens of others. So the
    number of charged queries is at least the number of drawn tokens, and never above the plan.

    Args:
        accountant: charged in this process alone.
        mechanism: how tokens are drawn; it has a plan.
        num_models: N.
        origin: the ensemble.
        block: number of tokens of each request that are charged together.
    """

    def __init__(
        self,
        accountant: Accountant,
        mechanism: ClippedLogPool,
        num_models: int,
        origin: Origin,
        block: int,
    ) -> None:
        bound = num_models, origin.ensemble, origin.active_tokens, origin.unit
        accountant.bind(mechanism, *bound)
        self._accountant, self._mechanism = accountant, mechanism
        self._num_models, self._origin, self._block = num_models, origin, block
        self._reserved: dict[str, int] = {}
        self._spare = 0

    @property
    def spare(self) -> int:
        """Number of queries that are charged and that no token was drawn for."""
        return self._spare

    @property
    def free(self) -> int:
        """Number of tokens that further requests may reserve."""
        assert self._mechanism.queries is not None
        left = self._mechanism.queries - self._accountant.queries
        return left + self._spare - sum(self._reserved.values())

    def reserve(self, request: str, tokens: int) -> None:
        """Reserve the largest number of tokens that a request may draw.

        Raises:
            BudgetSpentError: the plan has fewer left. Nothing is reserved.
            ReservedError: others have reserved them, but may not draw all. Nothing is reserved.
            ValueError: the request has a reservation.
        """
        if request in self._reserved:
            raise ValueError("request must be new: its tokens are reserved already")
        held = sum(self._reserved.values())
        if tokens > self.free + held:
            raise BudgetSpentError(
                f"max_tokens must be at most the {self.free + held} tokens that are left of the "
                f"plan, got {tokens}"
            )
        if tokens > self.free:
            raise ReservedError(f"running answers have reserved {held} tokens")
        self._reserved[request] = tokens

    def close(self, request: str) -> None:
        """Free what a request has reserved and not drawn. To close twice is allowed."""
        self._reserved.pop(request, None)

    def pay(self, drawing: Collection[str]) -> int:
        """Pay for one token of each of these requests; return the number of queries charged.

        At most one charge is made, and it is durable when this returns.

        Args:
            drawing: requests with a reservation, each of which draws one token now.

        Raises:
            ValueError: a request has drawn all tokens that it reserved.
            LedgerError: the charge could not be made durable. No token may be drawn.
        """
        for request in drawing:
            if self._reserved.get(request, 0) < 1:
                raise ValueError("a request draws no more tokens than it has reserved")
        charged = 0
        if len(drawing) > self._spare:
            wanted = sum(min(self._block, self._reserved[request]) for request in drawing)
            charged = wanted - self._spare
            ahead = self._mechanism, self._num_models, charged, self._origin
            self._accountant.charge_ahead(*ahead)
            self._spare += charged
        self._spare -= len(drawing)
        for request in drawing:
            self._reserved[request] -= 1
        return charged
