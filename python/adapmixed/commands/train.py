"""``adapmixed train``: train an ensemble of adapters, or one DP-SGD adapter, on a corpus."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import PRESETS, progress_bar, quiet_libraries
from adapmixed.workers import start_server

if TYPE_CHECKING:
    from adapmixed.data import Corpus
    from adapmixed.training import FinetuneConfig
    from adapmixed.training.base import BaseFacts

NUM_MODELS = 64
ADAPT = "head"  # of an ensemble without a preset
CLIPPING_NORM = 1.0
# FinetuneConfig's fields and how the options read them; defaults are those of the class or preset.
_NUMBERS = {
    "epochs": (int, "passes over a shard"),
    "learning_rate": (float, "AdamW's, falling linearly to zero"),
    "weight_decay": (float, "AdamW's"),
    "rank": (int, "of the adapters"),
    "alpha": (float, "LoRA's scale: the update is multiplied by alpha / rank"),
    "batch_size": (int, "blocks per step; with --dp-sgd the expected ones"),
    "block_size": (int, "tokens per block"),
}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train",
        help="a private corpus to an ensemble, or to one DP-SGD adapter",
        description="Distributes a corpus over N shards by a keyed hash of user or document names, "
        "before any block is cut, and trains one peft adapter per shard. Begun again after a kill, "
        "it goes on. Under torchrun, ranks take members in turn.",
    )
    parser.add_argument("--base", required=True, help="public model: folder or hub name")
    parser.add_argument("--revision", help="of a hub name: commit, tag or branch")
    parser.add_argument(
        "--output", required=True, type=Path, help="ensemble folder; OUTPUT.private lies beside it"
    )
    parser.add_argument("--preset", choices=PRESETS, help="the paper's training settings")
    parser.add_argument("--seed", type=int, help="of the members' training (0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    _add_corpus_options(parser)
    group = parser.add_argument_group("ensemble")
    group.add_argument("--models", type=int, help=f"N (the preset's, or {NUM_MODELS})")
    group.add_argument("--key-file", type=Path, help="64 hex digits (OUTPUT.private/shard.key)")
    group.add_argument(
        "--validation-fraction", type=float, help="of each shard's names, not trained on (0.05)"
    )
    group.add_argument(
        "--retrain",
        metavar="MEMBER",
        help="train this member alone again, by number or folder name: its shard has changed, the "
        "others have not",
    )
    group.add_argument("--workers", type=int, help="members trained at a time (1)")
    group.add_argument("--threads", type=int, help="of each worker (1), or of DP-SGD (torch's)")
    group = parser.add_argument_group("training (defaults: the preset's)")
    for name, (kind, text) in _NUMBERS.items():
        group.add_argument(_flag(name), type=kind, help=text)
    group.add_argument(
        "--early-stopping",
        action="store_true",
        default=None,
        help="keep each member's best epoch, or the public model, by its own held-out text",
    )
    layers = group.add_mutually_exclusive_group()
    layers.add_argument(
        "--adapt",
        metavar="head|last:K|all",
        help="adapted layers: the output layer, or all linear layers of the last K or all blocks "
        f"({ADAPT}; with --preset or --dp-sgd peft's choice for the architecture)",
    )
    layers.add_argument("--target-modules", nargs="+", help="adapted layers by name")
    group = parser.add_argument_group("DP-SGD")
    group.add_argument("--dp-sgd", action="store_true", help="one adapter, on the same corpus")
    group.add_argument("--epsilon", type=float, help="of its guarantee")
    group.add_argument("--delta", type=float, help="of its guarantee")
    group.add_argument(
        "--clipping-norm", type=float, help=f"of a block's gradient ({CLIPPING_NORM})"
    )
    group.add_argument(
        "--blocks-per-id", type=int, help="blocks used of one name; 1 protects it whole (all)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train; standard error says which members are finished."""
    if (arguments.workers or 1) > 1:
        start_server()  # before this process imports the same for seconds
    from adapmixed.data import Corpus
    from adapmixed.training.presets import PRESETS as SETTINGS

    preset = SETTINGS.get(arguments.preset)
    corpus = Corpus(
        arguments.corpus,
        text_column=arguments.text_column or "text",
        id_column=arguments.id_column,
        split=arguments.split,
        config=arguments.config,
        revision=arguments.corpus_revision,
        new_document=arguments.new_document,
    )
    if preset is not None:
        corpus = corpus.with_new_document(preset.new_document)
    quiet_libraries()
    from adapmixed.training.base import base_facts

    facts = base_facts(arguments.base, arguments.revision)
    config = _config(arguments, facts)
    if arguments.dp_sgd:
        return _train_dp(arguments, corpus, config, facts)
    print(f"Corpus {corpus.name}. What stays in one shard: {corpus.unit}.", file=sys.stderr)
    if corpus.positional:
        print(
            "Its documents have no names of their own: an edit that changes their number or order "
            "can move all later ones to other shards. Every guarantee of the ensemble will say so. "
            "Rows with --id-column and folders of text files have names.",
            file=sys.stderr,
        )
    return _train_ensemble(arguments, corpus, config, facts)


