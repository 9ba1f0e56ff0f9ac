"""``adapmixed ledger``: show, verify or export a ledger, or write a letter about it.

Read and check a ledger without writing to it. Charges and totals depend on the private data, so the
output is for the operator only.
"""

from __future__ import annotations

import argparse
import json
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapmixed.privacy.ledger import Reading

ACTIONS = {
    "show": "print what was charged and its guarantee, for the operator only",
    "verify": "check every record; exit status 2 if anything was altered or lost",
    "export": "print every record as a JSON line, after a line that describes the ledger",
    "letter": "print a letter for a privacy officer: what the answers can tell, and why",
}
LETTER = Path(__file__).parents[1] / "assets" / "letter.txt"
"""The letter's sentences, each with its heading on the page "What is guaranteed" in brackets."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        action.add_argument("path", type=Path, help="the ledger's database file")
        if name in ("show", "letter"):
            words = "ensemble folder (default: found by its register, if it is near the ledger)"
            action.add_argument("--ensemble", type=Path, help=words)
        if name == "show":
            words = "also add up all ledgers of the ensemble"
            action.add_argument("--all", action="store_true", help=words)
        if name == "verify":
            words = "a digest printed earlier; exit status 2 unless the ledger had it"
            action.add_argument("--expect", metavar="DIGEST", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Read the ledger and print it.

    Raises:
        LedgerCorruptError: the ledger was altered, or it never had the expected digest.
    """
    from adapmixed.errors import LedgerCorruptError
    from adapmixed.privacy import read_ledger
    from adapmixed.privacy.events import canonical
    from adapmixed.privacy.ledger import together

    reading = read_ledger(arguments.path)
    facts: dict[str, Any] = {"path": reading.path, "intact": "yes"}
    facts |= {"charges": reading.charges, "digest": reading.digest}
    if arguments.action == "export":
        for entry in reading.records():
            content = json.loads(entry.text)
            record = {"sequence": entry.sequence, "events": content, "hash": entry.hash.hex()}
            print(canonical(record if entry.sequence else {"ledger": content}))
        return 0
    if arguments.action == "letter":
        print(_letter(reading, _ensemble(reading, arguments.ensemble)))
        return 0
    if arguments.action == "show":
        account, guarantee = reading.account, reading.guarantee
        binding = account.binding
        facts |= {
            "delta": account.delta,
            "shard budget": account.epsilon,
            "mechanism": None if binding is None else binding.mechanism,
            "ensemble": None if binding is None else binding.ensemble,
            "queries": guarantee.queries,
            "kind": guarantee.kind,
            "epsilon": guarantee.epsilon,
        }
        if arguments.all:
            total = together(_ensemble(reading, arguments.ensemble), reading)
            facts |= {f"ledger {ledger.path}": str(ledger.guarantee) for ledger in total.readings}
            facts["together"] = total.words
    elif arguments.expect not in (None, *(entry.hash.hex() for entry in reading.records())):
        raise LedgerCorruptError(
            f"--expect must be a digest that {reading.path} had, got {arguments.expect!r}: it is "
            "an older copy or another ledger"
        )
    for name, value in facts.items():
        print(f"{name}: {'-' if value is None else value}")
    if arguments.action == "show":
        print(f"All lines above are for the operator only.\nguarantee: {reading.guarantee}")
    return 0


def _ensemble(reading: Reading, ensemble: Path | None) -> Path:
    """Return the folder of the ensemble whose register has a ledger.

    Without a given one, it lies in the current folder, the ledger's, or the one above it.

    Raises:
        ValueError: there is none, or it is not the one that is given.
    """
    from adapmixed.privacy.ledger import entered, register_of

    places = (Path.cwd(), *Path(reading.path).parents[:2])
    near = [file.parent for place in places for file in sorted(place.glob("*/ensemble.json"))]
    why = "'adapmixed generate' enters a ledger if it may write to the private folder"
    for folder in near if ensemble is None else [ensemble]:
        try:
            if reading.identity in entered(register_of(folder)):
                return folder
        except (OSError, ValueError) as error:
            why = str(error)
    raise ValueError(
        f"--ensemble must be the ensemble whose register has {reading.path}, got {ensemble}: {why}"
    )


def _letter(reading: Reading, ensemble: Path) -> str:
    """Return the letter, which is about all ledgers of the ensemble.

    Raises:
        ValueError: a ledger of the ensemble has no ε that is fixed in advance.
    """
    from adapmixed import __version__
    from adapmixed.ensemble.members import read_manifest
    from adapmixed.privacy.guarantee import format_epsilon
    from adapmixed.privacy.ledger import together

    guarantee, binding = reading.guarantee, reading.account.binding
    total = together(ensemble, reading)
    stated, epsilon = total.stated, total.stated.epsilon
    if guarantee.kind != "fixed" or epsilon is None or binding is None:
        raise ValueError(
            f"{reading.path} and all other ledgers of {ensemble} must have an ε that is fixed in "
            "advance for a letter: 'adapmixed ledger show --all' shows them; put lost ones back"
        )
    inexact = any(ledger.guarantee.method in ("renyi", "gaussian") for ledger in total.readings)
    sound = guarantee.limited and not (inexact or guarantee.warnings)
    true = {"", "shard" if stated.unit == "shard" else "unit"}
    true |= {"several"} if total.ledgers > 1 else {"sound"} if sound else set()
    true |= {"rounding"} if inexact or total.ledgers > len(total.readings) else set()
    true |= {"table"} if read_manifest(ensemble).unit is not None else set()
    odds = Decimal(format_epsilon(epsilon)).exp()
    factor = Context(prec=3, rounding=ROUND_CEILING).create_decimal(odds)
    doubt = 100 / (1 + odds)  # rounded down, as the odds are rounded up
    doubt = Context(prec=2 if doubt < 10 else 3, rounding=ROUND_FLOOR).create_decimal(doubt)
    values: dict[str, object] = {
        "whom": f"one {stated.unit}",
        "epsilon": format_epsilon(epsilon),
        "factor": f"{factor:,f}".replace(",", " "),
        "sure": 100 - doubt,
        "one_in": f"{int(1 / Decimal(repr(stated.delta))):,}".replace(",", " "),
        "version": __version__,
        "name": ensemble.resolve().name,
    }
    values |= {"reading": reading, "guarantee": guarantee, "binding": binding, "found": total}
    lines = [line.split("|", 1) for line in LETTER.read_text(encoding="utf-8").splitlines()]
    return "\n".join(text.format(**values) for condition, text in lines if condition in true)


def all_ledgers(ensemble: str | Path, path: Path | None = None) -> str:
    """Return what an ensemble's ledgers have spent; "" if the one at a path is alone."""
    from adapmixed.privacy import read_ledger
    from adapmixed.privacy.ledger import together

    try:
        total = together(ensemble, None if path is None else read_ledger(path, whole=False))
        return total.words if total.ledgers > 1 or path is None else ""
    except (OSError, ValueError) as error:
        return f"The ledgers of this ensemble could not be added up: {error}"
