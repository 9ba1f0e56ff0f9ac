"""``adapmixed ledger show | verify | export``: reads a ledger, also while it is being charged."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapmixed.privacy.ledger import Reading

ACTIONS = {
    "show": "what was charged, and what it promises (for the operator only)",
    "verify": "check every record and the head; exit status 2 if anything was altered or lost",
    "export": "every charge as a JSON line, after one that describes the ledger",
}


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "ledger",
        help="show, verify or export a ledger",
        description="Reads and checks a ledger without writing to it. Charges and totals depend on "
        "the private data: the output is for the operator.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        action.add_argument("path", type=Path, help="the ledger's database")
        if name != "export":
            action.add_argument("--json", action="store_true", help="as one JSON object")
        action.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reads the ledger; what is not intact is refused."""
    if arguments.action == "export":
        return _export(arguments.path)
    from adapmixed.privacy.ledger import read

    reading = read(arguments.path)
    facts = _facts(reading)
    if arguments.action == "verify":
        names = ("path", "intact", "charges", "counts", "hash", "head_behind", "warning")
        facts = {name: facts[name] for name in names}
    if arguments.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False))
        return 0
    for name in ("warning", "counts"):
        if facts[name] is None:
            del facts[name]
    for name, value in facts.items():
        print(f"{name.replace('_', ' ')}: {_words(value)}")
    return 0


def _words(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        counts = [f"{one['noisy_count']} above {one['threshold']}" for one in value["released"]]
        words = f"{len(counts)} of {value['reserved']} released"
        return f"{words}, standard deviation {value['sigma']}: {', '.join(counts) or '-'}"
    return "-" if value is None else value


def _facts(reading: "Reading") -> dict[str, Any]:
    from adapmixed.privacy.ledger.totals import totals_of

    description = reading.description
    return {
        "path": reading.path,
        "intact": True,
        "format_version": description.format_version,
        "configuration": description.configuration,
        "delta": description.delta,
        "rule": description.rule,
        "charges": reading.charges,
        "counts": _counts(reading),
        "hash": reading.hash.hex(),
        "head_behind": reading.behind,
        "warning": reading.warning,
        **totals_of(reading.accountant),
        "guarantee": str(reading.totals),
    }


def _counts(reading: "Reading") -> dict[str, Any] | None:
    """Of models by what they have spent, where a filter's budget reserves them: public."""
    from adapmixed.privacy.ledger.codec import readable

    budget = reading.description.filter_budget
    if budget is None or not budget.releases:
        return None
    released = [readable(one) for one in reading.accountant.released_counts]
    return {"reserved": budget.releases, "sigma": budget.sigma, "released": released}


def _export(path: Path) -> int:
    from adapmixed.privacy.ledger import read
    from adapmixed.privacy.ledger.export import description_line, record_line

    lines = 0

    def write(description: Any, record: Any, events: Any) -> None:
        nonlocal lines
        if lines == 0:
            print(description_line(description))
        print(record_line(record, events))
        lines += 1

    reading = read(path, seen=write)
    if lines == 0:
        print(description_line(reading.description))
    return 0
