"""--mechanism "NAME KEY=VALUE ...", and ``adapmixed mechanisms``, which lists the keys."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism

NAMES = (
    "adapmixed", "pmixed", "clipped-mixing", "clipped-log-pool", "public", "unprotected",
)  # fmt: skip

_PAPER = {"adapmixed": {"order": 18.0, "target_leakage": 0.2}, "pmixed": {"order": 3.0}}
"""Keys that have a default on the command line alone: the paper's."""

_GIVEN = {"delta": "--delta gives it"}
"""Keys of Python that options of their own give."""


def add_mechanism_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add --mechanism, --epsilon, --delta and --adjacency.

    Args:
        several: --mechanism may be repeated.
    """
    group = parser.add_argument_group("mechanism and guarantee")
    group.add_argument(
        "--mechanism",
        action="append" if several else "store",
        default=None if several else "adapmixed",
        metavar='"NAME KEY=VALUE ..."',
        help="such as 'clipped-log-pool lower=-0.25 upper=1 scale=2'; 'adapmixed mechanisms' lists "
        "names and keys" + (" (may be repeated)" if several else "") + " (adapmixed)",
    )
    group.add_argument(
        "--epsilon",
        type=float,
        help="a budget of every shard, for any number of queries (clipped mechanisms)",
    )
    group.add_argument("--delta", type=float, default=1e-5, help="delta of the guarantee (1e-5)")
    group.add_argument(
        "--adjacency",
        choices=("zero_out", "replace_one"),
        default="zero_out",
        help="neighbours of the guarantee (zero_out)",
    )


def add_parser(commands: Any) -> None:
    """Add the command ``mechanisms``."""
    parser = commands.add_parser(
        "mechanisms",
        help="names and keys of --mechanism",
        description="Lists the mechanisms, and the keys of one with their defaults.",
    )
    parser.add_argument("name", nargs="?", choices=NAMES, help="one mechanism (all)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the names, or one mechanism with its keys."""
    for name in NAMES if arguments.name is None else (arguments.name,):
        kind = _classes()[name]
        first = (inspect.getdoc(kind) or "").split("\n\n")[0]
        print(f"{name}: {' '.join(first.split())}")
        if arguments.name is not None:
            for key, default in _keys(name).items():
                print(f"  {key}={'none' if default in (None, ()) else default}")
    return 0


def label_of(text: str) -> str:
    """Return the words of a mechanism with single spaces."""
    return " ".join(shlex.split(text))


def check_charged(mechanism: Mechanism, *, delta: float, epsilon: float | None, way: str) -> None:
    """Raise if no accountant with these settings can be charged for a mechanism, whatever N is.

    Raises:
        ValueError: as `Accountant.bind`.
    """
    from adapmixed.privacy import Accountant

    Accountant(delta, epsilon=epsilon, adjacency=way).bind(mechanism, num_models=1)


def mechanism_of(text: str, *, delta: float, epsilon: float | None, queries: int) -> Mechanism:
    """Return the mechanism that a text describes.

    Args:
        text: "NAME KEY=VALUE ...", the keys of Python's class.
        delta: δ of the guarantee.
        epsilon: of every shard's budget; None without one.
        queries: of this run: what a plan is for unless the text says otherwise.

    Raises:
        ValueError: an unknown name or key, or a value that the mechanism does not take.
    """
    name, given = _parsed(text)
    kind: Any = _classes()[name]
    known = _keys(name)
    preset = given.pop("preset", None)
    if preset is not None:
        return _made(name, lambda: dataclasses.replace(kind.preset(preset), **given))
    settings = _PAPER.get(name, {}) | given
    if "delta" in {one.name for one in dataclasses.fields(kind)}:
        settings["delta"] = delta
    planned = epsilon is None or name == "pmixed"  # which no budget of every shard can replace
    if "queries" in known and "queries" not in given and planned:
        settings["queries"] = queries
    if name == "clipped-mixing" and epsilon is not None:
        settings.setdefault("order", 8.0)
    missing = [key for key, value in known.items() if value == "..." and key not in settings]
    if missing:
        raise ValueError(
            f"--mechanism {name} needs {', '.join(missing)} ('adapmixed plan' says what an epsilon "
            "buys)"
        )
    return _made(name, lambda: kind(**settings))


def _made(name: str, make: Any) -> Mechanism:
    try:
        found: Mechanism = make()
    except (ValueError, TypeError) as error:
        raise ValueError(f"--mechanism {name}: {error}") from error
    return found


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    try:
        name, *pairs = shlex.split(text)
    except ValueError:
        raise ValueError(f"--mechanism must be 'NAME KEY=VALUE ...', got {text!r}") from None
    if name not in NAMES:
        raise ValueError(f"--mechanism must be one of {', '.join(NAMES)}, got {name!r}")
    types, known = _types(name), _keys(name)
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or key in given:
            raise ValueError(f"--mechanism must be 'NAME KEY=VALUE ...', got {pair!r} in {text!r}")
        if key not in known:
            why = _GIVEN.get(key, f"keys are {', '.join(known) or 'none'}")
            raise ValueError(f"--mechanism {name} does not take {key}: {why}")
        given[key] = _value(types.get(key, "str | None"), value)
    return name, given


def _types(name: str) -> dict[str, str]:
    """Return the annotations of a mechanism's settings, as they are written."""
    kind: Any = _classes()[name]
    return {one.name: str(one.type) for one in dataclasses.fields(kind)}


def _value(annotation: str, text: str) -> Any:
    """Return what a text says; one that is not of the type is the mechanism's to reject."""
    types = annotation.split(" | ")
    if annotation.startswith("tuple"):
        return () if text == "none" else tuple(_number(float, part) for part in text.split(","))
    if text == "none" and "None" in types:
        return None
    if "int" in types:
        return _number(int, text)
    # 18 and 18.0 are one setting, and one text in a ledger.
    return _number(float, text) if "float" in types else text


def _number(kind: type[int] | type[float], text: str) -> float | str:
    try:
        return kind(text)
    except ValueError:
        return text


def _classes() -> dict[str, type[Mechanism]]:
    from adapmixed import mechanisms

    kinds = (
        mechanisms.AdaPMixED,
        mechanisms.PMixED,
        mechanisms.ClippedMixing,
        mechanisms.ClippedLogPool,
        mechanisms.PublicOnly,
        mechanisms.Unprotected,
    )
    return {kind.name: kind for kind in kinds}


def _keys(name: str) -> dict[str, Any]:
    """Return the keys of a mechanism with their defaults; "..." for those that must be given."""
    kind: Any = _classes()[name]
    found: dict[str, Any] = {"preset": None} if name == "adapmixed" else {}
    for one in dataclasses.fields(kind):
        if one.init and one.name not in _GIVEN:
            default = "..." if one.default is dataclasses.MISSING else one.default
            found[one.name] = _PAPER.get(name, {}).get(one.name, default)
    if "queries" in found:
        found["queries"] = "all queries of the run, without --epsilon"
    return found
