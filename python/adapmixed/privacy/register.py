"""The register of all ledgers of one ensemble, and what their charges add up to.

`ledgers.json` lies in the private folder next to the ensemble, `<folder>.private`. A ledger is
entered before its first charge, with the ε that it promises, so that it counts in full if it is
lost. docs/concepts/guarantees.md says how costs add up.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from adapmixed.errors import LedgerCorruptError, LedgerError
from adapmixed.files import remove_leftovers, sole_writer, write_file
from adapmixed.limits import check_queries
from adapmixed.privacy.account import Account
from adapmixed.privacy.events import ClippedAnswer
from adapmixed.privacy.guarantee import Guarantee, fixed_epsilon, format_epsilon, guarantee_of
from adapmixed.privacy.ledger import Reading, read_ledger

FILE_NAME, FORMAT_VERSION = "ledgers.json", 2
_LOG = logging.getLogger(__name__)
_CONDITION = (
    "This is fixed only if the number of ledgers, and the ε, δ and plan (settings and number of "
    "queries) of each, were chosen without the answers."
)


class Entry(NamedTuple):
    """A ledger as it was promised; ε is None without a limit, or without a private answer."""

    path: str
    adjacency: str
    epsilon: float | None
    delta: float


def register_of(ensemble: str | os.PathLike[str]) -> Path:
    """Return the path of an ensemble's register."""
    folder = Path(os.path.realpath(ensemble))
    return folder.with_name(f"{folder.name}.private") / FILE_NAME


