"""Options that commands share, the mechanism that they choose, and the objects built from them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.limits import (
    DEFAULT_ACTIVE,
    QUESTIONS,
    check_active,
    check_count,
    check_option,
    check_queries,
    check_type,
)

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble
    from adapmixed.mechanisms import Mechanism
    from adapmixed.ranks import Ranks
    from adapmixed.rng import SecureRandom, SeededRandom

DTYPES = ("float32", "bfloat16", "float16")
PRESETS = ("wikitext-103", "one-billion-word", "pubmed", "air-dialogue")
"""The paper's data sets, which name its presets."""

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

PLAN_VERSION = 2  # of a saved plan
SUCH_AS = "such as 'clipped-mixing lower=0.78 upper=2.7'; see 'adapmixed mechanisms'"

LINE_SECONDS = 30.0
"""Seconds between two writings of a progress bar without a terminal."""


def option(help: str, default: Any = None, **more: Any) -> Any:
    """Return a field of a dataclass of options.

    Args:
        help: what `--help` says. Unless it names the default, that is added.
        default: the value if the option is not given.
        more: further arguments of `add_argument`.
    """
    return field(default=default, metadata={"help": help, **more})


def add_options(
    parser: argparse._ActionsContainer,
    kind: type,
    names: str | None = None,
    *,
    title: str | None = None,
    **changes: Any,
) -> argparse._ActionsContainer:
    """Add an option for fields of a dataclass, by the field's name, type and default.

    A bool is a flag, and what is a list may be repeated. A value is shown as N, X, FILE or NAME.

    Args:
        parser: gets the options.
        kind: a dataclass whose fields `option` has made.
        names: names of the fields, with blanks between them; None for all.
        title: title of a group of these options; None for no group.
        changes: arguments of `add_argument` that are not those of the fields.

    Returns:
        the group, or the parser.
    """
    target = parser if title is None else parser.add_argument_group(title)
    entries = {entry.name: entry for entry in fields(kind)}
    types: dict[str, Any] = {"int": (int, "N"), "float": (float, "X"), "Path": (Path, "FILE")}
    for name in entries if names is None else names.split():
        entry, text = entries[name], str(entries[name].type).removesuffix(" | None")
        keywords = entry.metadata | changes
        if text == "bool":
            keywords["action"] = "store_true"
        else:
            read, shown = types.get(text, (str, "NAME"))
            shown = None if "choices" in keywords else shown
            keywords = {"type": read, "default": entry.default, "metavar": shown} | keywords
        if text.startswith("list"):
            keywords["action"] = "append"
        if entry.default is not None and "(default: " not in keywords["help"]:
            keywords["help"] += f" (default: {entry.default})"
        target.add_argument(f"--{name.replace('_', '-')}", **keywords)
    return target


def as_typed(message: str, options: Collection[str]) -> str:
    """Return an error message with the option's name, if there is one, for the argument's."""
    name, _, rest = message.partition(" ")
    option = f"--{name.removesuffix('_bytes').removesuffix('_strings').replace('_', '-')}"
    return f"{option} {rest}" if option in options else message


def random_source(seed: int | None) -> SecureRandom | SeededRandom:
    """Return a seeded source of randomness, or the operating system's without a seed."""
    from adapmixed.rng import SecureRandom, SeededRandom

    return SecureRandom() if seed is None else SeededRandom(seed)


def size(text: str) -> int:
    """Return the bytes of a size such as 512M or 2G."""
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    return check_count("memory", int(text[:-1] if shift else text) << shift)


def active(text: str) -> int | None:
    """Return K of an active vocabulary; None for 'all'."""
    return None if text == "all" else check_active(int(text))


@dataclass
class SharedOptions:
    """Options of several commands."""

    base: str = option("public model: folder or hub name", required=True)
    ensemble: str = option("folder of the ensemble", required=True, metavar="FOLDER")
    max_new_tokens: int = option("most tokens of an answer", 64)
    temperature: float = option("of every model, before the mechanism (default: 1)", 1.0)
    top_k: int | None = option("likeliest public tokens that are kept (default: all)")
    active: int | None = option(
        "likeliest public tokens about which members speak, or 'all'",
        DEFAULT_ACTIVE,
        type=active,
        metavar="K",
    )
    ledger: Path | None = option("ledger, which is charged before a token is drawn")
    no_create: bool = option("raise an error if there is no ledger at --ledger")
    memory: int = option(
        "for logits, activations and caches, such as 512M (default: 1G)",
        1 << 30,
        type=size,
        metavar="SIZE",
    )
    device: str = option("where models run", "cpu", choices=("cpu", "cuda"))
    dtype: str = option(
        "of the public model: %(choices)s", "float32", choices=DTYPES, metavar="DTYPE"
    )


