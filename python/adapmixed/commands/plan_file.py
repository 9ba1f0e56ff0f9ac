"""The file that ``adapmixed plan --save`` writes and --plan reads: a mechanism, ε, δ and tokens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.mechanisms import check_charged, mechanism_of
from adapmixed.commands.options import write_private

if TYPE_CHECKING:
    from adapmixed.privacy.planner import Plan

FORMAT_VERSION = 1
KIND = "saved plan"
_REPLACED = ("mechanism", "epsilon", "delta", "adjacency")


def save_plan(path: Path, folder: Path, mechanism: str, one: Plan, periods: int) -> None:
    """Write the plan of an ensemble. It holds a digest of the members, so it is private.

    Args:
        path: the file.
        folder: the ensemble.
        mechanism: the value of --mechanism.
        one: the plan of one period, from `recommended`.
        periods: number of periods; the ε of all of them is written, too.
    """
    from adapmixed.ensemble.provenance import recorded_fingerprint

    content = {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "ensemble": recorded_fingerprint(folder),
        "mechanism": mechanism,
        "epsilon": one.epsilon,
        "delta": one.delta,
        "adjacency": one.adjacency,
        "tokens": one.queries,
        "periods": periods,
        "epsilon_of_periods": one.over_time[-1][1],
    }
    write_private(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_plan(path: Path) -> dict[str, Any]:
    """Return the entries of a saved plan.

    Raises:
        ValueError: the file is no saved plan, has another version, or was changed by hand.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["kind"] != KIND:
            raise ValueError(f"kind must be {KIND!r}, got {found['kind']!r}")
        if found["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"format_version must be {FORMAT_VERSION}, got {found['format_version']!r}"
            )
        delta, way = found["delta"], found["adjacency"]
        mechanism = mechanism_of(found["mechanism"], delta=delta, epsilon=None, queries=1, way=way)
        check_charged(mechanism, delta=delta, epsilon=None, way=way)
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

    A command calls this before it loads a model, or makes or charges a ledger.

    Args:
        arguments: the command's arguments, which are changed.
        several: whether --mechanism may be repeated.

    Raises:
        ValueError: another option is given with --plan, or the plan is of another ensemble, or its
            tokens are spent in --ledger.
    """
    if arguments.plan is None:
        arguments.delta = 1e-5 if arguments.delta is None else arguments.delta
        arguments.adjacency = arguments.adjacency or "zero_out"
        return
    for name in _REPLACED:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} must not be given with --plan, which has it: leave one out")
    found = read_plan(arguments.plan)
    _check_ensemble(arguments, found)
    _check_unspent(arguments, found)
    arguments.delta, arguments.adjacency = found["delta"], found["adjacency"]
    arguments.mechanism = [found["mechanism"]] if several else found["mechanism"]


def _check_ensemble(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    from adapmixed.ensemble.provenance import recorded_fingerprint

    if recorded_fingerprint(arguments.ensemble) != found["ensemble"]:
        raise ValueError(
            f"--plan must be of --ensemble {arguments.ensemble} with its present members, got "
            f"{arguments.plan} of another: 'adapmixed plan --ensemble {arguments.ensemble}' "
            "plans for it"
        )


def _check_unspent(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    from adapmixed.privacy import read_ledger

    path = getattr(arguments, "ledger", None)
    if path is None or not path.is_file():
        return
    if read_ledger(path).account.totals.planned >= found["tokens"]:
        raise ValueError(
            f"--plan must have tokens left, but all {found['tokens']} of {arguments.plan} are "
            f"spent in --ledger {path}: a new plan needs a new ledger, and its ε and δ add to these"
        )
