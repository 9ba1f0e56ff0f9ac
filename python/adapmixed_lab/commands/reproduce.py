"""``adapmixed-lab reproduce``: reproduce the paper's tables and figures.

Run an experiment of the paper, print its tables, and write JSON, of figure2 also SVG and PDF. A
killed run at full scale goes on with the same command. At builtin scale trained adapters are kept.
Results are for the operator: perplexities and data-dependent ε depend on the private data.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import (
    SharedOptions,
    add_options,
    check_alone,
    check_device,
    check_output,
    option,
    progress_bar,
    quiet_libraries,
)
from adapmixed_lab.reproduce.sources import Sources

if TYPE_CHECKING:
    from adapmixed_lab.reproduce.dp_adapter import DPAdapter
    from adapmixed_lab.reproduce.measure import Texts

EXPERIMENTS = ("table1", "table2", "figure2")


@dataclass
class ReproduceOptions:
    """The options of this command alone."""

    out: Path = option("folder for the results", Path("reproduction"))
    seed: int = option("seed of the evaluation's randomness", 0)
    seeds: int | None = option(
        "trainings with divisions of their own, over which results are means (default: 1; at full "
        "scale the number of --ensemble)"
    )
    queries: int | None = option("queries of one run")
    runs: int | None = option("runs of the first part of table1 (default: 8)")
    long_queries: int | None = option("queries of table1's long run; 0: none")
    dp_adapter: Path | None = option(
        "folders of 'adapmixed-lab dp-sgd', for a record or a name (builtin scale: both are "
        "trained here)",
        nargs="+",
    )
    without_dp_sgd: bool = option("leave out DP-SGD")
    one_adapter: Path | None = option(
        "folder of 'adapmixed train --models 1' over the text of all shards (builtin scale: "
        "trained here)",
        metavar="ENSEMBLE",
    )
    without_one_adapter: bool = option("leave it out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "experiment",
        help=f"{', '.join(EXPERIMENTS)}, or the JSON file of one, to write its tables "
        "and files again",
    )
    add_options(parser, Sources, "dataset paper scale")
    add_options(parser, ReproduceOptions, "out seed seeds")
    add_options(parser, SharedOptions, "device dtype")
    groups: dict[str, tuple[type, str]] = {
        "size (defaults: the paper's)": (ReproduceOptions, "queries runs long_queries"),
        "inputs of --scale full": (Sources, "base ensemble text text_column split"),
        "DP-SGD (table1)": (ReproduceOptions, "dp_adapter without_dp_sgd"),
        "one adapter, all text": (ReproduceOptions, "one_adapter without_one_adapter"),
    }
    for title, (kind, names) in groups.items():
        add_options(parser, kind, names, title=title)


def run(arguments: argparse.Namespace) -> int:
    """Run the experiment, print its tables, write its files."""
    started = time.perf_counter()
    if arguments.experiment not in EXPERIMENTS:
        return _redraw(Path(arguments.experiment), arguments.out)
    _refuse(arguments)
    quiet_libraries()
    check_device(arguments)
    from adapmixed_lab.reproduce.measure import load_inputs, merge

    ensembles = arguments.ensemble or [None] * (arguments.seeds or 1)
    given = {field.name: getattr(arguments, field.name) for field in fields(Sources)}
    check_output("--out", arguments.out, folder=True)
    update, close = progress_bar(0, "token")
    results = []
    for seed, ensemble in enumerate(ensembles):
        sources = Sources(**given | {"ensemble": ensemble})
        # At builtin scale an experiment of the paper takes minutes, so a killed one starts again.
        keep = arguments.out if sources.scale == "full" else None
        if keep is not None and seed:
            keep = keep / f"training-{seed}"
            keep.mkdir(parents=True, exist_ok=True)
        run: dict[str, Any] = {"seed": arguments.seed, "keep": keep, "progress": update}
        inputs = load_inputs(sources, arguments.out, seed, **run)
        results.append(_experiment(arguments, inputs, seed))
    close()
    _show(merge(results), arguments.out)
    print(f"took {time.perf_counter() - started:.0f} s")
    return 0


def _redraw(path: Path, out: Path) -> int:
    """Print the tables of a result file and write its files again, without models."""
    from adapmixed_lab.reproduce.result import read_experiment

    if not path.is_file():
        raise ValueError(
            f"experiment must be one of {', '.join(EXPERIMENTS)} or a result file, got {path}"
        )
    check_output("--out", out, folder=True)
    try:
        _show(read_experiment(path), out)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} must be an unchanged result file: {what}") from error
    return 0


def _show(result: dict[str, Any], out: Path) -> None:
    """Print the tables of a result and write its files."""
    from adapmixed_lab.reproduce.figure2 import write_outputs
    from adapmixed_lab.reproduce.result import text

    print(text(result))
    for written in write_outputs(result, out):
        print(f"wrote {written}")


def _experiment(arguments: argparse.Namespace, inputs: Texts, seed: int) -> dict[str, Any]:
    from adapmixed_lab.reproduce.figure2 import figure2
    from adapmixed_lab.reproduce.tables import parts_of, table1, table2

    sizes = {name: getattr(arguments, name) for name in ("queries", "runs", "long_queries")}
    given = {name: value for name, value in sizes.items() if value is not None}
    # A text that is too short for Table 1 raises before references are trained.
    parts = parts_of(inputs, **given) if arguments.experiment == "table1" else []
    inputs = replace(inputs, whole=_one_adapter(arguments, inputs.sources, seed))
    if arguments.experiment == "table2":
        return table2(inputs, **given)
    if arguments.experiment == "figure2":
        return figure2(inputs, **given)
    return table1(inputs, _dp_adapters(arguments, inputs, seed), parts)


def _dp_adapters(arguments: argparse.Namespace, inputs: Texts, seed: int) -> list[DPAdapter]:
    """Return the given adapters, or at builtin scale train them; none to leave DP-SGD out."""
    from adapmixed.training.folder import TrainingFolder
    from adapmixed_lab.reproduce.dp_adapter import EPSILON, builtin_dp_adapter, read_dp_adapter
    from adapmixed_lab.reproduce.paper import DELTA

    if arguments.without_dp_sgd:
        return []
    if arguments.dp_adapter is not None:
        adapters = [read_dp_adapter(folder) for folder in arguments.dp_adapter]
        for adapter in adapters:
            if (delta := adapter.guarantee.delta) != DELTA:
                raise ValueError(
                    f"--dp-adapter must have its ε at δ = {DELTA:g}, as the tables do, got one at "
                    f"{delta:g}"
                )
        if len({adapter.line for adapter in adapters}) < len(adapters):
            raise ValueError("--dp-adapter must be one for a record, one for a name, or both")
        return adapters
    if arguments.scale == "full":
        raise ValueError(
            "--dp-adapter or --without-dp-sgd must be given at --scale full, got neither; "
            "'adapmixed-lab dp-sgd' writes an adapter"
        )
    ensemble = arguments.out / (f"ensemble-{seed}" if seed else "ensemble")
    adapters = []
    for unit, key in (("block", None), (f"shard-{seed}", TrainingFolder(ensemble, 0).key_file)):
        folder = arguments.out / f"dp-sgd-builtin-{unit}-{EPSILON:g}"
        update, close = progress_bar(0, "step")
        base = inputs.sources.public_model
        adapters.append(builtin_dp_adapter(folder, base, key=key, progress=update))
        close()
    return adapters


def _one_adapter(arguments: argparse.Namespace, sources: Sources, seed: int) -> Path | None:
    """Return the given ensemble of one, or at builtin scale train it; None at full scale."""
    from adapmixed.ensemble import read_manifest
    from adapmixed.training.demo import train_whole

    given: Path | None = arguments.one_adapter
    if given is not None:
        count = len(read_manifest(given).members)
        if count != 1:
            raise ValueError(f"--one-adapter must be an ensemble of one member, got {count}")
        return given
    if arguments.without_one_adapter or arguments.scale == "full":
        return None
    return train_whole(arguments.out, sources.public_model, seed=seed)


def _refuse(arguments: argparse.Namespace) -> None:
    """Raise ValueError for options of another experiment, and for several processes."""
    check_alone("reproduce")
    for name in ("runs", "long_queries", "dp_adapter", "without_dp_sgd"):
        value = getattr(arguments, name)
        if value not in (None, False) and arguments.experiment != "table1":
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} does not apply to {arguments.experiment}, got {value}")
    if arguments.seeds is not None and (arguments.seeds < 1 or arguments.scale == "full"):
        raise ValueError(f"--seeds must be >= 1 and at builtin scale, got {arguments.seeds}")
    if arguments.without_one_adapter and arguments.one_adapter is not None:
        raise ValueError(
            f"--without-one-adapter excludes --one-adapter, got {arguments.one_adapter}"
        )
    if arguments.without_dp_sgd and arguments.dp_adapter is not None:
        raise ValueError(f"--without-dp-sgd excludes --dp-adapter, got {arguments.dp_adapter}")