@dataclass
class MechanismOptions:
    """--plan, and the options of a mechanism and its guarantee, which it replaces."""

    plan: Path | None = option("of 'adapmixed plan --save', in place of the other options here")
    mechanism: str | None = option(
        f"must be given, or --plan: {SUCH_AS}", metavar='"NAME KEY=VALUE ..."'
    )
    epsilon: float | None = option("budget of every shard, for any number of tokens")
    delta: float | None = option("delta of the guarantee (default: 1e-5)")
    adjacency: str | None = option(
        "a shard is emptied, or its records change: %(choices)s (default: zero_out)",
        choices=QUESTIONS,
        metavar="WAY",
    )


def check_output(name: str, path: Path | None, *, folder: bool = False) -> None:
    """Raise an error for an output that cannot be written, before any work is done.

    Args:
        name: the option.
        path: a file, or a folder if ``folder`` is set; None passes.
        folder: whether the path is a folder, which is created.
    """
    if path is None:
        return
    if folder:
        path.mkdir(parents=True, exist_ok=True)
    elif (path.exists() and not path.is_file()) or not path.parent.is_dir():
        raise ValueError(f"{name} must name a file in an existing folder, got {path}")
    target = path if folder else Path(os.path.realpath(path)).parent  # where it is replaced
    if not os.access(target, os.W_OK):
        raise ValueError(f"{name} must be writable, got {target}")


def laboratory(module: str) -> Any:
    """Return a module of the laboratory that writes a page, which draws with matplotlib.

    Raises:
        ValueError: if matplotlib is missing.
    """
    from adapmixed.errors import missing_extra

    try:
        return import_module(f"adapmixed_lab.{module}")
    except ModuleNotFoundError as error:
        raise missing_extra("the report's page", "matplotlib", "lab", error) from error


