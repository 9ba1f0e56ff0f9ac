"""``adapmixed-lab reproduce``: reproduce the paper's tables and figures.

Run an experiment of the paper, print its tables, and write JSON, of figure2 also SVG and PDF. A
killed run at full scale goes on with the same command. At builtin scale trained adapters are kept.
Results are for the operator: perplexities and data-dependent ε depend on the private data.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import (
    PRESETS,
    SharedOptions,
    add_options,
    check_alone,
    check_device,
    check_output,
    option,
    progress_bar,
)

if TYPE_CHECKING:
    from adapmixed.data import Corpus
    from adapmixed.ensemble import Ensemble
    from adapmixed_lab.reproduce.measure import Reference, Texts

EXPERIMENTS = ("table1", "table2", "figure2")
BASE = "gpt2"
"""The paper's public model, by its hub name."""
TEXTS = {"wikitext-103": "hub:Salesforce/wikitext:wikitext-103-raw-v1"}
"""Evaluation texts on the hub, for the data sets that `datasets` can read there."""


@dataclass(frozen=True)
class Sources:
    """The sources of the inputs; None chooses the scale's own.

    | scale | models | text | DP-SGD |
    | --- | --- | --- | --- |
    | builtin | the demonstration's 64 adapters | its held-out topics | trained here, small |
    | full | those of `adapmixed train --preset` | the test split | `adapmixed-lab dp-sgd` |
    """

    dataset: str = option("data set whose settings are used", PRESETS[0], choices=PRESETS)
    paper: bool = option("put the paper's numbers for the data set next to these")
    scale: str = option(
        "builtin: bundled models and text; full: your own, as in the paper",
        "builtin",
        choices=("builtin", "full"),
    )
    base: str | None = option(f"public model: folder or hub name (default: {BASE})")
    ensemble: Path | None = option("of 'adapmixed train'", nargs="+", metavar="FOLDER")
    text: str | None = option(
        "test text, as --corpus of 'adapmixed train', of the hub its split 'test' (default: "
        "WikiText-103's)"
    )
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.scale == "builtin":
            for name in ("base", "ensemble", "text"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} applies to scale 'full', got {getattr(self, name)} at 'builtin'"
                    )
            return
        if self.ensemble is None:
            raise ValueError(
                f"ensemble must be given at scale 'full': the folder that 'adapmixed train "
                f"--preset {self.dataset}' wrote"
            )
        if self.text is None and self.dataset not in TEXTS:
            raise ValueError(
                f"text must be given at scale 'full' for {self.dataset}: a file, a folder or "
                f"hub:NAME with its test split"
            )

    @property
    def public_model(self) -> str:
        """Folder or hub name of the public model."""
        from adapmixed.data import demo_base

        return str(demo_base()) if self.scale == "builtin" else self.base or BASE

    def load(self, adapters: Path | Sequence[Path]) -> Ensemble:
        """Load the public model with an ensemble folder or with single adapters."""
        import torch

        from adapmixed.ensemble import Ensemble

        dtype = getattr(torch, self.dtype)
        return Ensemble.from_pretrained(
            self.public_model, adapters, dtype=dtype, device=self.device
        )

    def corpus(self) -> Corpus:
        """Return the evaluation text of the full scale."""
        from adapmixed.data import Corpus
        from adapmixed.training import settings

        source = TEXTS[self.dataset] if self.text is None else self.text
        corpus = Corpus(source, split="test" if source.startswith("hub:") else None)
        return corpus.with_new_document(settings.PRESETS[self.dataset].new_document)


@dataclass
class ReproduceOptions:
    """The options of this command alone."""

    out: Path = option("folder for the results", Path("reproduction"), metavar="FOLDER")
    seed: int = option("seed of the evaluation's randomness", 0)
    seeds: int | None = option(
        "trainings with divisions of their own, over which results are means (default: 1; at full "
        "scale the number of --ensemble)"
    )
    queries: int | None = option("queries of one run")
    runs: int | None = option("runs of the first part of table1 (default: 8)")
    long_queries: int | None = option("queries of table1's long run; 0: none")
    references: Path | None = option(
        "folders of 'adapmixed-lab dp-sgd', one for a record and one for a name, and of "
        "'adapmixed train --models 1' over the text of all shards; without a folder these lines "
        "are left out (builtin scale: all are trained here)",
        nargs="*",
        metavar="FOLDER",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "experiment",
        help=f"{', '.join(EXPERIMENTS)}, or the JSON file of one, to write its tables "
        "and files again",
    )
    add_options(parser, Sources, "dataset paper scale")
    add_options(parser, ReproduceOptions, "out seed seeds references")
    add_options(parser, SharedOptions, "device dtype")
    title = "size (defaults: the paper's)"
    add_options(parser, ReproduceOptions, "queries runs long_queries", title=title)
    add_options(parser, Sources, "base ensemble text", title="inputs of --scale full")


