"""``adapmixed train``: train an ensemble of adapters on a corpus."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import add_options, option, quiet_libraries
from adapmixed.commands.serving import all_ledgers
from adapmixed.commands.training import (
    add_adapter_options,
    add_corpus_options,
    add_model_options,
    config_of,
    corpus_of,
    facts_of,
    training_of,
)
from adapmixed.workers import start_server

if TYPE_CHECKING:
    from adapmixed.training import FinetuneConfig
    from adapmixed.training.base import BaseFacts
    from adapmixed.training.settings import TrainingPreset

NUM_MODELS = 64
ADAPT = "head"  # without a preset
_OF_RUN = "base output share_shards key_file device dtype seed threads"  # fields of `TrainingRun`


@dataclass
class TrainOptions:
    """The options of this command alone."""

    models: int | None = option(
        "members, a public constant (default: the preset's, or a fifth more than there are names, "
        f"in tens, or {NUM_MODELS} without --id-column)"
    )
    share_shards: bool = option("hash the names of --id-column to shards, which they may share")
    key_file: Path | None = option(
        "key of the division, 64 hex digits (default: OUTPUT.private/shard.key, which is made)"
    )
    update: bool = option("train members again whose names came, changed or left")
    workers: int = option("processes that train members", 1)
    threads: int = option("threads of each of them", 1)


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train",
        help="train an ensemble on a private corpus",
        description="Give every name of --id-column a member of its own, or divide a corpus into N "
        "shards by a keyed hash of document names, and train one peft adapter for each. After an "
        "interruption the same command continues. Under torchrun the processes take members in "
        "turn.",
    )
    add_model_options(parser, output="folder of the ensemble; OUTPUT.private has private files")
    told = "seed of the members' training (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=told)
    add_corpus_options(parser)
    add_options(parser, TrainOptions, title="ensemble")
    add_adapter_options(
        parser,
        adapt=f"{ADAPT}, or with --preset peft's choice",
        more="; steps, the least of each member, with which --epochs is 1; shared_a=yes to train "
        "B alone; validation_fraction, the share of names held out (0.05); early_stopping=yes to "
        "keep the epoch that is best on them",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, and print on standard error which members are finished."""
    if arguments.workers > 1:
        start_server()  # early, since this process imports the same modules for seconds
    corpus = corpus_of(arguments)
    quiet_libraries()
    from adapmixed.ranks import Rank
    from adapmixed.training.run import TrainingRun, train_ensemble
    from adapmixed.training.settings import PRESETS

    training = training_of(arguments, validation_fraction="float")
    held_out = training.pop("validation_fraction", 0.05)
    facts = facts_of(arguments)
    preset = PRESETS.get(arguments.preset)
    config = _config(arguments, facts, training)
    print(f"Corpus {corpus.name}. What stays in one shard: {corpus.unit}.", file=sys.stderr)
    if corpus.positional:
        print(
            "Its documents have no names of their own: an edit that changes their number or order "
            "can move all later ones to other shards, which every guarantee of the ensemble will "
            "state. Rows with --id-column and folders of text files have names.",
            file=sys.stderr,
        )
    place = Rank.from_environment()
    if arguments.update and place.rank == 0:
        print("Private:", all_ledgers(arguments.output) or "No ledger known.", file=sys.stderr)
    manifest = train_ensemble(
        TrainingRun(
            **{name: getattr(arguments, name) for name in _OF_RUN.split()},
            corpus=corpus,
            num_models=_num_models(arguments, preset),
            config=config,
            revision=facts.revision,
            validation_fraction=held_out,
        ),
        place=place,
        workers=arguments.workers,
        update=arguments.update,
    )
    if place.rank == 0:
        gone = manifest.members.count(None)
        note = f", {gone} of them withdrawn (null)" if gone else ""
        print(f"wrote {arguments.output}: {len(manifest.members)} members{note}")
    return 0


def _num_models(arguments: argparse.Namespace, preset: TrainingPreset | None) -> int | None:
    if arguments.models is not None:
        return int(arguments.models)
    if preset is not None:
        return preset.num_models
    return None if arguments.id_column and not arguments.share_shards else NUM_MODELS


def _config(
    arguments: argparse.Namespace, facts: BaseFacts, training: dict[str, Any]
) -> FinetuneConfig:
    """Return the training settings from the options, else the preset, else the defaults."""
    from adapmixed.training.settings import HEAD, PRESETS

    preset = PRESETS.get(arguments.preset)
    targets = facts.adapt(arguments.adapt or (None if preset else ADAPT))
    settings: dict[str, Any] = {}
    if preset is not None:
        settings = preset.finetune_settings()
    elif facts.targets(targets) == (facts.head,):
        settings = HEAD
    if "steps" in training:
        if arguments.epochs is not None:
            raise ValueError(f"epochs must not be given with steps, got {arguments.epochs}")
        settings = settings | {"epochs": 1}
    elif arguments.epochs is not None:
        settings = settings | {"steps": 1}
    return config_of(arguments, facts, targets, settings, training)
