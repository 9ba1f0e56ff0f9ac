"""Options that commands share, the mechanism that they choose, and the objects built from them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.limits import DEFAULT_ACTIVE, QUESTIONS, check_queries, check_type

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
_SUCH_AS = "such as 'clipped-mixing lower=0.78 upper=2.7'; see 'adapmixed mechanisms'"

LINE_SECONDS = 30.0
"""Seconds between two lines of a progress without a terminal."""

_TYPED = {"memory_bytes": "memory", "stop_strings": "stop"}
"""Arguments in Python whose options have other names."""


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
    found = {one.name: one for one in fields(kind)}
    types: dict[str, Any] = {"int": (int, "N"), "float": (float, "X"), "Path": (Path, "FILE")}
    for name in found if names is None else names.split():
        one, text = found[name], str(found[name].type).removesuffix(" | None")
        given = one.metadata | changes
        if text == "bool":
            given["action"] = "store_true"
        else:
            read, shown = types.get(text, (str, "NAME"))
            shown = None if "choices" in given else shown
            given = {"type": read, "default": one.default, "metavar": shown} | given
        if text.startswith("list"):
            given["action"] = "append"
        if one.default is not None and "(default: " not in given["help"]:
            given["help"] += f" (default: {one.default})"
        target.add_argument(f"--{name.replace('_', '-')}", **given)
    return target


def as_typed(message: str, options: Collection[str]) -> str:
    """Return an error message with the option's name, if there is one, for the argument's."""
    name, _, rest = message.partition(" ")
    option = f"--{_TYPED.get(name) or name.replace('_', '-')}"
    return f"{option} {rest}" if option.split(":")[0] in options else message


def unknown_options(names: Sequence[str]) -> str:
    """Return the error message for options that the command does not have.

    If an option would void the guarantee, the message says why.
    """
    from adapmixed.generation.refused import REASONS

    for name in names:
        option = name.split("=")[0]
        key = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and key in REASONS:
            return f"argument {option}: must not be given: {REASONS[key]}"
    return f"unrecognized arguments: {' '.join(names)}"


def random_source(seed: int | None) -> SecureRandom | SeededRandom:
    """Return a seeded source of randomness, or the operating system's without a seed."""
    from adapmixed.rng import SecureRandom, SeededRandom

    return SecureRandom() if seed is None else SeededRandom(seed)


