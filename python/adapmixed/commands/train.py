"""``adapmixed train``: train an ensemble on a private corpus.

Give every name of --id-column a member of its own, or divide a corpus into N shards by a keyed hash
of document names, and train one peft adapter for each. After an interruption the same command
continues. Under torchrun the processes take members in turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.ledger import all_ledgers
from adapmixed.commands.options import (
    DTYPES,
    PRESETS,
    SharedOptions,
    add_options,
    option,
    settings_of,
    types_of,
)
from adapmixed.workers import start_server

if TYPE_CHECKING:
    from adapmixed.data import Corpus
    from adapmixed.training import FinetuneConfig
    from adapmixed.training.settings import BaseFacts

NUM_MODELS = 64
ADAPT = "head"  # without a preset
_OF_CORPUS = "text_column chat_column id_column split new_document"  # fields of `Corpus`
_OF_RUN = "base output share_shards device dtype seed threads"  # fields of `TrainingRun`


@dataclass
class TrainOptions:
    """The options of a training; those of the group "ensemble" are of this command alone."""

    revision: str | None = option("commit, tag or branch of a hub name (default: newest)")
    output: Path = option(
        "folder of the ensemble; OUTPUT.private has private files", required=True, metavar="FOLDER"
    )
    preset: str | None = option("the paper's settings: %(choices)s", choices=PRESETS, metavar="SET")
    corpus: str = option(
        "file (.txt, .csv, .jsonl, .parquet), folder of them, builtin, or "
        "hub:NAME[:CONFIG][@REVISION]",
        required=True,
        metavar="SOURCE",
    )
    text_column: str | None = option("column with the text of a row (default: text)")
    chat_column: str | None = option("column with messages, for the base's chat template")
    id_column: str | None = option("column of the name whose rows stay in one shard")
    split: str | None = option(
        "of a hub data set (default: train), or of a folder: train, validation, test or all"
    )
    new_document: str | None = option(
        "matches the first line or row of a document (default: blank lines, or every row)",
        metavar="REGEX",
    )
    epochs: int | None = option("passes over the text")
    learning_rate: float | None = option("largest rate of AdamW, which falls linearly to zero")
    block_size: int | None = option("tokens of a block, at most those of the base's window")
    training: str | None = option(
        "other settings, such as 'rank=4 alpha=32', whose ratio scales the update; the page 'Train "
        "an ensemble' has them all",
        metavar='"KEY=VALUE ..."',
    )
    adapt: str | None = option(
        "head (the output layer), last:K (linear layers of the last K blocks), all, or names with "
        f"commas (default: {ADAPT}, or peft's choice with --preset and of dp-sgd)",
        metavar="LAYERS",
    )
    models: int | None = option(
        f"members, a public constant: places for names (default: {NUM_MODELS}, or the preset's)"
    )
    share_shards: bool = option("hash the names of --id-column to shards, which they may share")
    update: bool = option("train members again whose names came, changed or left")
    seed: int = option("seed of the members' training", 0)
    workers: int = option("processes that train members", 1)
    threads: int = option("threads of each of them", 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_training_options(parser)
    names = "seed models share_shards update workers threads"
    add_options(parser, TrainOptions, names, title="ensemble")


def run(arguments: argparse.Namespace) -> int:
    """Train, and print on standard error which members are finished."""
    if arguments.workers > 1:
        start_server()  # early, since this process imports the same modules for seconds
    corpus = corpus_of(arguments)
    from adapmixed.ranks import joined
    from adapmixed.training.run import TrainingRun, train_ensemble
    from adapmixed.training.settings import PRESETS as SETTINGS
    from adapmixed.training.settings import base_facts

    values = training_of(arguments)
    facts = base_facts(arguments.base, arguments.revision)
    preset = SETTINGS.get(arguments.preset)
    num_models = preset.num_models if preset else NUM_MODELS
    config = _config(arguments, facts, values)
    print(f"Corpus {corpus.name}. What stays in one shard: {corpus.unit}.", file=sys.stderr)
    if corpus.positional:
        print(
            "Its documents have no names of their own: an edit that changes their number or order "
            "can move all later ones to other shards, which every guarantee of the ensemble will "
            "state. Rows with --id-column and folders of text files have names.",
            file=sys.stderr,
        )
    with joined() as ranks:
        if arguments.update and ranks.is_main:
            print("Private:", all_ledgers(arguments.output) or "No ledger known.", file=sys.stderr)
        manifest = train_ensemble(
            TrainingRun(
                **{name: getattr(arguments, name) for name in _OF_RUN.split()},
                corpus=corpus,
                num_models=num_models if arguments.models is None else arguments.models,
                config=config,
                revision=facts.revision,
            ),
            ranks=ranks,
            workers=arguments.workers,
            update=arguments.update,
        )
    if ranks.is_main:
        gone = manifest.members.count(None)
        note = f", {gone} of them withdrawn (null)" if gone else ""
        print(f"wrote {arguments.output}: {len(manifest.members)} members{note}")
    return 0


def _config(
    arguments: argparse.Namespace, facts: BaseFacts, values: Mapping[str, Any]
) -> FinetuneConfig:
    """Return the training settings that are given, else the preset's, else the defaults."""
    from adapmixed.training.settings import HEAD
    from adapmixed.training.settings import PRESETS as SETTINGS

    preset = SETTINGS.get(arguments.preset)
    targets = facts.adapt(arguments.adapt or (None if preset else ADAPT))
    settings = HEAD if facts.targets(targets) == (facts.head,) else {}
    if preset is not None:
        settings = preset.settings
    if {"steps", "epochs"} <= values.keys():
        raise ValueError(f"epochs must not be given with steps, got {values['epochs']}")
    other = {"epochs": 1} if "steps" in values else {"steps": 1} if "epochs" in values else {}
    return config_of(facts, targets, settings | other, values)


