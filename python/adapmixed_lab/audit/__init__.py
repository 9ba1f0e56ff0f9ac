"""Attacks on every privacy claim; docs/how-to/audit.md says what a pass means.

``run(names, effort)`` runs them, and only then imports heavy packages.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module

from adapmixed_lab.audit.finding import Effort, Finding

__all__ = ["AUDITS", "Effort", "Finding", "run"]

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