def memory_bytes(text: str) -> int:
    """Return the bytes of a size such as 512M or 2G."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    number = text[:-1] if unit > 1 else text
    try:
        size = int(float(number) * unit)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 512M or 2G, got {text!r}")
    return size


def _active(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be an integer >= 2 or 'all', got {text!r}")
    return int(text)


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
        type=_active,
        metavar="K",
    )
    ledger: Path | None = option("ledger, which is charged before a token is drawn")
    no_create: bool = option("raise an error if there is no ledger at --ledger")
    memory: int = option(
        "for logits, activations and caches, such as 512M (default: 1G)",
        1 << 30,
        type=memory_bytes,
        metavar="SIZE",
    )
    device: str = option("where models run", "cpu", choices=("cpu", "cuda"))
    dtype: str = option(
        "of the public model: %(choices)s", "float32", choices=DTYPES, metavar="DTYPE"
    )


@dataclass
class MechanismOptions:
    """--plan, and --mechanism, --epsilon, --delta and --adjacency, which it replaces."""

    plan: Path | None = option("of 'adapmixed plan --save', in place of the other options here")
    mechanism: str | None = option(
        f"must be given, or --plan: {_SUCH_AS}", metavar='"NAME KEY=VALUE ..."'
    )
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
    more: dict[str, Any] = {}
    if several:
        more = {"action": "append", "help": f"may be repeated (default: adapmixed): {_SUCH_AS}"}
    add_options(group, MechanismOptions, "mechanism", **more)
    add_options(group, MechanismOptions, "epsilon delta adjacency")


def check_output(name: str, path: Path | None, *, folder: bool = False) -> None:
    """Raise ValueError for an output that cannot be written, before any work is done.

    Args:
        name: the option.
        path: a file, or a folder if ``folder`` is set; None passes.
        folder: whether the path is a folder, which is created.
    """
    if path is None:
        return
    if folder:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ValueError(f"{name} must name a folder, got the file {path}") from None
        target = path
    else:
        if (path.exists() and not path.is_file()) or not path.parent.is_dir():
            raise ValueError(f"{name} must name a file in an existing folder, got {path}")
        target = Path(os.path.realpath(path)).parent  # where it is replaced
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


def say_hub(base: str) -> None:
    """Say that the model hub will be asked for a base, in the main process.

    Raises:
        ValueError: as `check_base`.
    """
    from adapmixed.ensemble.public_model import check_base
    from adapmixed.ranks import Rank

    check_base(base)
    if Rank.from_environment().rank == 0 and not Path(base).is_dir():
        print(f"Base {base!r} is not a folder here; asking the model hub for it.", file=sys.stderr)


def progress_bar(
    total: int, unit: str, *, shown: bool = True
) -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """Return (update(done, total), close) of a progress bar with the time left.

    Without a terminal it is a line every `LINE_SECONDS`. The speed is that since the first update,
    before which a resumed evaluation may have been done in part.
    """
    from tqdm import tqdm

    bar = tqdm(total=total, unit=unit, disable=not (shown and sys.stderr.isatty()), leave=False)
    began = said = time.monotonic()
    first: int | None = None

    def update(done: int, of: int) -> None:
        nonlocal began, said, first
        if first is None or done < bar.n:
            bar.reset(of)
            first = bar.initial = bar.last_print_n = bar.n = done
            began = time.monotonic()
        bar.total = of
        bar.update(done - bar.n)
        bar.n = done
        now = time.monotonic()
        if shown and bar.disable and done > first and now - said >= LINE_SECONDS:
            left = tqdm.format_interval((now - began) * (of - done) / (done - first))
            print(f"{done:,} of {of:,} {unit}s, {left} left", file=sys.stderr, flush=True)
            said = now

    return update, bar.close


def joined_ranks(arguments: argparse.Namespace) -> AbstractContextManager[Ranks]:
    """Join the processes of `torchrun`; GPUs communicate through NCCL.

    Raises:
        ValueError: as `check_device`.
    """
    from adapmixed.ranks import joined

    check_device(arguments)
    return joined(cuda=arguments.device == "cuda")


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
    say_hub(arguments.base)
    found = Ensemble.from_pretrained(
        arguments.base,
        arguments.ensemble,
        dtype=getattr(torch, arguments.dtype),
        device=device,
        ranks=ranks,
    )
    if found.tokenizer is None:
        raise ValueError(f"--base must have a tokenizer, {arguments.base} has none")
    return found


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
    local, found = Rank.from_environment().local_rank, torch.cuda.device_count()
    if local >= found:
        raise ValueError(f"--device cuda needs GPU {local}, but torch finds {found}")


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
    preset, always_planned = given.pop("preset", None), name == "pmixed"
    settings = given if preset is not None else _PAPER.get(name, {}) | given
    if always_planned:
        settings = {"adjacency": way} | settings | {"delta": delta}
    if "queries" in known and "queries" not in given and (epsilon is None or always_planned):
        if ledger:
            budget = "" if always_planned else "--epsilon, for any number of tokens, or "
            raise ValueError(
                f"--ledger needs {budget}queries= in --mechanism {name}, the number of tokens of "
                "all runs: a plan for this run alone would reject a later one"
            )
        settings["queries"] = queries
    if epsilon is not None:
        settings = _UNDER_BUDGET.get(name, {}) | settings
    missing = [key for key, value in known.items() if value == "..." and key not in settings]
    if missing and preset is None:
        raise ValueError(
            f"--mechanism {name} needs {', '.join(missing)} ('adapmixed plan' lists settings for "
            "an epsilon)"
        )
    try:
        make = partial(replace, kind.preset(preset)) if preset is not None else kind
        found: Mechanism = make(**settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--mechanism {name}: {error}") from error
    Accountant(delta, epsilon=epsilon, adjacency=way).bind(found, num_models=1)
    return found


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    try:
        name, *words = shlex.split(text)
    except ValueError:
        raise ValueError(f"--mechanism must be 'NAME KEY=VALUE ...', got {text!r}") from None
    types = types_of(kind_of("--mechanism", name))
    types = {key: types.get(key, "str | None") for key in keys_of(name)}
    return name, settings_of(f"--mechanism {name}", words, types, _GIVEN)


def types_of(kind: Any) -> dict[str, str]:
    """Return the annotations of a dataclass's fields as strings."""
    return {one.name: str(one.type) for one in fields(kind)}


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


