"""The paper's settings of the DP-SGD adapter, by data set (its table "train_params").

The batch size is the expected one of Poisson sampling.
"""

from __future__ import annotations

from typing import Any

from adapmixed.training.presets import PRESETS

EPOCHS = {"wikitext-103": 20, "one-billion-word": 9, "pubmed": 5, "air-dialogue": 10}
BATCH_SIZE = 256


def finetune_settings(name: str) -> dict[str, Any]:
    """Return arguments of `FinetuneConfig`: a member's, with DP-SGD's epochs and batch size."""
    return PRESETS[name].finetune_settings() | {"epochs": EPOCHS[name], "batch_size": BATCH_SIZE}
