"""``adapmixed train``: train an ensemble of adapters on a corpus."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import quiet_libraries
from adapmixed.commands.training import (
    add_adapter_options,
    add_corpus_options,
    add_model_options,
    config_of,
    corpus_of,
    targets_of,
)
from adapmixed.workers import start_server

if TYPE_CHECKING:
    from adapmixed.training import FinetuneConfig
    from adapmixed.training.base import BaseFacts
    from adapmixed.training.presets import TrainingPreset

NUM_MODELS = 64
ADAPT = "head"  # of an ensemble without a preset


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train",
        help="a private corpus to an ensemble",
        description="Distributes a corpus over N shards by a keyed hash of user or document names, "
        "before any block is cut, and trains one peft adapter per shard. Begun again after a kill, "
        "it goes on. Under torchrun, ranks take members in turn.",
    )
    add_model_options(parser, output="ensemble folder; OUTPUT.private lies beside it")
    parser.add_argument("--seed", type=int, default=0, help="of the members' training (0)")
    add_corpus_options(parser)
    group = parser.add_argument_group("ensemble")
    group.add_argument("--models", type=int, help=f"N (the preset's, or {NUM_MODELS})")
    group.add_argument("--key-file", type=Path, help="64 hex digits (OUTPUT.private/shard.key)")
    group.add_argument(
        "--validation-fraction",
        type=float,
        default=0.05,
        help="of each shard's names, not trained on (0.05)",
    )
    group.add_argument(
        "--retrain",
        metavar="MEMBER",
        help="train this member alone again, by number or folder name: its shard has changed, the "
        "others have not",
    )
    group.add_argument("--workers", type=int, default=1, help="members trained at a time (1)")
    group.add_argument("--threads", type=int, default=1, help="of each worker (1)")
    group = add_adapter_options(
        parser, adapt=f"{ADAPT}; with --preset peft's choice for the architecture"
    )
    group.add_argument(
        "--early-stopping",
        action="store_true",
        default=None,
        help="keep each member's best epoch, or the public model, by its own held-out text",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train; standard error says which members are finished."""
    if arguments.workers > 1:
        start_server()  # before this process imports the same for seconds
    corpus = corpus_of(arguments)
    quiet_libraries()
    from adapmixed.training.base import base_facts
    from adapmixed.training.presets import PRESETS
    from adapmixed.training.ranks import Place
    from adapmixed.training.run import TrainingRun, train_ensemble

    facts = base_facts(arguments.base, arguments.revision)
    preset = PRESETS.get(arguments.preset)
    config = _config(arguments, facts)
    print(f"Corpus {corpus.name}. What stays in one shard: {corpus.unit}.", file=sys.stderr)
    if corpus.positional:
        print(
            "Its documents have no names of their own: an edit that changes their number or order "
            "can move all later ones to other shards. Every guarantee of the ensemble will say so. "
            "Rows with --id-column and folders of text files have names.",
            file=sys.stderr,
        )
    place = Place.from_environment()
    manifest = train_ensemble(
        TrainingRun(
            base=arguments.base,
            corpus=corpus,
            output=arguments.output,
            num_models=_num_models(arguments, preset),
            config=config,
            revision=facts.revision,
            key_file=arguments.key_file,
            device=arguments.device,
            dtype=arguments.dtype,
            seed=arguments.seed,
            validation_fraction=arguments.validation_fraction,
            threads=arguments.threads,
        ),
        place=place,
        workers=arguments.workers,
        retrain=arguments.retrain,
    )
    if place.rank == 0:
        present = [
            shard
            for name, shard in zip(manifest.members, manifest.shards, strict=True)
            if name is not None
        ]
        empty = sum(shard["documents"] == 0 for shard in present)
        gone = len(manifest.members) - len(present)
        note = f", {empty} of them the public model (empty shards)" if empty else ""
        note += f", {gone} of them withdrawn (null)" if gone else ""
        print(f"wrote {arguments.output}: {len(manifest.members)} members{note}")
    return 0


def _num_models(arguments: argparse.Namespace, preset: "TrainingPreset | None") -> int:
    if arguments.models is not None:
        return int(arguments.models)
    return NUM_MODELS if preset is None else preset.num_models


def _config(arguments: argparse.Namespace, facts: "BaseFacts") -> "FinetuneConfig":
    """Return the options that were given, then the preset, then the class's defaults."""
    from adapmixed.training.presets import HEAD, PRESETS

    preset = PRESETS.get(arguments.preset)
    targets = targets_of(arguments, facts, None if preset else ADAPT)
    settings: dict[str, Any] = {}
    if preset is not None:
        settings = preset.finetune_settings()
    elif facts.targets(targets) == (facts.head,):
        settings = HEAD
    return config_of(arguments, facts, targets, settings, "early_stopping")
