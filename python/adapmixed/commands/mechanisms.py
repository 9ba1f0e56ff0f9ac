"""``adapmixed mechanisms``: list the names and keys of --mechanism.

List the mechanisms, or the keys of one mechanism with their defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import shlex
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import add_options, option
from adapmixed.files import write_file
from adapmixed.limits import QUESTIONS, check_type

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism
    from adapmixed.privacy.planner import Plan

PLAN_VERSION = 1  # of a saved plan
BASELINES = ("public", "unprotected", "unprotected-pool")

_PAPER = {"adapmixed": {"order": 18.0, "target_leakage": 0.2}, "pmixed": {"order": 3.0}}
"""Defaults of the command line alone: the paper's settings."""

CHOOSING = (
    "Settings may be chosen by a public rule, or on a stand-in ensemble trained on public text of "
    "the same\nkind. Private members must not choose them, on whatever text: nothing charges that."
)

_UNDER_BUDGET = {"clipped-mixing": {"order": 8.0}}
"""Defaults of the command line alone under a budget of every shard."""

_GIVEN = {"delta": "use --delta"}
"""Arguments in Python that have their own option on the command line."""


SETTINGS = "such as 'clipped-mixing lower=0.78 upper=2.7'; see 'adapmixed mechanisms'"


@dataclasses.dataclass
class MechanismOptions:
    """--plan, and --mechanism, --epsilon, --delta and --adjacency, which it replaces."""

    plan: Path | None = option("of 'adapmixed plan --save', in place of the other options here")
    mechanism: str | None = option(SETTINGS, metavar='"NAME KEY=VALUE ..."')
    epsilon: float | None = option("budget of every shard, for any number of tokens")
    delta: float | None = option("delta of the guarantee (default: 1e-5)")
    adjacency: str | None = option(
        "a shard is emptied, or its records change: %(choices)s (default: zero_out)",
        choices=QUESTIONS,
        metavar="WAY",
    )


def add_mechanism_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the options of a mechanism and its guarantee, in a group of their own.

    Args:
        parser: gets the options.
        several: whether --mechanism may be repeated.
    """
    group = add_options(parser, MechanismOptions, "plan", title="mechanism and guarantee")
    more: dict[str, Any] = {"help": f"must be given, or --plan: {SETTINGS}"}
    if several:
        more = {"action": "append", "help": f"may be repeated (default: adapmixed): {SETTINGS}"}
    add_options(group, MechanismOptions, "mechanism", **more)
    add_options(group, MechanismOptions, "epsilon delta adjacency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "name", nargs="?", help="mechanism whose keys to list (default: list names)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print all mechanisms, or one mechanism with its keys."""
    for name in kinds() if arguments.name is None else (arguments.name,):
        kind = _kind("name", name)
        first = (inspect.getdoc(kind) or "").split("\n\n")[0]
        print(f"{name}: {' '.join(first.split())}")
        if arguments.name is not None:
            for key, default in keys_of(name).items():
                print(f"  {key}={'none' if default in (None, ()) else default}")
    return 0


def mechanism_for(arguments: argparse.Namespace, queries: int | None) -> Mechanism:
    """Return the mechanism of --plan or --mechanism, for --epsilon, --delta and --adjacency.

    Args:
        arguments: the command's arguments.
        queries: as in `mechanism_of`.

    Raises:
        ValueError: as `take_plan` and `mechanism_of`, before a ledger is made.
    """
    take_plan(arguments)
    return mechanism_of(
        arguments.mechanism,
        delta=arguments.delta,
        epsilon=arguments.epsilon,
        way=arguments.adjacency,
        queries=queries,
        ledger=vars(arguments).get("ledger") is not None,
    )


