"""Several methods side by side: --method "NAME key=value ...", each with settings of its own."""

import argparse
import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Never

from adapmixed.commands.filters import add_filter_options, filter_budget_of
from adapmixed.commands.options import (
    add_mechanism_options,
    add_refused_options,
    default_value,
    mechanism_of,
)

if TYPE_CHECKING:
    from adapmixed.privacy import FilterBudget

_SHARED = {"delta", "rule", "adjacency", "operator", "help"}
_WHOLE = {
    "mechanism": "it is the first word",
    "delta": "delta is that of all methods: --delta",
    "release-counts": "counts are released of the mechanism that --mechanism describes",
    "release-sigma": "counts are released of the mechanism that --mechanism describes",
    "operator": "it belongs to the whole evaluation",
}


@dataclass(frozen=True)
class Choice:
    """A method that was asked for.

    Attributes:
        label: its name in tables and files.
        arguments: what `mechanism_of` and `model_filter_of` build it from.
        budget: of its per-model filter, None without one.
    """

    label: str
    arguments: argparse.Namespace
    budget: "FilterBudget | None"


class _Parser(argparse.ArgumentParser):
    """Refuses with a ValueError; the command line as a whole says which command it was."""

    def error(self, message: str) -> Never:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="--method", add_help=False, allow_abbrev=False)
    add_mechanism_options(parser)
    add_filter_options(parser)
    add_refused_options(parser)
    return parser


def add_method_option(parser: argparse.ArgumentParser) -> None:
    """--method; --mechanism then has a default only where no method is given."""
    parser.add_argument(
        "--method",
        action="append",
        default=[],
        metavar='"NAME KEY=VALUE ..."',
        help="one more method on the same windows, may be repeated: keys are the options of the "
        "mechanism and its filter without --, such as 'pmixed epsilon=8 order=3'; --delta, --rule "
        "and --adjacency are the defaults of all",
    )
    parser.set_defaults(mechanism=None)


def choices_of(arguments: argparse.Namespace) -> list[Choice]:
    """The methods asked for, without the public model, which is always there.

    First what --mechanism and its options describe, if any is given or there is no --method, then
    the others in their order. Bad options are refused here, before any model is loaded.
    """
    found: list[tuple[str, argparse.Namespace]] = []
    if not arguments.method or _describes_one(arguments):
        own = argparse.Namespace(**vars(arguments))
        own.mechanism = default_value(arguments.mechanism, "adapmixed")
        found.append((own.mechanism, own))
    for text in arguments.method:
        found.append(_parsed(text, arguments))
    counts = Counter(one.mechanism for _, one in found)
    chosen = []
    for text, one in found:
        budget = filter_budget_of(one)
        mechanism_of(one, queries=1)
        label = one.mechanism if counts[one.mechanism] == 1 else text
        if label != "public":
            chosen.append(Choice(label, one, budget))
    labels = [one.label for one in chosen]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"--method must not be given twice, got {label!r} again")
    return chosen


def _describes_one(arguments: argparse.Namespace) -> bool:
    """Whether an option is given that belongs to one mechanism."""
    own = {action.dest for action in _parser()._actions} - _SHARED
    return any(getattr(arguments, name, None) is not None for name in own)


def _parsed(text: str, shared: argparse.Namespace) -> tuple[str, argparse.Namespace]:
    """(the words with single spaces, options) of one --method."""
    try:
        name, *pairs = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--method must be 'NAME KEY=VALUE ...', got {text!r}") from error
    options = [f"--mechanism={name}"]
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ValueError(f"--method must be 'NAME KEY=VALUE ...', got {pair!r} in {text!r}")
        if key in _WHOLE:
            raise ValueError(f"--method must not set {key}, got {text!r}: {_WHOLE[key]}")
        options.append(f"--{key}={value}")
    parser = _parser()
    parser.set_defaults(delta=shared.delta, rule=shared.rule, adjacency=shared.adjacency)
    try:
        parsed = parser.parse_args(options)
    except ValueError as error:
        raise ValueError(f"--method {text!r}: {error}") from error
    parsed.seed = shared.seed
    return " ".join([name, *pairs]), parsed
