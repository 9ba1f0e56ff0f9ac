"""The file that ``adapmixed plan --save`` writes and --plan reads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.mechanisms import mechanism_of
from adapmixed.commands.options import write_private

if TYPE_CHECKING:
    from adapmixed.privacy.planner import Plan

FORMAT_VERSION = 1


def save_plan(path: Path, folder: Path, mechanism: str, one: Plan) -> None:
    """Write the plan of an ensemble folder, with the value of --mechanism.

    The file holds a digest of the members, so it is private.
    """
    from adapmixed.ensemble.members import recorded_fingerprint

    content = {
        "format_version": FORMAT_VERSION,
        "kind": "plan",
        "ensemble": recorded_fingerprint(folder),
        "mechanism": mechanism,
        "epsilon": one.epsilon,
        "delta": one.delta,
        "adjacency": one.adjacency,
        "tokens": one.queries,
    }
    write_private(path, json.dumps(content, indent=2) + "\n")


def read_plan(path: Path) -> dict[str, Any]:
    """Return the entries of a saved plan.

    Raises:
        ValueError: the file is no saved plan, has another version, or was changed by hand.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version, kind = found["format_version"], found["kind"]
        if (version, kind) != (FORMAT_VERSION, "plan"):
            raise ValueError(f"it has format_version {version!r} and kind {kind!r}")
        _, delta, way = found["ensemble"], found["delta"], found["adjacency"]
        mechanism = mechanism_of(found["mechanism"], delta=delta, epsilon=None, queries=1, way=way)
        if mechanism.planned_queries != found["tokens"]:
            raise ValueError(f"tokens must be queries= of mechanism, got {found['tokens']!r}")
    except (ValueError, TypeError, KeyError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"--plan must name a file that 'adapmixed plan --save' wrote, got {path}: {why}"
        ) from error
    return dict(found)


def take_plan(arguments: argparse.Namespace, *, several: bool = False) -> None:
    """Set the options of mechanism and guarantee to those of --plan, or else to their defaults.

    A command calls this before it loads a model, or makes or charges a ledger. With `several`, its
    --mechanism may be repeated.

    Raises:
        ValueError: another option is given with --plan, or the plan is of another ensemble, or its
            tokens are spent in --ledger.
    """
    file, folder, ledger = arguments.plan, arguments.ensemble, vars(arguments).get("ledger")
    if file is None:
        arguments.delta = 1e-5 if arguments.delta is None else arguments.delta
        arguments.adjacency = arguments.adjacency or "zero_out"
        return
    for name in ("mechanism", "epsilon", "delta", "adjacency"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} must not be given with --plan, which has it: leave one out")
    from adapmixed.ensemble.members import recorded_fingerprint
    from adapmixed.privacy import read_ledger

    found = read_plan(file)
    if recorded_fingerprint(folder) != found["ensemble"]:
        raise ValueError(
            f"--plan must be of --ensemble {folder} with its present members, got {file} of "
            f"another: 'adapmixed plan --ensemble {folder}' plans for it"
        )
    spent = 0
    if ledger is not None and ledger.is_file():
        spent = read_ledger(ledger, whole=False).account.planned
    if spent >= found["tokens"] and vars(arguments).get("when_spent") != "public":
        raise ValueError(
            f"--plan must have tokens left, but all {found['tokens']} of {file} are spent in "
            f"--ledger {ledger}: a new plan needs a new ledger, and its ε and δ add to these"
        )
    arguments.delta, arguments.adjacency = found["delta"], found["adjacency"]
    arguments.mechanism = [found["mechanism"]] if several else found["mechanism"]
