"""Training settings, and what they must know of the public model: its files and its layers.

There are the paper's for each data set, and those for the output layer alone. The paper's come from
its table train_params, and N from its table priv_params.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapmixed.data.corpus import Corpus
from adapmixed.ensemble.lora import TESTED, block_names, head_name, linear_names
from adapmixed.ensemble.public_model import (
    base_files,
    check_model,
    file_digests,
    load_tokenizer,
    max_positions,
    reading_base,
)
from adapmixed.limits import check_count, check_number
from adapmixed.text import Document, beginning_of, end_of_text


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of one adapter's training.

    They are the same for every shard and must be chosen without private data. The defaults of rank,
    alpha, weight decay and block size are the paper's, which does not give the batch size.

    Attributes:
        rank: rank r of the update B A, >= 1.
        alpha: LoRA's scale; the update is multiplied by alpha / rank.
        target_modules: names of the layers to adapt.
        learning_rate: the largest learning rate of AdamW, which falls linearly to zero.
        warmup_steps: steps over which the rate first rises linearly, >= 0.
        weight_decay: AdamW's decoupled weight decay, >= 0.
        epochs: passes over the shard, >= 1.
        steps: least number of steps, >= 1: a small shard is passed over again until they are done.
        shared_a: whether all members have one random A, drawn from the run's seed, and train B
            alone.
        batch_size: blocks per step, >= 1.
        block_size: tokens per block, >= 2.
        early_stopping: whether to keep the weights with the least loss on the shard's own held-out
            text, among the public model and the weights after each epoch.
        validation_fraction: share of a shard's tokens, in [0, 1), that an ensemble's training holds
            out (`shards.hold_out`).

    Raises:
        ValueError: if a setting is out of range.
    """

    rank: int = 4
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ("c_attn",)
    learning_rate: float = 2e-4
    warmup_steps: int = 0
    weight_decay: float = 0.01
    epochs: int = 10
    steps: int = 1
    shared_a: bool = False
    batch_size: int = 8
    block_size: int = 512
    early_stopping: bool = False
    validation_fraction: float = 0.05

    def expected_steps(self, size: int) -> int:
        """Return about how many steps a shard of so many bytes takes, for the time left."""
        blocks = math.ceil(size / (4 * self.block_size))  # a token has about four bytes
        passes = self.epochs * math.ceil(blocks / self.batch_size)
        return max(self.steps, passes) if size else 0

    def __post_init__(self) -> None:
        for name in ("rank", "epochs", "steps", "batch_size"):
            check_count(name, getattr(self, name))
        check_count("block_size", self.block_size, 2)
        check_count("warmup_steps", self.warmup_steps, 0)
        for name in ("alpha", "learning_rate"):
            check_number(name, getattr(self, name), above=0.0)
        check_number("weight_decay", self.weight_decay, least=0.0)
        if not self.target_modules:
            raise ValueError("target_modules must name at least one layer, got ()")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be in [0, 1), got {self.validation_fraction}"
            )
        if self.early_stopping and not self.validation_fraction:
            raise ValueError("validation_fraction must be > 0 with early_stopping, got 0")


WIKITEXT_HEADING = r" = [^=].*[^=] = *$"
"""Matches the first line of a WikiText article, which has one equals sign on either side; section
headings have more."""


@dataclass(frozen=True)
class TrainingPreset:
    """The paper's settings for one data set; `FinetuneConfig` has those that all share.

    Attributes:
        num_models: N.
        settings: arguments of `FinetuneConfig` for the members.
        new_document: regular expression that joins the corpus's rows to documents, or None; see
            `Corpus`.
    """

    num_models: int
    settings: dict[str, Any]
    new_document: str | None = None


HEAD: dict[str, Any] = {
    "rank": 8, "alpha": 64.0, "learning_rate": 6e-3, "epochs": 2, "steps": 32, "batch_size": 1,
    "block_size": 256,
}  # fmt: skip
"""Defaults for members that adapt the output layer alone.

alpha / rank is the paper's. A single layer needs a higher learning rate and rank than many layers.
Epochs are few, but a small shard has as many steps as one of 16 blocks: each of its members learns
it by heart, and the ensemble is the better for it (docs/how-to/train.md).
"""

PRESETS = {
    "wikitext-103": TrainingPreset(100, {"learning_rate": 2e-4, "epochs": 15}, WIKITEXT_HEADING),
    "one-billion-word": TrainingPreset(80, {"learning_rate": 2e-4, "epochs": 5}),
    "pubmed": TrainingPreset(100, {"learning_rate": 2e-4, "epochs": 5}),
    "air-dialogue": TrainingPreset(100, {"learning_rate": 4e-4, "epochs": 10}),
}


