"""The register of all ledgers of one ensemble, and what their charges add up to.

`ledgers.json` lies in the private folder next to the ensemble, `<folder>.private`. A ledger is
entered before its first charge. docs/concepts/guarantees.md says how costs add up.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from adapmixed.errors import LedgerError
from adapmixed.files import remove_leftovers, write_file
from adapmixed.privacy.account import Account
from adapmixed.privacy.guarantee import format_epsilon
from adapmixed.privacy.ledger.reading import Reading, read_ledger

FILE_NAME, FORMAT_VERSION = "ledgers.json", 1
_LOG = logging.getLogger(__name__)


def register_of(ensemble: str | os.PathLike[str]) -> Path:
    """Return the path of an ensemble's register."""
    folder = Path(os.path.realpath(ensemble))
    return folder.with_name(f"{folder.name}.private") / FILE_NAME


def entered(register: Path) -> dict[str, str]:
    """Return the path of each ledger by its identity, in the order of their first use.

    Raises:
        ValueError: the file is not a register of this format.
        OSError: the file cannot be read. Without a file there are no ledgers.
    """
    if not register.exists():
        return {}
    try:
        written = json.loads(register.read_text(encoding="utf-8"))
        if written["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version must be {FORMAT_VERSION}")
        return {str(identity): str(path) for identity, path in written["ledgers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{register} must be a register of ledgers: {error!r}") from error


def enter(ensemble: str | os.PathLike[str], identity: str, path: str) -> None:
    """Enter a ledger at its path into an ensemble's register, unless it is there.

    The log announces a further ledger. It also says if the register cannot be written; answers
    then go on without it.
    """
    register = register_of(ensemble)
    try:
        if entered(register).get(identity) == path:
            return
        register.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(register.with_suffix(".lock"), flags, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_leftovers(register.parent, FILE_NAME)
            ledgers = entered(register) | {identity: path}
            text = json.dumps({"format_version": FORMAT_VERSION, "ledgers": ledgers}, indent=1)
            write_file(register, f"{text}\n".encode())
    except (OSError, ValueError) as error:
        _LOG.warning("%s is in no register, so nothing adds its cost to others: %s", path, error)
        return
    if len(ledgers) > 1:
        words = "%s is one of %d ledgers of this ensemble, whose costs add up: see 'adapmixed %s'"
        _LOG.warning(words, path, len(ledgers), "ledger show --all")


def ensemble_of(reading: Reading) -> Path | None:
    """Return the ensemble whose register has a ledger, if one lies near.

    Near is the current folder, the ledger's, and the one above it.
    """
    for place in (Path.cwd(), *Path(reading.path).parents[:2]):
        for manifest in sorted(place.glob("*/ensemble.json")):
            with suppress(OSError, ValueError):
                if reading.description.identity in entered(register_of(manifest.parent)):
                    return manifest.parent
    return None


class Together(NamedTuple):
    """The ledgers of one ensemble, and what they cost together so far.

    Attributes:
        readings: the ledgers that are there.
        epsilon: ε of all charges; None if a ledger has none that is fixed in advance.
        delta: its δ.
        adjacency: its neighbours, which are zero-out if those of the ledgers differ.
        words: the sum as a sentence; "" if no two ledgers were ever entered.
    """

    readings: list[Reading]
    epsilon: float | None
    delta: float
    adjacency: str
    words: str


def together(ensemble: str | os.PathLike[str], known: Reading | None = None) -> Together:
    """Read all ledgers of an ensemble, and add up their costs.

    Args:
        ensemble: the ensemble's folder.
        known: one of them that was read already, wherever it lies.

    Raises:
        ValueError: the register is not one.
        OSError: the register cannot be read.
    """
    found, missing = list[Reading](), list[str]()
    for identity, path in entered(register_of(ensemble)).items():
        reading = known
        if known is None or known.description.identity != identity:
            with suppress(LedgerError):
                reading = read_ledger(path, whole=False)
        if reading is None or reading.description.identity != identity:
            missing.append(path)
        else:
            found.append(reading)
    accounts = [one.account for one in found]
    asked = {one.settings.adjacency for one in accounts}
    way = asked.pop() if len(asked) == 1 else "zero_out"
    epsilon, delta, said = _sum(accounts, way)
    count = len(found) + len(missing)
    words = f"All {count} ledgers of this ensemble together, so far: {said}"
    if missing:
        words += f" Not counted, because they are lost or moved: {', '.join(missing)}."
    return Together(found, epsilon, delta, way, words if count > 1 else "")


def _sum(accounts: Sequence[Account], way: str) -> tuple[float | None, float, str]:
    """Return ε, δ and words for all charges: composed if that is proved, else added."""
    if any(one.totals.kind not in ("fixed", "public") for one in accounts):
        return None, 1.0, "one of them has no ε that is fixed in advance, so they have none."
    found = [one.guarantee(one.settings.delta, way) for one in accounts]
    epsilons, how = [one.epsilon or 0.0 for one in found], "their ε and δ added"
    epsilon, delta = math.fsum(epsilons), float(sum(Decimal(repr(one.delta)) for one in found))
    if math.isfinite(epsilon) and math.fsum([*epsilons, -epsilon]) > 0:  # it was rounded down
        epsilon = math.nextafter(epsilon, math.inf)
    with suppress(ValueError):
        composed, share = _composed(accounts, way)
        if composed < epsilon:
            epsilon, delta, how = composed, share, "all answers composed"
    pair = f"ε = {format_epsilon(epsilon)} at δ = {delta!r}"
    return epsilon, delta, f"{pair} ({how}; {way.replace('_', '-')})."


def _composed(accounts: Sequence[Account], way: str) -> tuple[float, float]:
    """Return ε and δ of all answers as those of one account, with plans fixed in advance.

    Raises:
        ValueError: they have no joint total.
    """
    (settings,) = {replace(one.settings, adjacency=way, epsilon=None) for one in accounts}
    joint = Account(settings)
    for one in accounts:
        if one.settings.epsilon is not None:
            raise ValueError("epsilon must be None: budgets of shards have no joint total")
        for event, answered in one.totals.counts.items():
            changes: dict[str, Any] = {"queries": getattr(event, "budget", None) or answered}
            changes |= {"budget": None} if hasattr(event, "budget") else {}
            joint = joint.added([replace(event, **changes)])
    return joint.fixed_epsilon(settings.delta), settings.delta