def entered(register: Path) -> dict[str, Entry]:
    """Return the entry of each ledger by its identity, in the order of their first use.

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
        return {str(identity): Entry(**one) for identity, one in written["ledgers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{register} must be a register of ledgers: {error!r}") from error


def enter(ensemble: str | os.PathLike[str], reading: Reading) -> None:
    """Enter a ledger at its path, with the charge to come, into an ensemble's register.

    The log announces a further ledger. It also says if the register cannot be written; answers
    then go on without it.
    """
    register, path, identity = register_of(ensemble), reading.path, reading.identity
    settings, promised = reading.account.settings, None
    if reading.account.kind == "fixed":
        stated = reading.guarantee
        promised = stated.epsilon if stated.limited and stated.epsilon != math.inf else None
    entry = Entry(path, settings.adjacency, promised, settings.delta)
    try:
        if entered(register).get(identity) == entry:
            return
        register.parent.mkdir(mode=0o700, exist_ok=True)
        with sole_writer(register, wait=True):
            remove_leftovers(register.parent, FILE_NAME)
            ledgers = entered(register) | {identity: entry}
            listed = {one: found._asdict() for one, found in ledgers.items()}
            text = json.dumps({"format_version": FORMAT_VERSION, "ledgers": listed}, indent=1)
            write_file(register, f"{text}\n".encode())
    except (OSError, ValueError) as error:
        _LOG.warning("%s is in no register, so nothing adds its cost to others: %s", path, error)
        return
    if len(ledgers) > 1:
        words = "%s is one of %d ledgers of this ensemble's periods, whose costs add up: see '%s'"
        _LOG.warning(words, path, len(ledgers), "adapmixed ledger show --all")


class Together(NamedTuple):
    """The ledgers of one ensemble, and what they cost together so far.

    Attributes:
        readings: the ledgers that are there.
        ledgers: number of all ledgers.
        stated: all charges; "none" if a ledger has no ε that is fixed in advance. If neighbours of
            the ledgers differ, these are zero-out; if units differ or are not known, it is a shard.
        words: the sum as sentences; "" if no ledger was ever entered.
    """

    readings: list[Reading]
    ledgers: int
    stated: Guarantee
    words: str


def together(ensemble: str | os.PathLike[str], known: Reading | None = None) -> Together:
    """Read all ledgers of an ensemble, and add up their costs.

    A ledger that is lost, moved or damaged counts in full, as the register has it.

    Args:
        ensemble: the ensemble's folder.
        known: a ledger that was read already, wherever it lies.

    Raises:
        ValueError, OSError: the register cannot be read.
    """
    found = [] if known is None else [known]
    missing, reasons = list[Entry](), list[str]()
    for identity, entry in entered(register_of(ensemble)).items():
        if known is not None and known.identity == identity:
            continue
        why = "lost or moved"
        try:
            reading = read_ledger(entry.path, whole=False)
            if reading.identity == identity:
                found.append(reading)
                continue
        except LedgerError as error:
            why = "damaged" if isinstance(error, LedgerCorruptError) else why
        missing.append(entry)
        reasons.append(f"{entry.path} ({why})")
    stated, said = _sum(found, missing)
    count, full = len(found) + len(missing), "" if stated.epsilon is None else ", counted in full"
    whose = f"All {count} ledgers" if count > 1 else "The only ledger in the register"
    words = [f"{whose} of this ensemble's periods{' together' * (count > 1)}, so far: {said}"]
    words += [f"Not there{full}, caveats unknown: {', '.join(reasons)}."] if missing else []
    if stated.epsilon is not None:
        words += [] if count == 1 and all(one.guarantee.limited for one in found) else [_CONDITION]
        words += [stated.inside()] if count > 1 and stated.adjacency == "zero_out" else []
        each = [warning for one in found for warning in one.guarantee.warnings]
        words += dict.fromkeys([*stated.warnings, *each])
    return Together(found, count, stated, " ".join(words) if count else "")


def _sum(readings: Sequence[Reading], missing: Sequence[Entry]) -> tuple[Guarantee, str]:
    """Return the guarantee of all charges, composed if that is proved, else added, and words."""
    accounts, nothing = [one.account for one in readings], Guarantee(None, 1.0, "none")
    if any(one.kind not in ("fixed", "public") for one in accounts):
        return nothing, "no ε, as a ledger has none that is fixed in advance."
    if any(one.epsilon is None for one in missing):  # ε of replace-one covers zero-out, too
        return nothing, "no sum, until a ledger is back whose ε the register does not have."
    asked = {one.settings.adjacency for one in accounts} | {one.adjacency for one in missing}
    way = asked.pop() if len(asked) == 1 else "zero_out"
    units = {"shard" for _ in missing} | {one.guarantee.unit for one in readings}
    found: list[Any] = [*(guarantee_of(one, adjacency=way) for one in accounts), *missing]
    epsilons, how = [one.epsilon or 0.0 for one in found], "their ε and δ added; "
    epsilon, delta = math.fsum(epsilons), float(sum(Decimal(repr(one.delta)) for one in found))
    if delta >= 1:
        return nothing, "no ε, as the δ of all ledgers add up to 1 or more."
    if math.isfinite(epsilon) and math.fsum([*epsilons, -epsilon]) > 0:  # it was rounded down
        epsilon = math.nextafter(epsilon, math.inf)
    composed = None if missing else _composed(accounts, way)
    if composed is not None and composed < epsilon:
        epsilon, delta, how = composed, accounts[0].settings.delta, "all answers composed; "
    exact = bool(missing) or "renyi" in {getattr(one, "method", None) for one in found}
    how = how * (len(found) > 1) + "for tokens drawn from the exact mixture; " * exact
    said = f"ε = {format_epsilon(epsilon)} at δ = {delta!r} ({how}{way.replace('_', '-')})."
    unit = units.pop() if len(units) == 1 else "shard"
    return Guarantee(epsilon, delta, "fixed", way, unit=unit), said


def _composed(accounts: Sequence[Account], way: str) -> float | None:
    """Return ε of all answers as those of one account; None if they have no joint total."""
    settings = {replace(one.settings, adjacency=way) for one in accounts}
    if len(settings) != 1 or any(one.settings.epsilon is not None for one in accounts):
        return None
    queries, joint = Counter[Any](), Account(settings.pop())
    charged: list[tuple[Any, int]] = [item for one in accounts for item in one.charged.items()]
    for event, count in charged:
        if hasattr(event, "budget"):  # the plans' numbers add up
            event = replace(event, budget=1 if isinstance(event, ClippedAnswer) else None)
        queries[event] += count
    for event, count in queries.items():
        if not event.method:
            continue
        whole = {"budget": count} if isinstance(event, ClippedAnswer) else {}
        try:
            joint = joint.added([replace(event, queries=check_queries(count, least=0), **whole)])
        except ValueError:  # of several mechanisms, boxes, orders or N, or too many
            return None
    return fixed_epsilon(joint, joint.settings.delta)
