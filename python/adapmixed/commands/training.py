"""Training options that commands share: the base, the corpus, the adapters' settings."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import PRESETS, say_hub

if TYPE_CHECKING:
    from adapmixed.data import Corpus
    from adapmixed.training import FinetuneConfig
    from adapmixed.training.base import BaseFacts

# Fields of FinetuneConfig with their types and help; defaults come from the class or a preset.
_NUMBERS = {
    "epochs": (int, "passes over the text"),
    "learning_rate": (float, "initial learning rate of AdamW, which falls linearly to zero"),
    "weight_decay": (float, "decoupled weight decay of AdamW"),
    "rank": (int, "rank of the adapters"),
    "alpha": (float, "scale of the adapters: the update is multiplied by alpha / rank"),
    "batch_size": (int, "blocks per step"),
    "block_size": (int, "tokens of text per block, at most what the base's window holds"),
}


def add_model_options(parser: argparse.ArgumentParser, *, output: str) -> None:
    """Add the public model, the output, and where the training runs.

    Args:
        parser: gets the options.
        output: help of --output.
    """
    parser.add_argument("--base", required=True, help="public model: folder or hub name")
    parser.add_argument("--revision", help="commit, tag or branch of a hub name (default: newest)")
    parser.add_argument("--output", required=True, type=Path, help=output)
    parser.add_argument("--preset", choices=PRESETS, help="the paper's training settings")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device to train on (default: cpu)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the public model; adapters are trained in float32 (default: float32)",
    )


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """Add the corpus and how it is divided into documents."""
    group = parser.add_argument_group("corpus")
    group.add_argument(
        "--corpus",
        required=True,
        help="file (*.txt, *.jsonl or *.parquet), folder of such files, hub:NAME, or builtin",
    )
    columns = group.add_mutually_exclusive_group()
    columns.add_argument("--text-column", help="column with the text of a row (default: text)")
    columns.add_argument(
        "--chat-column", help="column with messages, which the base's chat template makes text of"
    )
    group.add_argument(
        "--id-column", help="column that names the user or document whose rows stay in one shard"
    )
    group.add_argument(
        "--split",
        help="split of a hub data set (default: train), or of a folder: train, validation, test "
        "or all",
    )
    group.add_argument("--config", help="configuration of a hub data set")
    group.add_argument("--corpus-revision", help="commit, tag or branch of a hub data set")
    group.add_argument(
        "--new-document",
        help="regular expression for a line or row that begins a document (default: blank lines "
        "separate documents, or each row is one)",
    )


def add_adapter_options(parser: argparse.ArgumentParser, *, adapt: str) -> Any:
    """Add the settings of an adapter's training and return their group.

    Args:
        parser: gets the options.
        adapt: the default of --adapt, as a phrase for its help.
    """
    group = parser.add_argument_group("training (defaults come from --preset)")
    for name, (kind, text) in _NUMBERS.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    layers = group.add_mutually_exclusive_group()
    layers.add_argument(
        "--adapt",
        metavar="head|last:K|all",
        help="layers to adapt: the output layer, or all linear layers of the last K blocks or of "
        f"all blocks (default: {adapt})",
    )
    layers.add_argument("--target-modules", nargs="+", help="names of the layers to adapt")
    return group


def corpus_of(arguments: argparse.Namespace) -> Corpus:
    """Return the corpus that the options name; a preset gives the default of --new-document."""
    from adapmixed.data import Corpus
    from adapmixed.training.presets import PRESETS as SETTINGS

    corpus = Corpus(
        arguments.corpus,
        text_column=arguments.text_column or "text",
        chat_column=arguments.chat_column,
        id_column=arguments.id_column,
        split=arguments.split,
        config=arguments.config,
        revision=arguments.corpus_revision,
        new_document=arguments.new_document,
    )
    if arguments.preset is None:
        return corpus
    return corpus.with_new_document(SETTINGS[arguments.preset].new_document)


def facts_of(arguments: argparse.Namespace) -> BaseFacts:
    """Return the facts about --base.

    Raises:
        ValueError: as `base_facts` and `check_base`.
        OSError: if there is no such model.
    """
    from adapmixed.ensemble.public_model import reading_base
    from adapmixed.training.base import base_facts

    say_hub(arguments.base)
    with reading_base(arguments.base):
        return base_facts(arguments.base, arguments.revision)


def targets_of(
    arguments: argparse.Namespace, facts: BaseFacts, adapt: str | None
) -> tuple[str, ...]:
    """Return the layers to adapt: given by name, by --adapt, or by default.

    Args:
        arguments: the command's arguments.
        facts: facts about the base.
        adapt: the default of --adapt; None for peft's choice for the architecture.

    Raises:
        ValueError: if there is no default for this architecture, or no such layer.
    """
    if arguments.target_modules:
        return tuple(arguments.target_modules)
    adapt = arguments.adapt or adapt
    if adapt is not None:
        return facts.adapt(adapt)
    if not facts.default_targets:
        raise ValueError(
            "--adapt or --target-modules must be given: peft has no default layers for "
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
    """Return the training settings from the options, else `settings`, else the defaults.

    A block that is not given fits the base's window.

    Args:
        arguments: the command's arguments.
        facts: facts about the base.
        targets: names of the adapted layers.
        settings: for instance those of a preset.
        more: further options of this command that are fields of `FinetuneConfig`.

    Raises:
        ValueError: if a value is out of range.
    """
    from adapmixed.training import FinetuneConfig

    facts.targets(targets)
    given = {name: getattr(arguments, name) for name in (*_NUMBERS, *more)}
    given = {name: value for name, value in given.items() if value is not None}
    config = FinetuneConfig(**settings | given, target_modules=targets)
    if "block_size" in given or facts.longest_block is None:
        return config
    return replace(config, block_size=min(config.block_size, facts.longest_block))