def columns(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Return lines of cells; columns after the first `left` are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [*zip(row, widths, strict=True)]
        sides = [text.ljust(width) for text, width in cells[:left]]
        sides += [text.rjust(width) for text, width in cells[len(sides) :]]
        lines.append("  ".join(sides).rstrip())
    return "\n".join(lines)


def check_alone(command: str) -> None:
    """Raise ValueError if this process is one of several of `torchrun`."""
    from adapmixed.ranks import Rank

    if (world := Rank.from_environment().world) > 1:
        raise ValueError(f"{command} must run in one process, got {world} ranks")


def progress_bar(unit: str) -> Callable[[int, int], None]:
    """Return update(done, total) of a progress bar with the time left, which ends with the work.

    Without a terminal it is written every `LINE_SECONDS`. The speed is that since the first update,
    before which a resumed evaluation may have been done in part.
    """
    from tqdm import tqdm

    bar = tqdm(disable=True)
    every = 0.1 if sys.stderr.isatty() else LINE_SECONDS

    def update(done: int, total: int) -> None:
        nonlocal bar
        if bar.total != total or done < bar.n:
            bar.close()
            bar = tqdm(
                total=total, initial=done, unit=unit, leave=False, mininterval=every, delay=every
            )
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return update


def load_ensemble(arguments: argparse.Namespace, ranks: Ranks) -> Ensemble:
    """Load --base and --ensemble on the requested device.

    Raises:
        ValueError: as `check_device`, or if the base has no tokenizer.
    """
    check_device(arguments)
    import torch

    from adapmixed.ensemble import Ensemble
    from adapmixed.ranks import Rank

    device = "cpu" if arguments.device == "vllm" else arguments.device
    if device == "cuda":
        device = f"cuda:{Rank.from_environment().local_rank}"
        torch.cuda.set_device(device)  # NCCL uses the current device
    ensemble = Ensemble.from_pretrained(
        arguments.base,
        arguments.ensemble,
        dtype=getattr(torch, arguments.dtype),
        device=device,
        ranks=ranks,
    )
    if ensemble.tokenizer is None:
        raise ValueError(f"--base must have a tokenizer, {arguments.base} has none")
    return ensemble


def check_device(arguments: argparse.Namespace) -> None:
    """Raise ValueError if --device cuda is given without a GPU or without CUDA kernels."""
    if arguments.device != "cuda":
        return
    import torch

    from adapmixed.ranks import Rank
    from adapmixed_ext import build_info

    if not build_info()["cuda"]:
        raise ValueError(
            "--device cuda needs adapmixed_ext built with CUDA, this build has no CUDA kernels "
            '(see "CUDA" in the documentation)'
        )
    local, count = Rank.from_environment().local_rank, torch.cuda.device_count()
    if local >= count:
        raise ValueError(f"--device cuda needs GPU {local}, but torch finds {count}")


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

    try:
        name, *words = shlex.split(text or "")
    except ValueError:
        raise ValueError(
            "--mechanism must be 'NAME KEY=VALUE ...' ('adapmixed mechanisms' lists them), unless "
            f"--plan is given, got {text!r}"
        ) from None
    check_option("--mechanism", name, tuple(kinds()))
    kind: Any = kinds()[name]
    keys, types = keys_of(name), types_of(kind)
    types = {key: types.get(key, "str | None") for key in keys}
    values = settings_of(f"--mechanism {name}", words, types, _GIVEN)
    preset, always_planned = values.pop("preset", None), name == "pmixed"
    settings = values if preset is not None else _PAPER.get(name, {}) | values
    if always_planned:
        settings = {"adjacency": way} | settings | {"delta": delta}
    if "queries" in keys and "queries" not in values and (epsilon is None or always_planned):
        if ledger:
            budget = "" if always_planned else "--epsilon, for any number of tokens, or "
            raise ValueError(
                f"--ledger needs {budget}queries= in --mechanism {name}, the number of tokens of "
                "all runs: a plan for this run alone would reject a later one"
            )
        settings["queries"] = queries
    if epsilon is not None:
        settings = _UNDER_BUDGET.get(name, {}) | settings
    try:
        make = partial(replace, kind.preset(preset)) if preset is not None else kind
        mechanism: Mechanism = make(**settings)
    except (ValueError, TypeError) as error:  # a TypeError begins with the name of __init__
        raise ValueError(f"--mechanism {name}: {str(error).split('__init__() ')[-1]}") from error
    Accountant(delta, epsilon=epsilon, adjacency=way).bind(mechanism, num_models=1)
    return mechanism


def types_of(kind: Any) -> dict[str, str]:
    """Return the annotations of a dataclass's fields as strings."""
    return {entry.name: str(entry.type) for entry in fields(kind)}


def settings_of(
    option: str, words: Sequence[str], types: Mapping[str, str], elsewhere: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of an option's words KEY=VALUE, by the annotations of its keys.

    Raises:
        ValueError: if a key is repeated or unknown, for which `elsewhere` may have the reason, or
            if its value is of another type.
    """
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key or key in values:
            raise ValueError(f"{option} must have KEY=VALUE once for every key, got {word!r}")
        if key not in types:
            why = elsewhere.get(key, f"keys are {', '.join(types) or 'none'}")
            raise ValueError(f"{option} does not take {key}: {why}")
        values[key] = _value(f"{option}: {key}", types[key], text)
    return values


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

    exports = (getattr(mechanisms, name) for name in mechanisms.__all__)
    return {kind.name: kind for kind in exports if hasattr(kind, "name")}


def keys_of(name: str) -> dict[str, Any]:
    """Return the keys of a mechanism with their defaults; "..." stands for no default."""
    kind: Any = kinds()[name]
    keys: dict[str, Any] = {"preset": None} if name == "adapmixed" else {}
    for entry in fields(kind):
        if entry.init and entry.name not in _GIVEN:
            default = "..." if entry.default is MISSING else entry.default
            keys[entry.name] = _PAPER.get(name, {}).get(entry.name, default)
    if "queries" in keys:
        keys["queries"] = "without --epsilon, all queries of the run"
    return keys


def read_plan(path: Path) -> tuple[str, str, float, str]:
    """Return the entries of a saved plan.

    Raises:
        ValueError: the file is no saved plan, has another version, or was changed by hand.
    """
    from adapmixed.ensemble.members import read_versioned

    entries = ("ensemble", "mechanism", "delta", "adjacency")
    try:
        plan = read_versioned(path, PLAN_VERSION, *entries)
        fingerprint, text, delta, way = (plan[name] for name in entries)
        check_type("mechanism", text, str, "a string")
        mechanism = mechanism_of(text, delta=delta, epsilon=None, queries=None, way=way)
        check_queries(mechanism.planned_queries, "queries of mechanism")
        return fingerprint, text, delta, way
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--plan must name a file that 'adapmixed plan --save' wrote, got {path}: {error}"
        ) from error


def take_plan(arguments: argparse.Namespace) -> None:
    """Set the options of mechanism and guarantee to those of --plan, or else to their defaults.

    A command calls this before it loads a model, or makes or charges a ledger.

    Raises:
        ValueError: as `read_plan`, or if another option is given with --plan, or if the plan is of
            another ensemble.
    """
    file, folder = arguments.plan, arguments.ensemble
    if file is None:
        arguments.delta = 1e-5 if arguments.delta is None else arguments.delta
        arguments.adjacency = arguments.adjacency or "zero_out"
        return
    for name in ("mechanism", "epsilon", "delta", "adjacency"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} must not be given with --plan, which has it: leave one out")
    from adapmixed.ensemble.members import recorded_fingerprint

    fingerprint, text, delta, way = read_plan(file)
    if recorded_fingerprint(folder) != fingerprint:
        raise ValueError(
            f"--plan must be of --ensemble {folder} with its present members, got {file} of "
            f"another: 'adapmixed plan --ensemble {folder}' plans for it"
        )
    arguments.mechanism, arguments.delta, arguments.adjacency = text, delta, way