def run(arguments: argparse.Namespace) -> int:
    """Run the experiment, print its tables, write its files."""
    started = time.perf_counter()
    if arguments.experiment not in EXPERIMENTS:
        return _redraw(Path(arguments.experiment), arguments.out)
    _refuse(arguments)
    check_device(arguments)
    from adapmixed_lab.reproduce.measure import load_inputs, merge

    ensembles = arguments.ensemble or [None] * (arguments.seeds or 1)
    values = {field.name: getattr(arguments, field.name) for field in fields(Sources)}
    check_output("--out", arguments.out, folder=True)
    update = progress_bar("token")
    results = []
    for seed, ensemble in enumerate(ensembles):
        sources = Sources(**values | {"ensemble": ensemble})
        # At builtin scale an experiment of the paper takes minutes, so a killed one starts again.
        keep = arguments.out / f"training-{seed}" if sources.scale == "full" else None
        check_output("--out", keep, folder=True)
        run: dict[str, Any] = {"seed": arguments.seed, "keep": keep, "progress": update}
        inputs = load_inputs(sources, arguments.out, seed, **run)
        results.append(_experiment(arguments, inputs, seed))
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
    numbers = {name: value for name, value in sizes.items() if value is not None}
    # A text that is too short for Table 1 raises before references are trained.
    parts = parts_of(inputs, **numbers) if arguments.experiment == "table1" else []
    lines = [*_references(arguments, inputs.sources.public_model, seed)]
    inputs = replace(inputs, references=dict(lines))
    if len(inputs.references) < len(lines):
        raise ValueError(f"--references must have one of a kind, got {[name for name, _ in lines]}")
    if arguments.experiment == "table2":
        return table2(inputs, **numbers)
    if arguments.experiment == "figure2":
        return figure2(inputs, **numbers)
    return table1(inputs, parts)


def _references(
    arguments: argparse.Namespace, base: str, seed: int
) -> Iterator[tuple[str, Reference]]:
    """Yield the adapters by the names of their lines: given ones, or trained at builtin scale."""
    from adapmixed.ensemble import read_manifest
    from adapmixed.training.demo import train_whole
    from adapmixed.training.shards import TrainingFolder
    from adapmixed_lab.dp_sgd import GUARANTEE_FILE
    from adapmixed_lab.reproduce.measure import EPSILON, WHOLE, builtin_dp_adapter, dp_line

    out = arguments.out
    if arguments.references is None and arguments.scale == "builtin":
        yield WHOLE, (train_whole(out, base, seed=seed), {})
        ensemble = out / (f"ensemble-{seed}" if seed else "ensemble")
        secret = TrainingFolder(ensemble, 0).key_file
        units = {"block": None, f"shard-{seed}": secret} if arguments.experiment == "table1" else {}
        for unit, key in units.items():
            folder = out / f"dp-sgd-builtin-{unit}-{EPSILON:g}"
            builtin_dp_adapter(folder, base, key=key, progress=progress_bar("step"))
            yield dp_line(folder)
    for folder in arguments.references or []:
        if (folder / GUARANTEE_FILE).exists():
            yield dp_line(folder)
        elif len(read_manifest(folder).members) == 1:
            yield WHOLE, (folder, {})
        else:
            raise ValueError(f"--references must have ensembles of one member, got {folder}")


def _refuse(arguments: argparse.Namespace) -> None:
    """Raise ValueError for options of another experiment, and for several processes."""
    check_alone("reproduce")
    for name in ("runs", "long_queries"):
        value = getattr(arguments, name)
        if value is not None and arguments.experiment != "table1":
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} does not apply to {arguments.experiment}, got {value}")
    if arguments.seeds is not None and (arguments.seeds < 1 or arguments.scale == "full"):
        raise ValueError(f"--seeds must be >= 1 and at builtin scale, got {arguments.seeds}")