def kind_of(option: str, name: str) -> type[Mechanism]:
    """Return the class of a mechanism; raise ValueError, which names the option, for no name."""
    if name not in kinds():
        raise ValueError(f"{option} must be one of {', '.join(kinds())}, got {name!r}")
    return kinds()[name]


def keys_of(name: str) -> dict[str, Any]:
    """Return the keys of a mechanism with their defaults; "..." stands for no default."""
    kind: Any = kinds()[name]
    found: dict[str, Any] = {"preset": None} if name == "adapmixed" else {}
    for one in fields(kind):
        if one.init and one.name not in _GIVEN:
            default = "..." if one.default is MISSING else one.default
            found[one.name] = _PAPER.get(name, {}).get(one.name, default)
    if "queries" in found:
        found["queries"] = "without --epsilon, all queries of the run"
    return found


def read_plan(path: Path) -> tuple[str, str, float, str, int]:
    """Return the entries of a saved plan, and the tokens that it pays for.

    Raises:
        ValueError: the file is no saved plan, has another version, or was changed by hand.
    """
    from adapmixed.ensemble.members import read_versioned

    entries = ("ensemble", "mechanism", "delta", "adjacency")
    try:
        found = read_versioned(path, PLAN_VERSION, *entries)
        known, text, delta, way = (found[name] for name in entries)
        check_type("mechanism", text, str, "a string")
        made = mechanism_of(text, delta=delta, epsilon=None, queries=None, way=way)
        return known, text, delta, way, check_queries(made.planned_queries, "queries of mechanism")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--plan must name a file that 'adapmixed plan --save' wrote, got {path}: {error}"
        ) from error


def take_plan(arguments: argparse.Namespace, *, several: bool = False) -> None:
    """Set the options of mechanism and guarantee to those of --plan, or else to their defaults.

    A command calls this before it loads a model, or makes or charges a ledger. With `several`, its
    --mechanism may be repeated.

    Raises:
        ValueError: as `read_plan`, if another option is given with --plan, or if the plan is of
            another ensemble, or its tokens are spent in --ledger.
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

    known, text, delta, way, tokens = read_plan(file)
    if recorded_fingerprint(folder) != known:
        raise ValueError(
            f"--plan must be of --ensemble {folder} with its present members, got {file} of "
            f"another: 'adapmixed plan --ensemble {folder}' plans for it"
        )
    spent = 0
    if ledger is not None and ledger.is_file():
        spent = read_ledger(ledger, whole=False).account.planned
    if spent >= tokens and vars(arguments).get("when_spent") != "public":
        raise ValueError(
            f"--plan must have tokens left, but all {tokens} of {file} are spent in "
            f"--ledger {ledger}: a new plan needs a new ledger, and its ε and δ add to these"
        )
    arguments.delta, arguments.adjacency = delta, way
    arguments.mechanism = [text] if several else text