@dataclass(frozen=True)
class BaseFacts:
    """Facts about a public model.

    Attributes:
        name: the hub name, or the folder's own name without its path.
        revision: the hub's commit; None for a folder.
        files: digests of the files that the model and its tokenizer are loaded from
            (`adapmixed.ensemble.base_files`).
        beginning: the tokens with which the tokenizer begins every text.
        longest_block: tokens of text that fit behind `beginning`, or None without a limit.
        linear_layers: full names of the layers that a LoRA can adapt, in the model's order.
        default_targets: names of the layers that peft adapts by default in this architecture; () if
            it has no default.
        head: full name of the output layer.
        blocks: full names of the decoder blocks, () if they are not in a single list.
        tested: whether the library was tested with models of its type.
    """

    name: str
    revision: str | None
    files: dict[str, str]
    beginning: tuple[int, ...]
    longest_block: int | None
    linear_layers: tuple[str, ...]
    default_targets: tuple[str, ...]
    head: str
    blocks: tuple[str, ...]
    tested: bool

    def adapt(self, what: str | None) -> tuple[str, ...]:
        """Return the names of the layers that members adapt.

        Args:
            what: "head" for the output layer, "last:K" for all linear layers of the last K blocks,
                "all" for all linear layers of all blocks, or names of layers with commas between
                them; None for `default_targets`.

        Raises:
            ValueError: if there are no such layers, fewer blocks, or no default.
        """
        if what == "head":
            return (self.head,)
        names = self.default_targets if what is None else tuple(what.split(","))
        if not names:
            raise ValueError(f"adapt must be given: peft has no default layers for {self.name}")
        last = re.fullmatch(r"last:([1-9]\d*)|all", what or "")
        if last is None:
            self.targets(names, "adapt must be head, last:K with K >= 1, all, or name")
            return names
        count = int(last[1] or len(self.blocks))
        if not 1 <= count <= len(self.blocks):
            raise ValueError(
                f"adapt must be head or at most the {len(self.blocks)} blocks found in "
                f"{self.name}, got {what!r}"
            )
        prefixes = tuple(f"{block}." for block in self.blocks[-count:])
        return tuple(layer for layer in self.linear_layers if layer.startswith(prefixes))

    def targets(
        self, names: Sequence[str], must: str = "target_modules must name"
    ) -> tuple[str, ...]:
        """Return the full names of the layers that peft adapts for these `target_modules`.

        Raises:
            ValueError: if no linear layer has one of these names; the message begins with `must`.
        """
        for name in names:
            if not any(f".{layer}".endswith(f".{name}") for layer in self.linear_layers):
                ends = dict.fromkeys(layer.rpartition(".")[2] for layer in self.linear_layers)
                layers = f"linear layers of {self.name}, which end in {', '.join(ends)}"
                raise ValueError(f"{must} {layers}, got {name!r}")
        suffixes = tuple(f".{name}" for name in names)
        return tuple(layer for layer in self.linear_layers if f".{layer}".endswith(suffixes))


def base_facts(base: str, revision: str | None = None) -> BaseFacts:
    """Read the configuration of a public model and hash its files.

    Args:
        base: a folder or hub name.
        revision: commit, tag or branch of a hub name; None for the newest.

    Raises:
        OSError: if there is no such model.
        ValueError: as `check_base`; if an ensemble cannot be built on it (`check_model`), if it
            needs a package that is not here, if it has no token that ends a text, or if `revision`
            is given for a folder.
    """
    import torch
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import cached_file

    local = Path(base).is_dir()
    if local and revision is not None:
        raise ValueError(f"revision applies to hub names, got {revision!r} for the folder {base}")
    with reading_base(base):
        config = AutoConfig.from_pretrained(base, revision=revision)
        try:
            with torch.device("meta"):  # build the modules without weights
                model = AutoModelForCausalLM.from_config(config)
        except ImportError as error:
            raise ValueError(f"base must be a readable model, {base} is not: {error}") from error
        tokenizer = load_tokenizer(base, revision)
    end_of_text(tokenizer, config.get_text_config().vocab_size)
    check_model(model, tokenizer)
    commit = None if local else getattr(config, "_commit_hash", None) or revision
    beginning = beginning_of(tokenizer)
    positions = max_positions(config.get_text_config())

    def cached(name: str) -> Path | None:
        path: Any = cached_file(
            base,
            name,
            revision=commit,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if path is None else Path(path)

    return BaseFacts(
        name=Path(base).resolve().name if local else base,
        revision=commit,
        files=base_files(base) if local else file_digests(cached),
        beginning=beginning,
        longest_block=None if positions is None else positions - len(beginning),
        linear_layers=linear_names(model),
        default_targets=tuple(TARGETS.get(config.model_type, ())),
        head=head_name(model),
        blocks=block_names(model),
        tested=model.config.model_type in TESTED,
    )


def documents_of(corpus: Corpus, base: str, revision: str | None) -> Iterator[Document]:
    """Return a corpus' documents, with the base's chat template for its conversations.

    Some templates write today's date; here it is Llama's default, so that training can be repeated.

    Raises:
        ValueError: at once, if there are conversations and the base has no chat template.
    """
    if corpus.chat_column is None:
        return corpus.documents()
    tokenizer = load_tokenizer(base, revision)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"chat_column must be unset for a base without chat template, got {corpus.chat_column}"
        )
    today = "{%- macro strftime_now(form) %}26 Jul 2024{% endmacro %}"
    settings = {"tokenize": False, "date_string": "26 Jul 2024"}
    settings["chat_template"] = today + str(tokenizer.get_chat_template())
    return corpus.documents(lambda chat: str(tokenizer.apply_chat_template(chat, **settings)))
