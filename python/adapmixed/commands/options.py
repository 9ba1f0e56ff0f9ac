"""Options that commands share, and what they build from them."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.misuse import ANOTHER_LAW, REASONS, RESHAPED

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism
    from adapmixed.rng import SecureRandom, SeededRandom

MECHANISMS = (
    "adapmixed", "pmixed", "clipped-mixing", "clipped-log-pool", "public", "unprotected",
)  # fmt: skip
ADJACENCIES = ("zero_out", "add_remove", "replace_one")
PRESETS = ("wikitext-103", "one-billion-word", "pubmed", "air-dialogue")


def add_mechanism_options(parser: argparse.ArgumentParser) -> None:
    """--mechanism and its settings."""
    group = parser.add_argument_group("mechanism")
    group.add_argument("--mechanism", choices=MECHANISMS, default="adapmixed")
    group.add_argument("--preset", choices=PRESETS, help="the paper's settings (adapmixed)")
    group.add_argument(
        "--order",
        type=float,
        help="Rényi order (adapmixed: 18, pmixed: 3, charges of clipped-mixing under a filter: 8)",
    )
    group.add_argument("--target-leakage", type=float, help="beta (adapmixed: 0.2)")
    group.add_argument(
        "--screen", choices=("noisy", "public", "off"), help="screening (adapmixed: noisy)"
    )
    group.add_argument("--epsilon", type=float, help="budget (pmixed: 8)")
    group.add_argument(
        "--budget-queries",
        type=int,
        help="what the guarantee is for (pmixed, clipped: all queries of this run)",
    )
    group.add_argument("--lower", type=float, help="c (clipped-mixing) or a (clipped-log-pool)")
    group.add_argument("--upper", type=float, help="C (clipped-mixing) or b (clipped-log-pool)")
    group.add_argument("--scale", type=float, help="kappa (clipped-log-pool: 1)")
    group.add_argument(
        "--num-models",
        type=int,
        metavar="N",
        help="divide by a public constant, at least the number of members, so that a missing one "
        "costs what an emptied one does (clipped-log-pool: the number of members)",
    )
    group.add_argument(
        "--top-k", type=int, help="likeliest public tokens kept, before projection (all)"
    )
    group.add_argument(
        "--sure-above",
        type=float,
        help="answer from q alone where it is this sure (clipped: never)",
    )
    group.add_argument("--sample-rate", type=float, help="subsampling rate (pmixed: 1)")
    group.add_argument("--delta", type=float, default=1e-5, help="delta of the guarantee")
    group.add_argument("--rule", choices=("per_model", "paper"), default="per_model")
    add_adjacency_option(group)


def add_adjacency_option(parser: Any) -> None:
    """--adjacency, the neighbours that the guarantee is asked for."""
    parser.add_argument(
        "--adjacency",
        choices=ADJACENCIES,
        help="neighbours of the guarantee (adapmixed: add_remove, all others: zero_out)",
    )


# Arguments of the API that a refusal begins with, and what they are called on the command line.
_TYPED = {
    "memory_bytes": "--memory",
    "max_new_tokens": "--max-new-tokens",
    "stop_strings": "--stop",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "sure_above": "--sure-above",
    "lower": "--lower",
    "upper": "--upper",
    "scale": "--scale",
    "target_leakage": "--target-leakage",
    "sample_rate": "--sample-rate",
    "order": "--order",
    "epsilon": "--epsilon",
    "delta": "--delta",
}


def as_typed(message: str) -> str:
    """A refusal by the API in the words of the command line."""
    name, rest = (*message.split(" ", 1), "")[:2]
    return f"{_TYPED[name]} {rest}" if name in _TYPED else message


class _Refused(argparse.Action):
    """An option of other programs that would void the guarantee: refused with the reason."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        why = REASONS[self.dest]
        if why == RESHAPED:
            why = f"{ANOTHER_LAW}. --temperature and --top-k reshape all rows before projection"
        raise argparse.ArgumentError(self, f"must not be given: {why}")


def add_refused_options(parser: argparse.ArgumentParser) -> None:
    """Greedy decoding, beams, log-probabilities, top-p ...: refused, not shown in help."""
    for name in sorted(
        REASONS.keys() - {"seed", "temperature", "top_k"}
    ):  # ours, with meanings of their own
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, action=_Refused, dest=name, nargs="?", default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )  # fmt: skip


def adjacency_refusal(name: str, adjacency: str | None) -> str | None:
    """Why a mechanism has no guarantee for these neighbours; None where it has one.

    Args:
        name: of the mechanism, as in `MECHANISMS`.
        adjacency: None for those of the mechanism itself.
    """
    allowed, why = "", ""
    if name == "adapmixed" and adjacency == "replace_one":
        allowed, why = "add_remove or zero_out", "a realised loss is about the removal of a model"
    if name == "pmixed" and adjacency not in (None, "zero_out"):
        allowed, why = "zero_out", "its bound compares with an emptied shard"
    if not allowed:
        return None
    return f"--adjacency must be {allowed} for {name}, got {adjacency!r}: {why}"


