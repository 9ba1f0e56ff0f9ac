"""Training settings: the paper's by data set, and those of head members.

The paper's are its table "train_params", and N from its table "priv_params".
The batch size of the members is not in the paper; 8 blocks is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WIKITEXT_HEADING = r" = [^=].*[^=] = *$"
"""Begins an article of WikiText: one equals sign on either side; sections have two and more."""


@dataclass(frozen=True)
class TrainingPreset:
    """Settings of one data set.

    Attributes:
        num_models: N.
        learning_rate: of AdamW, falling linearly to zero.
        epochs: of every member.
        new_document: how the corpus's rows are joined to documents, where it has no identifiers.
        rank, alpha, weight_decay: of the adapters and AdamW.
        block_size: tokens per block.
        batch_size: blocks per step of a member.
    """

    num_models: int
    learning_rate: float
    epochs: int
    new_document: str | None = None
    rank: int = 4
    alpha: float = 32.0
    weight_decay: float = 0.01
    block_size: int = 512
    batch_size: int = 8

    def finetune_settings(self) -> dict[str, Any]:
        """Return arguments of `FinetuneConfig` for the members."""
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "block_size": self.block_size,
        }


HEAD: dict[str, Any] = {"rank": 8, "alpha": 64.0, "learning_rate": 6e-3}
"""Of members that adapt the output layer alone, where neither preset nor user says otherwise.

alpha / rank is the paper's. One layer takes a rate 30 times that of many, and twice the rank.
"""

PRESETS = {
    "wikitext-103": TrainingPreset(100, 2e-4, 15, new_document=WIKITEXT_HEADING),
    "one-billion-word": TrainingPreset(80, 2e-4, 5),
    "pubmed": TrainingPreset(100, 2e-4, 5),
    "air-dialogue": TrainingPreset(100, 4e-4, 10),
}
