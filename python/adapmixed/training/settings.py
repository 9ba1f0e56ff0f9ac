"""Training settings: the paper's for each data set, and those for the output layer alone.

The paper's settings come from its table train_params, and N from its table priv_params.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from adapmixed.limits import check_count, check_number


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
