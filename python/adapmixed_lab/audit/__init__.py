"""Attacks on every privacy claim; docs/how-to/audit.md says what a pass means.

``run(names, effort)`` runs them, and only then imports heavy packages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from adapmixed.rng import SecureRandom, SeededRandom

AUDITS = {
    "tokens": "tell two neighbouring ensembles apart by drawn tokens",
    "bounds": "search for ensembles that lose more than their bound",
    "screening": "tell two neighbouring ensembles apart by the screening bit",
    "sampler": "check the distribution of drawn tokens, forks and replays",
    "budgets": "enumerate adaptive trees under a budget of every shard",
    "adversary": "play the worst adaptive adversary against the log pool's many answers",
    "odometer": "enumerate adaptive trees under AdaPMixED's running ε(D)",
    "canaries": "plant secrets in training text: one-run audit and exposure",
    "synthesis": "enumerate all texts of batches with and without a planted record",
}

SLACK = 1e-9
"""Relative rounding error that float64 may add to a computed ratio of true loss to bound."""


@dataclass(frozen=True)
class Finding:
    """One claim and what one attack measured.

    Attributes:
        audit: name of the audit.
        name: what was attacked, with its settings.
        claim: the meaning of the two numbers.
        claimed: the promise: the true value is at most this.
        measured: the result of the attack: the true value is at least this.
        confidence: of `measured`; 1 for a computation.
        control: whether this is a deliberately broken variant, which the attack must catch.
    """

    audit: str
    name: str
    claim: str
    claimed: float
    measured: float
    confidence: float
    control: bool = False

    @property
    def verdict(self) -> str:
        """One word for the result; NaN breaks a claim and catches no control."""
        if self.control:
            return "caught" if self.measured > self.claimed else "NOT CAUGHT"
        return "holds" if self.measured <= self.claimed else "BROKEN"

    @property
    def ok(self) -> bool:
        """Whether a claim holds, or a control is caught."""
        return self.verdict in ("holds", "caught")

    @property
    def ratio(self) -> float | None:
        """measured/claimed, near 1 for an attack of nearly full strength; None if undefined."""
        if not self.claimed > 0 or not math.isfinite(self.measured):
            return None
        return self.measured / self.claimed


@dataclass(frozen=True)
class Effort:
    """The effort of an audit, which depends on these two numbers and never on the clock.

    Attributes:
        seconds: rough time of each audit on one core; the work is proportional to it.
        seed: makes attacks and draws repeatable; None: randomness of the operating system.
    """

    seconds: float = 15.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be > 0 and finite, got {self.seconds}")

    def count(self, per_second: float, least: int) -> int:
        """Return the number of steps at `per_second` steps a second, but no fewer than `least`."""
        return max(least, round(per_second * self.seconds))

    def source(self, label: str) -> SecureRandom | SeededRandom:
        """Return the random source that mechanisms draw from."""
        from adapmixed.rng import SecureRandom, SeededRandom

        return SecureRandom() if self.seed is None else SeededRandom(self.seed, f"audit/{label}")

    def generator(self, label: str) -> np.random.Generator:
        """Return the generator that a search draws from."""
        import numpy as np

        if self.seed is None:
            return np.random.default_rng()
        return np.random.default_rng([self.seed, *label.encode()])


def run(names: Sequence[str] = (), effort: Effort | None = None) -> Iterator[Finding]:
    """Yield the findings of the named audits, one by one; without names, of all audits.

    Raises:
        ValueError: no audit has that name.
    """
    for name in names:
        if name not in AUDITS:
            raise ValueError(f"NAME must be one of {', '.join(AUDITS)}, got {name!r}")
    for name in names or AUDITS:
        yield from import_module(f"adapmixed_lab.audit.{name}").audit(effort or Effort())


def lines(finding: Finding) -> list[str]:
    """Return a finding in two lines: what was attacked, and the two numbers.

    They have five digits, so that 1 + SLACK is shown as 1.
    """
    ratio = "" if finding.ratio is None or finding.control else f", ratio {finding.ratio:.3f}"
    sure = "" if finding.confidence == 1 else f" ({100 * finding.confidence:g} %)"
    prefix = "control: " if finding.control else ""
    return [
        f"  {finding.verdict:<10}  {prefix}{finding.name}",
        f"              {finding.claim}: claimed {finding.claimed:.5g}, measured "
        f"{finding.measured:.5g}{sure}{ratio}",
    ]


def summary(findings: Sequence[Finding]) -> str:
    """Return one line that counts the claims that hold and the controls that are caught."""
    claims = [finding.ok for finding in findings if not finding.control]
    controls = [finding.ok for finding in findings if finding.control]
    return (
        f"{sum(claims)} of {len(claims)} claims hold, "
        f"{sum(controls)} of {len(controls)} controls are caught"
    )
