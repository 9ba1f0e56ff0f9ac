"""Training options that commands share: the base, the corpus, the adapters' settings."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.mechanisms import settings_of, types_of
from adapmixed.commands.options import DTYPES, PRESETS, SharedOptions, add_options, option, say_hub

if TYPE_CHECKING:
    from adapmixed.data import Corpus
    from adapmixed.training import FinetuneConfig
    from adapmixed.training.base import BaseFacts


@dataclass
class TrainingOptions:
    """The options of a training."""

    revision: str | None = option("commit, tag or branch of a hub name (default: newest)")
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


def add_model_options(parser: argparse.ArgumentParser, *, output: str) -> None:
    """Add the public model, the output, and where the training runs.

    Args:
        parser: gets the options.
        output: help of --output.
    """
    add_options(parser, SharedOptions, "base")
    add_options(parser, TrainingOptions, "revision")
    parser.add_argument("--output", required=True, type=Path, help=output)
    add_options(parser, TrainingOptions, "preset")
    add_options(parser, SharedOptions, "device")
    add_options(parser, SharedOptions, "dtype", choices=DTYPES[:2])


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """Add the corpus and how it is divided into documents."""
    group = add_options(parser, TrainingOptions, "corpus", title="corpus")
    either = group.add_mutually_exclusive_group()
    add_options(either, TrainingOptions, "text_column chat_column")
    add_options(group, TrainingOptions, "id_column split new_document")


def add_adapter_options(parser: argparse.ArgumentParser, *, adapt: str, more: str = "") -> None:
    """Add the settings of an adapter's training.

    Args:
        parser: gets the options.
        adapt: the default of --adapt, as a phrase for its help.
        more: further settings of --training, as a phrase for its help.
    """
    title = "training (defaults come from --preset)"
    group = add_options(parser, TrainingOptions, "epochs learning_rate block_size", title=title)
    group.add_argument(
        "--training",
        metavar='"KEY=VALUE ..."',
        help="other settings, such as 'rank=4 alpha=32', whose ratio scales the update; also "
        f"weight_decay, warmup_steps, batch_size in blocks{more}",
    )
    group.add_argument(
        "--adapt",
        metavar="LAYERS",
        help="head (the output layer), last:K (linear layers of the last K blocks), all, or names "
        f"with commas (default: {adapt})",
    )


def source_of(text: str) -> dict[str, Any]:
    """Return the arguments of `Corpus` for a source or for hub:NAME[:CONFIG][@REVISION]."""
    if not text.startswith("hub:"):
        return {"source": text}
    found = re.fullmatch("(?P<source>hub:[^:@]+)(:(?P<config>[^:@]+))?(@(?P<revision>.+))?", text)
    if found is None:
        raise ValueError(f"corpus must be hub:NAME[:CONFIG][@REVISION], got {text!r}")
    return found.groupdict()


def corpus_of(arguments: argparse.Namespace) -> Corpus:
    """Return the corpus that the options name; a preset gives the default of --new-document."""
    from adapmixed.data import Corpus
    from adapmixed.training.settings import PRESETS as SETTINGS

    corpus = Corpus(
        **source_of(arguments.corpus),
        text_column=arguments.text_column or "text",
        chat_column=arguments.chat_column,
        id_column=arguments.id_column,
        split=arguments.split,
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


def training_of(arguments: argparse.Namespace, *without: str, **more: str) -> dict[str, Any]:
    """Return the values of --training: fields of `FinetuneConfig` but `without`, and `more`."""
    from adapmixed.training import FinetuneConfig

    types = types_of(FinetuneConfig) | more
    own = {name: f"use --{name.replace('_', '-')}" for name in types if hasattr(arguments, name)}
    own["target_modules"] = "use --adapt"
    types = {name: types[name] for name in types if name not in (*own, *without)}
    return settings_of("--training", (arguments.training or "").split(), types, own)


def config_of(
    arguments: argparse.Namespace,
    facts: BaseFacts,
    targets: tuple[str, ...],
    settings: dict[str, Any],
    training: dict[str, Any],
) -> FinetuneConfig:
    """Return the settings from the options and --training, else `settings`, else the defaults.

    A block that is not given fits the base's window. `targets` are the names of the adapted layers.

    Raises:
        ValueError: if a value is out of range.
    """
    from adapmixed.training import FinetuneConfig

    given = {name: getattr(arguments, name) for name in ("epochs", "learning_rate", "block_size")}
    given = {name: value for name, value in given.items() if value is not None}
    config = FinetuneConfig(**settings | given, target_modules=targets)
    try:
        config = replace(config, **training)
    except ValueError as error:
        raise ValueError(f"--training: {error}") from error
    if "block_size" in given or facts.longest_block is None:
        return config
    return replace(config, block_size=min(config.block_size, facts.longest_block))