def mechanism_of(arguments: argparse.Namespace, queries: int) -> "Mechanism":
    """The mechanism that the options describe; an option of another one is refused.

    Args:
        queries: of this run: what PMixED's budget is for unless --budget-queries says otherwise.
    """
    from adapmixed import mechanisms

    name = arguments.mechanism
    adaptive = {
        "order": arguments.order,
        "target_leakage": arguments.target_leakage,
        "screen": arguments.screen,
    }
    fixed = {
        "epsilon": arguments.epsilon,
        "sample_rate": arguments.sample_rate,
    }
    clipped = {name: getattr(arguments, name) for name in ("lower", "upper", "top_k", "sure_above")}
    pooled = {"scale": arguments.scale, "num_models": arguments.num_models}
    if name != "adapmixed":
        _refuse(name, {k: v for k, v in adaptive.items() if k != "order"} | _preset(arguments))
    if name != "pmixed":
        _refuse(name, fixed)
    if not name.startswith("clipped"):
        _refuse(name, clipped)
    if name != "clipped-log-pool":
        _refuse(name, pooled)
    if name not in ("pmixed", "clipped-mixing", "clipped-log-pool"):
        _refuse(name, {"budget_queries": arguments.budget_queries})
    filtered = getattr(arguments, "filter_epsilon", None) is not None
    refusal = adjacency_refusal(name, arguments.adjacency)
    if refusal is not None:
        raise ValueError(refusal)
    if name not in ("pmixed", "adapmixed") and not (filtered and name == "clipped-mixing"):
        _refuse(name, {"order": arguments.order})
    if name.startswith("clipped"):
        for option in ("lower", "upper"):
            if clipped[option] is None:
                raise ValueError(
                    f"--{option} must be given for {name} ('adapmixed plan' says what epsilon buys)"
                )
        if not filtered:
            clipped["queries"] = default_value(arguments.budget_queries, queries)
        if name == "clipped-mixing":
            order = default_value(arguments.order, 8.0) if filtered else None
            return mechanisms.ClippedMixing(**clipped, charge_order=order)
        pooled["scale"] = default_value(arguments.scale, 1.0)
        return mechanisms.ClippedLogPool(**clipped, **pooled)
    if name in ("public", "unprotected"):
        return mechanisms.PublicOnly() if name == "public" else mechanisms.Unprotected()
    if name == "pmixed":
        return mechanisms.PMixED(
            epsilon=default_value(arguments.epsilon, 8.0),
            delta=arguments.delta,
            queries=default_value(arguments.budget_queries, queries),
            order=default_value(arguments.order, 3.0),
            sample_rate=default_value(arguments.sample_rate, 1.0),
        )
    if arguments.preset is not None:
        given = {k: v for k, v in adaptive.items() if v is not None}
        if given:
            _refuse("a preset", given)
        return replace(mechanisms.AdaPMixED.preset(arguments.preset), adjacency=arguments.adjacency)
    screen = default_value(arguments.screen, "noisy")
    return mechanisms.AdaPMixED(
        order=default_value(arguments.order, 18.0),
        target_leakage=default_value(arguments.target_leakage, 0.2),
        screen=None if screen == "off" else screen,
        adjacency=arguments.adjacency,
    )


def _preset(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"preset": arguments.preset}


def default_value(value: Any, default: Any) -> Any:
    """The value of an option, or the default where it was not given."""
    return default if value is None else value


def _refuse(name: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value is not None:
            flag = "--" + option.replace("_", "-")
            why = f": after mixing, {REASONS[option]}" if option in REASONS else ""
            raise ValueError(f"{flag} does not apply to {name}, got {value!r}{why}")


def random_source(seed: int | None) -> "SecureRandom | SeededRandom":
    """Seeded where a seed was given, from the operating system otherwise."""
    from adapmixed.rng import SecureRandom, SeededRandom

    return SecureRandom() if seed is None else SeededRandom(seed)


def memory_bytes(text: str) -> int:
    """A size such as 512M or 2G, in bytes."""
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


def check_output(path: Path | None, *, folder: bool = False) -> None:
    """Refuses an output that could not be written, before any work is done for it.

    Args:
        path: a file, or with ``folder`` a folder, which is created.
    """
    if path is None:
        return
    if folder:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ValueError(f"--out must name a folder, got the file {path}") from None
        target = path
    else:
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"--json must name a file in an existing folder, got {path}")
        target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise ValueError(f"{target} must be writable")


def quiet_libraries() -> None:
    """Off a terminal the libraries' own progress bars stay silent, as ours do."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from transformers.utils import logging

        logging.disable_progress_bar()


def progress_bar(
    total: int, unit: str, *, shown: bool = True
) -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """(update(done, total), close): a bar with the time left, silent off a terminal."""
    from tqdm import tqdm

    bar = tqdm(total=total, unit=unit, disable=not (shown and sys.stderr.isatty()), leave=False)

    def update(done: int, of: int) -> None:
        bar.total = of
        bar.update(done - bar.n)

    return update, bar.close
