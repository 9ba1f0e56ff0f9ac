"""Programs that try to break what is claimed. docs/audits.md says what a pass means.

``run(names, effort)`` attacks; nothing heavy is imported before.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module

from adapmixed_lab.audit.finding import Effort, Finding

__all__ = ["AUDITS", "Effort", "Finding", "run"]

AUDITS = {
    "tokens": "the two worlds told apart by drawn tokens",
    "bounds": "ensembles searched for that lose more than their bound",
    "screening": "the two worlds told apart by the screening bit",
    "sampler": "the distribution of drawn tokens, forks and replays",
    "budgets": "adaptive trees under a budget of every shard",
    "odometer": "AdaPMixED's running ε(D) on adaptive trees, orders chosen afterwards",
    "canaries": "planted secrets: one-run audit and exposure",
}


def run(names: Sequence[str] = (), effort: Effort | None = None) -> Iterator[Finding]:
    """Yield the findings of these audits, one by one; without names of all.

    Raises:
        ValueError: no audit has that name.
    """
    for name in names:
        if name not in AUDITS:
            raise ValueError(f"NAME must be one of {', '.join(AUDITS)}, got {name!r}")
    for name in names or AUDITS:
        yield from import_module(f"adapmixed_lab.audit.{name}").audit(effort or Effort())