def _train_ensemble(
    arguments: argparse.Namespace, corpus: "Corpus", config: "FinetuneConfig", facts: "BaseFacts"
) -> int:
    from adapmixed.training.presets import PRESETS as SETTINGS
    from adapmixed.training.ranks import Place
    from adapmixed.training.run import TrainingRun, train_ensemble

    _refuse(arguments, "without --dp-sgd", "epsilon", "delta", "clipping_norm", "blocks_per_id")
    preset = SETTINGS.get(arguments.preset)
    place = Place.from_environment()
    given = {
        name: getattr(arguments, name)
        for name in ("seed", "validation_fraction", "threads")
        if getattr(arguments, name) is not None
    }
    manifest = train_ensemble(
        TrainingRun(
            base=arguments.base,
            corpus=corpus,
            output=arguments.output,
            num_models=_first(arguments.models, preset and preset.num_models, NUM_MODELS),
            config=config,
            revision=facts.revision,
            key_file=arguments.key_file,
            device=arguments.device,
            dtype=arguments.dtype,
            **given,
        ),
        place=place,
        workers=_first(arguments.workers, 1),
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


def _train_dp(
    arguments: argparse.Namespace, corpus: "Corpus", config: "FinetuneConfig", facts: "BaseFacts"
) -> int:
    import torch

    from adapmixed.ranks import Place
    from adapmixed.training.dp_guarantee import PrivacyTarget
    from adapmixed.training.dpsgd import train_dp
    from adapmixed.training.run import DTYPES

    place = Place.from_environment()
    if place.world > 1:
        raise ValueError(
            f"--dp-sgd must run in one process, got {place.world} ranks: each would train an "
            "adapter of its own on the whole corpus, and the guarantee is for one"
        )
    names = (
        "models", "key_file", "validation_fraction", "workers", "retrain", "early_stopping"
    )  # fmt: skip
    _refuse(arguments, "with --dp-sgd", *names)
    if arguments.seed is not None:
        raise ValueError(
            f"--seed cannot be used with --dp-sgd, got {arguments.seed}: whoever knows a seed can "
            "take the noise away"
        )
    for name in ("epsilon", "delta"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--{name} must be given with --dp-sgd")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    update, close = progress_bar(0, "step")
    guarantee = train_dp(
        arguments.base,
        corpus.documents(),
        arguments.output,
        config,
        PrivacyTarget(
            arguments.epsilon,
            arguments.delta,
            _first(arguments.clipping_norm, CLIPPING_NORM),
            arguments.blocks_per_id,
        ),
        unit=corpus.unit,
        base_name=facts.name,
        revision=facts.revision,
        device=arguments.device,
        dtype=DTYPES[arguments.dtype],
        progress=update,
    )
    close()
    print(f"wrote {arguments.output}")
    print(str(guarantee))
    return 0


def _config(arguments: argparse.Namespace, facts: "BaseFacts") -> "FinetuneConfig":
    """Return the options that were given, then the preset, then the class's defaults."""
    from adapmixed.training import FinetuneConfig
    from adapmixed.training.presets import HEAD
    from adapmixed.training.presets import PRESETS as SETTINGS

    targets = _targets(arguments, facts)
    adapted = facts.targets(targets)  # raises for names of no layer
    settings: dict[str, Any] = {}
    if arguments.preset is not None:
        settings = SETTINGS[arguments.preset].finetune_settings(dp_sgd=arguments.dp_sgd)
    elif adapted == (facts.head,) and not arguments.dp_sgd:
        settings = HEAD
    given = {name: getattr(arguments, name) for name in (*_NUMBERS, "early_stopping")}
    settings = settings | {name: value for name, value in given.items() if value is not None}
    return FinetuneConfig(**settings, target_modules=targets)


def _targets(arguments: argparse.Namespace, facts: "BaseFacts") -> tuple[str, ...]:
    """Return the layers that were asked for: by name, by kind, or by default."""
    if arguments.target_modules:
        return tuple(arguments.target_modules)
    if arguments.adapt is None and (arguments.preset is not None or arguments.dp_sgd):
        if not facts.default_targets:
            raise ValueError(
                "--adapt or --target-modules must be given: peft knows no layers to adapt in "
                f"{facts.name}"
            )
        return facts.default_targets
    return facts.adapt(arguments.adapt or ADAPT)


def _add_corpus_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("corpus")
    group.add_argument(
        "--corpus",
        required=True,
        help="*.txt, *.jsonl or *.parquet, a folder of one kind, hub:NAME, or builtin",
    )
    group.add_argument("--text-column", help="of rows (text)")
    group.add_argument("--id-column", help="of rows: the user or document that is protected whole")
    group.add_argument("--split", help="of a hub data set (train)")
    group.add_argument("--config", help="of a hub data set")
    group.add_argument("--corpus-revision", help="of a hub data set")
    group.add_argument(
        "--new-document",
        help="regular expression: a line or row it matches begins a document (blank lines; a row)",
    )


def _refuse(arguments: argparse.Namespace, where: str, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueError(
                f"{_flag(name)} does not apply {where}, got {getattr(arguments, name)}"
            )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