def mechanism_of(
    text: str | None,
    *,
    delta: float,
    epsilon: float | None,
    queries: int | None,
    way: str,
    ledger: bool = False,
) -> Mechanism:
    """Return the mechanism that a text describes, which an accountant can be charged for.

    Args:
        text: "NAME KEY=VALUE ..."; the keys are the arguments of the class in Python. None raises,
            since tokens are released by no default.
        delta: δ of the guarantee.
        epsilon: budget of every shard, or None.
        queries: tokens of this run; a fixed guarantee is planned for them unless the text says
            otherwise. None if nobody knows them, as for a server.
        way: neighbours of the guarantee.
        ledger: whether a ledger is charged, which must not be bound to the tokens of one run.

    Raises:
        ValueError: if a name or key is unknown, or if the mechanism does not take a value; if it
            would be planned for this run, and a ledger is charged; or as `Accountant.bind`.
    """
    from adapmixed.privacy import Accountant

    if text is None:
        raise ValueError(
            "--mechanism must be given, or --plan: 'adapmixed mechanisms' lists them, with the "
            "guarantee of each"
        )
    name, given = _parsed(text)
    kind: Any = kinds()[name]
    known = keys_of(name)
    preset = given.pop("preset", None)
    settings = given if preset is not None else _PAPER.get(name, {}) | given
    if "delta" in {one.name for one in dataclasses.fields(kind)}:
        settings["delta"] = delta
    planned = epsilon is None or _always_planned(kind)
    if planned and "queries" in known and "queries" not in given:
        if ledger:
            budget = "" if _always_planned(kind) else "--epsilon, for any number of tokens, or "
            raise ValueError(
                f"--ledger needs {budget}queries= in --mechanism {name}, the number of tokens of "
                "all runs: a plan for this run alone would reject a later one"
            )
        settings["queries"] = queries
    if epsilon is not None:
        settings = _UNDER_BUDGET.get(name, {}) | settings
    if name == "pmixed":
        settings.setdefault("adjacency", way)
    missing = [key for key, value in known.items() if value == "..." and key not in settings]
    if missing and preset is None:
        raise ValueError(
            f"--mechanism {name} needs {', '.join(missing)} ('adapmixed plan' lists settings for "
            "an epsilon)"
        )
    try:
        make = partial(dataclasses.replace, kind.preset(preset)) if preset is not None else kind
        found: Mechanism = make(**settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--mechanism {name}: {error}") from error
    Accountant(delta, epsilon=epsilon, adjacency=way).bind(found, num_models=1)
    return found


def _always_planned(kind: Any) -> bool:
    """Return whether no budget of shards can replace a plan."""
    fields = dataclasses.fields(kind)
    return any(one.name == "queries" and one.default is dataclasses.MISSING for one in fields)


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    try:
        name, *words = shlex.split(text)
    except ValueError:
        raise ValueError(f"--mechanism must be 'NAME KEY=VALUE ...', got {text!r}") from None
    types = types_of(_kind("--mechanism", name))
    types = {key: types.get(key, "str | None") for key in keys_of(name)}
    return name, settings_of(f"--mechanism {name}", words, types, _GIVEN)


def types_of(kind: Any) -> dict[str, str]:
    """Return the annotations of a dataclass's fields as strings."""
    return {one.name: str(one.type) for one in dataclasses.fields(kind)}


def settings_of(
    option: str, words: Sequence[str], types: Mapping[str, str], elsewhere: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of an option's words KEY=VALUE, by the annotations of its keys.

    Raises:
        ValueError: if a key is repeated or unknown, for which `elsewhere` may have the reason, or
            if its value is of another type.
    """
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key or key in given:
            raise ValueError(f"{option} must have KEY=VALUE once for every key, got {word!r}")
        if key not in types:
            why = elsewhere.get(key, f"keys are {', '.join(types) or 'none'}")
            raise ValueError(f"{option} does not take {key}: {why}")
        given[key] = _value(f"{option}: {key}", types[key], text)
    return given


def _value(name: str, annotation: str, text: str) -> Any:
    kind, *rest = annotation.split(" | ")
    if kind.startswith("tuple"):
        return () if text == "none" else tuple(_value(name, "float", v) for v in text.split(","))
    if text == "none" and rest:
        return None
    kinds: dict[str, tuple[str, Any]] = {
        "bool": ("yes or no", {"yes": True, "no": False}.__getitem__),
        "int": ("an integer", int),
        "float": ("a number", float),
    }
    wanted, read = kinds.get(kind, ("text", str))
    try:
        return read(text)  # as numbers, 18 and 18.0 are the same setting in a ledger
    except (KeyError, ValueError):
        raise ValueError(f"{name} must be {wanted}, got {text!r}") from None


@cache
def kinds() -> dict[str, type[Mechanism]]:
    """Return the classes of all mechanisms by name."""
    from adapmixed import mechanisms

    found = (getattr(mechanisms, name) for name in mechanisms.__all__)
    return {kind.name: kind for kind in found if hasattr(kind, "name")}


def _kind(option: str, name: str) -> type[Mechanism]:
    if name not in kinds():
        raise ValueError(f"{option} must be one of {', '.join(kinds())}, got {name!r}")
    return kinds()[name]


def keys_of(name: str) -> dict[str, Any]:
    """Return the keys of a mechanism with their defaults; "..." stands for no default."""
    kind: Any = kinds()[name]
    found: dict[str, Any] = {"preset": None} if name == "adapmixed" else {}
    for one in dataclasses.fields(kind):
        if one.init and one.name not in _GIVEN:
            default = "..." if one.default is dataclasses.MISSING else one.default
            found[one.name] = _PAPER.get(name, {}).get(one.name, default)
    if "queries" in found:
        found["queries"] = "without --epsilon, all queries of the run"
    return found


def save_plan(path: Path, folder: Path, mechanism: str, one: Plan) -> None:
    """Write the plan of an ensemble folder, with the value of --mechanism.

    The file holds a digest of the members, so it is private.
    """
    from adapmixed.ensemble.members import recorded_fingerprint

    content = {
        "format_version": PLAN_VERSION,
        "kind": "plan",
        "ensemble": recorded_fingerprint(folder),
        "mechanism": mechanism,
        "epsilon": one.epsilon,
        "delta": one.delta,
        "adjacency": one.adjacency,
        "tokens": one.queries,
    }
    write_file(path, f"{json.dumps(content, indent=2)}\n".encode())


def read_plan(path: Path) -> dict[str, Any]:
    """Return the entries of a saved plan.

    Raises:
        ValueError: the file is no saved plan, has another version, or was changed by hand.
    """
    from adapmixed.ensemble.members import read_versioned

    entries = ("ensemble", "mechanism", "delta", "adjacency", "tokens")
    try:
        found = read_versioned(path, PLAN_VERSION, *entries)
        _, text, delta, way, tokens = (found[name] for name in entries)
        check_type("mechanism", text, str, "a string")
        mechanism = mechanism_of(text, delta=delta, epsilon=None, queries=1, way=way)
        if mechanism.planned_queries != tokens:
            raise ValueError(f"tokens must be queries= of mechanism, got {tokens!r}")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--plan must name a file that 'adapmixed plan --save' wrote, got {path}: {error}"
        ) from error
    return found


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