def add_training_options(parser: argparse.ArgumentParser, **output: str) -> None:
    """Add the public model, the output, the corpus, and the settings of an adapter's training.

    Args:
        parser: gets the options.
        output: help of --output, if it is no ensemble.
    """
    add_options(parser, SharedOptions, "base")
    add_options(parser, TrainOptions, "revision")
    add_options(parser, TrainOptions, "output", **output)
    add_options(parser, TrainOptions, "preset")
    add_options(parser, SharedOptions, "device")
    add_options(parser, SharedOptions, "dtype", choices=DTYPES[:2])
    group = add_options(parser, TrainOptions, "corpus", title="corpus")
    either = group.add_mutually_exclusive_group()
    add_options(either, TrainOptions, "text_column chat_column")
    add_options(group, TrainOptions, "id_column split new_document")
    names, title = "epochs learning_rate block_size training adapt", "training (defaults come from"
    add_options(parser, TrainOptions, names, title=f"{title} --preset)")


def corpus_of(arguments: argparse.Namespace) -> Corpus:
    """Return the corpus that the options name; a preset gives the default of --new-document."""
    from adapmixed.data import Corpus
    from adapmixed.training.settings import PRESETS as SETTINGS

    corpus = Corpus(arguments.corpus, **_given(arguments, _OF_CORPUS.split()))
    if arguments.preset is None:
        return corpus
    return corpus.with_new_document(SETTINGS[arguments.preset].new_document)


def training_of(arguments: argparse.Namespace, *without: str) -> dict[str, Any]:
    """Return the fields of `FinetuneConfig` that options and --training give, but `without`."""
    from adapmixed.training import FinetuneConfig

    types = types_of(FinetuneConfig)
    flags = {name: f"use --{name.replace('_', '-')}" for name in types if hasattr(arguments, name)}
    other = flags | {"target_modules": "use --adapt"}
    types = {name: types[name] for name in types if name not in (*other, *without)}
    values = settings_of("--training", (arguments.training or "").split(), types, other)
    return values | _given(arguments, flags)


def _given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def config_of(
    facts: BaseFacts,
    targets: tuple[str, ...],
    settings: Mapping[str, Any],
    values: Mapping[str, Any],
) -> FinetuneConfig:
    """Return the settings that are given, else `settings`, else the defaults.

    A block that is not given fits the base's window. `targets` are the names of the adapted layers.

    Raises:
        ValueError: if a value is out of range.
    """
    from adapmixed.training import FinetuneConfig

    config = FinetuneConfig(**{**settings, **values}, target_modules=targets)
    if "block_size" in values or facts.longest_block is None:
        return config
    return replace(config, block_size=min(config.block_size, facts.longest_block))
