"""Training settings: the paper's for each data set, and those for the output layer alone.

The paper's settings come from its table train_params, and N from its table priv_params.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WIKITEXT_HEADING = r" = [^=].*[^=] = *$"
"""Matches the first line of a WikiText article, which has one equals sign on either side; section
headings have more."""


@dataclass(frozen=True)
class TrainingPreset:
    """The paper's settings for one data set; `FinetuneConfig` has those that all share.

    Attributes:
        num_models: N.
        learning_rate: initial learning rate of AdamW, which falls linearly to zero.
        epochs: passes of every member over its shard.
        new_document: regular expression that joins the corpus's rows to documents, or None; see
            `Corpus`.
    """

    num_models: int
    learning_rate: float
    epochs: int
    new_document: str | None = None

    def finetune_settings(self) -> dict[str, Any]:
        """Return the arguments of `FinetuneConfig` for the members; the others keep defaults."""
        return {"learning_rate": self.learning_rate, "epochs": self.epochs}


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
    "wikitext-103": TrainingPreset(100, 2e-4, 15, new_document=WIKITEXT_HEADING),
    "one-billion-word": TrainingPreset(80, 2e-4, 5),
    "pubmed": TrainingPreset(100, 2e-4, 5),
    "air-dialogue": TrainingPreset(100, 4e-4, 10),
}
