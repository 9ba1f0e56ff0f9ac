"""The one charge of a proposal, which must come before its release.

`adapmixed.privacy.costs` has the cost of an answer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy import Caveat, Event, IndividualCharge

_PROPOSED, _BEGUN, _SETTLED = "proposed", "being charged", "charged"
_FAILED = "not charged (its charge failed)"


class Charge:
    """The one charge of a proposal, which `Proposal._begin` gives to the accountant once.

    It ends with :meth:`settle` or :meth:`fail`. Its values are private.

    Args:
        events: costs of the answer if all members contribute.
        caveats: assumptions that the guarantee must name.
        individual: (N, B) float64, upper bounds of what each shard pays; None without such charges.
        measure: unit of `individual`, ("zcdp", None) or ("renyi", order); None without it.
    """

    def __init__(
        self,
        events: Sequence[Event],
        caveats: Sequence[Caveat],
        individual: NDArray[np.float64] | None,
        measure: tuple[str, float | None] | None,
    ) -> None:
        self._events, self._caveats = events, caveats
        self._individual, self._measure = individual, measure
        self._state, self._lock = _PROPOSED, threading.Lock()
        self._active: NDArray[np.bool_] | None = None

    def begin(self) -> None:
        """Begin the charge.

        Raises:
            ValueError: it was begun before.
        """
        self._advance(_PROPOSED, _BEGUN)

    def individual_charges(self) -> NDArray[np.float64]:
        """Return (N, B) float64, upper bounds of what each shard pays if its member contributes."""
        assert self._individual is not None  # the accountant has checked the mechanism
        return self._individual.copy()

    def events(self, active: NDArray[np.bool_] | None) -> Sequence[Event]:
        """Return the costs of the answer.

        Args:
            active: (N, B) bool, members that contribute and pay their own charges; None if the
                whole ensemble is charged.
        """
        if active is None:
            return [*self._events, *self._caveats]
        assert self._measure is not None  # the accountant has checked the mechanism
        paid = np.where(active, self.individual_charges(), 0.0)
        return [IndividualCharge(*self._measure, paid), *self._caveats]

    def settle(self, active: NDArray[np.bool_] | None) -> None:
        """Allow the release of an answer to which these members contribute.

        Args:
            active: (N, B) bool, as in :meth:`events`.

        Raises:
            ValueError: the charge was not begun, or has ended.
        """
        self._advance(_BEGUN, _SETTLED, None if active is None else np.array(active))

    def fail(self) -> None:
        """Forbid the release forever.

        Raises:
            ValueError: the charge was not begun, or has ended.
        """
        self._advance(_BEGUN, _FAILED)

    def settled(self) -> NDArray[np.bool_] | None:
        """Return the members that contribute, (N, B) bool; None for the whole ensemble.

        Raises:
            ValueError: the charge is not settled.
        """
        if self._state != _SETTLED:
            raise ValueError(
                f"proposal must be charged before its release (Accountant.charge), it is "
                f"{self._state}"
            )
        return self._active

    def _advance(self, before: str, after: str, active: NDArray[np.bool_] | None = None) -> None:
        with self._lock:
            if self._state != before:
                raise ValueError(
                    f"proposal must be charged once, got one that is {self._state}: propose again"
                )
            self._active, self._state = active, after
