"""Options of training that commands share: the base, the corpus, the adapters' settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import PRESETS

if TYPE_CHECKING:
    from adapmixed.data import Corpus
    from adapmixed.training import FinetuneConfig
    from adapmixed.training.base import BaseFacts

# FinetuneConfig's fields and how the options read them; defaults are those of the class or preset.
_NUMBERS = {
    "epochs": (int, "passes over the text"),
    "learning_rate": (float, "AdamW's, falling linearly to zero"),
    "weight_decay": (float, "AdamW's"),
    "rank": (int, "of the adapters"),
    "alpha": (float, "LoRA's scale: the update is multiplied by alpha / rank"),
    "batch_size": (int, "blocks per step"),
    "block_size": (int, "tokens per block"),
}


def add_model_options(parser: argparse.ArgumentParser, *, output: str) -> None:
    """Add the public model, what is written, and where the training runs."""
    parser.add_argument("--base", required=True, help="public model: folder or hub name")
    parser.add_argument("--revision", help="of a hub name: commit, tag or branch")
    parser.add_argument("--output", required=True, type=Path, help=output)
    parser.add_argument("--preset", choices=PRESETS, help="the paper's training settings")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """Add the corpus and how it is cut into documents."""
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


def add_adapter_options(parser: argparse.ArgumentParser, *, adapt: str) -> Any:
    """Add the settings of an adapter's training and return their group.

    Args:
        adapt: which layers are adapted unless options or a preset say otherwise, in words.
    """
    group = parser.add_argument_group("training (defaults: the preset's)")
    for name, (kind, text) in _NUMBERS.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    layers = group.add_mutually_exclusive_group()
    layers.add_argument(
        "--adapt",
        metavar="head|last:K|all",
        help="adapted layers: the output layer, or all linear layers of the last K or all blocks "
        f"({adapt})",
    )
    layers.add_argument("--target-modules", nargs="+", help="adapted layers by name")
    return group


def corpus_of(arguments: argparse.Namespace) -> Corpus:
    """Return the corpus that the options name; a preset knows where its documents begin."""
    from adapmixed.data import Corpus
    from adapmixed.training.presets import PRESETS as SETTINGS

    corpus = Corpus(
        arguments.corpus,
        text_column=arguments.text_column or "text",
        id_column=arguments.id_column,
        split=arguments.split,
        config=arguments.config,
        revision=arguments.corpus_revision,
        new_document=arguments.new_document,
    )
    if arguments.preset is None:
        return corpus
    return corpus.with_new_document(SETTINGS[arguments.preset].new_document)


def targets_of(
    arguments: argparse.Namespace, facts: BaseFacts, adapt: str | None
) -> tuple[str, ...]:
    """Return the layers that were asked for: by name, by kind, or by default.

    Args:
        arguments: the command's.
        facts: of the base.
        adapt: which, if the options say nothing; None: peft's choice for the architecture.
    """
    if arguments.target_modules:
        return tuple(arguments.target_modules)
    adapt = arguments.adapt or adapt
    if adapt is not None:
        return facts.adapt(adapt)
    if not facts.default_targets:
        raise ValueError(
            f"--adapt or --target-modules must be given: peft knows no layers to adapt in "
            f"{facts.name}"
        )
    return facts.default_targets


def config_of(
    arguments: argparse.Namespace,
    facts: BaseFacts,
    targets: tuple[str, ...],
    settings: dict[str, Any],
    *more: str,
) -> FinetuneConfig:
    """Return the options that were given, then these settings, then the class's defaults.

    Args:
        arguments: the command's.
        facts: of the base.
        targets: the adapted layers; ValueError for names of no layer.
        settings: of a preset, perhaps.
        more: names of further options of this command that `FinetuneConfig` has.
    """
    from adapmixed.training import FinetuneConfig

    facts.targets(targets)
    given = {name: getattr(arguments, name) for name in (*_NUMBERS, *more)}
    given = {name: value for name, value in given.items() if value is not None}
    return FinetuneConfig(**settings | given, target_modules=targets)
