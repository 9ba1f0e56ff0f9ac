"""What an attack found, and how hard it may try."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from adapmixed.rng import SecureRandom, SeededRandom

SLACK = 1e-9
"""Relative, on exact computations: what float64 may add to a ratio of a true loss to its bound."""


@dataclass(frozen=True)
class Finding:
    """One claim beside what one attack measured.

    Attributes:
        audit: which program.
        name: what was attacked, with its settings.
        claim: what the two numbers are.
        claimed: the promise: the true value is at most this.
        measured: what the attack shows: the true value is at least this.
        confidence: of `measured`, 1 for a computation.
        control: a broken variant, which the attack must show to be broken.
        power: what the same attack at the same effort shows where nothing is protected; None: not
            measured. An attack that would not catch even that says nothing of the claim.
    """

    audit: str
    name: str
    claim: str
    claimed: float
    measured: float
    confidence: float
    control: bool = False
    power: float | None = None

    @property
    def verdict(self) -> str:
        """In a word. NaN is on the side of nobody: it breaks a claim, and catches no control."""
        if self.control:
            return "caught" if self.measured > self.claimed else "NOT CAUGHT"
        if not self.measured <= self.claimed:
            return "BROKEN"
        if self.power is not None and not self.power > self.claimed:
            return "no power"
        return "holds"

    @property
    def ok(self) -> bool:
        """A claim that holds against an attack with power, or a control that is caught."""
        return self.verdict in ("holds", "caught")

    @property
    def ratio(self) -> float | None:
        """measured/claimed: near 1, the attack is nearly the strongest; None without a meaning."""
        if not self.claimed > 0 or not math.isfinite(self.measured):
            return None
        return self.measured / self.claimed


@dataclass(frozen=True)
class Effort:
    """How much an audit does: a function of these two numbers, never of the clock.

    Attributes:
        seconds: roughly, for each audit on one core; the work is proportional to it.
        seed: repeatable randomness; None: the operating system's.
    """

    seconds: float = 15.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be > 0 and finite, got {self.seconds}")

    def count(self, per_second: float, least: int) -> int:
        """How many of something that `per_second` of are done in a second."""
        return max(least, round(per_second * self.seconds))

    def source(self, label: str) -> SecureRandom | SeededRandom:
        """What mechanisms draw from."""
        from adapmixed.rng import SecureRandom, SeededRandom

        return SecureRandom() if self.seed is None else SeededRandom(self.seed, f"audit/{label}")

    def generator(self, label: str) -> np.random.Generator:
        """What a search draws from."""
        import numpy as np

        if self.seed is None:
            return np.random.default_rng()
        return np.random.default_rng([self.seed, *label.encode()])
