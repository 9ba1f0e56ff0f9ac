"""``adapmixed ledger show | verify | export``: read a ledger, even while it is being charged."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapmixed.privacy.ledger import Reading
    from adapmixed.privacy.ledger.records import Record

ACTIONS = {
    "show": "print what was charged and its guarantee, for the operator only",
    "verify": "check every record; exit status 2 if anything was altered or lost",
    "export": "print every record as a JSON line, after a line that describes the ledger",
}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "ledger",
        help="show, verify or export a ledger",
        description="Read and check a ledger without writing to it. Charges and totals depend on "
        "the private data, so the output is for the operator only.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action = actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
        )
        action.add_argument("path", type=Path, help="the ledger's database file")
        if name != "export":
            action.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "verify":
            action.add_argument(
                "--expect",
                metavar="DIGEST",
                help="a digest printed earlier; exit status 2 unless the ledger had it",
            )
        action.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the ledger and print it.

    Raises:
        LedgerCorruptError: the ledger was altered, or it never had the expected digest.
    """
    if arguments.action == "export":
        return _export(arguments.path)
    from adapmixed.commands.options import print_facts
    from adapmixed.errors import LedgerCorruptError
    from adapmixed.privacy import read_ledger

    digests: list[str] = []
    reading = read_ledger(arguments.path, seen=lambda one: digests.append(one.hash.hex()))
    facts = _facts(reading)
    if arguments.action == "show":
        facts |= _totals(reading)
    elif arguments.expect not in (None, reading.description.first_hash.hex(), *digests):
        raise LedgerCorruptError(
            f"--expect must be a digest that {reading.path} had, got {arguments.expect!r}: it is "
            "an older copy or another ledger"
        )
    if arguments.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False))
        return 0
    guarantee = facts.pop("guarantee", None)
    print_facts(facts)
    if guarantee is not None:
        print(f"All lines above are for the operator only.\nguarantee: {guarantee}")
    return 0


def _facts(reading: Reading) -> dict[str, Any]:
    return {
        "path": reading.path,
        "intact": True,
        "charges": reading.charges,
        "digest": reading.digest,
    }


def _totals(reading: Reading) -> dict[str, Any]:
    from adapmixed.privacy.encoding import write_real

    account, guarantee = reading.account, reading.guarantee
    settings, binding, epsilon = account.settings, account.binding, guarantee.epsilon
    return {
        "delta": settings.delta,
        "shard_budget": settings.epsilon,
        "mechanism": None if binding is None else binding.mechanism,
        "ensemble": None if binding is None else binding.ensemble,
        "queries": guarantee.queries,
        "kind": guarantee.kind,
        "epsilon": None if epsilon is None else write_real(float(epsilon)),
        "guarantee": str(guarantee),
    }


def _export(path: Path) -> int:
    from adapmixed.privacy import read_ledger
    from adapmixed.privacy.encoding import canonical, parse

    lines: list[str] = []

    def seen(record: Record) -> None:
        written = {"sequence": record.sequence, **parse(record.text), "hash": record.hash.hex()}
        lines.append(canonical(written))

    reading = read_ledger(path, seen=seen)
    print(canonical({"ledger": parse(reading.description.text)}))
    for line in lines:
        print(line)
    return 0
