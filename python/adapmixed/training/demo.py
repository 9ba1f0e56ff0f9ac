"""Train the demonstration's ensemble on the user's machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from adapmixed.data.corpus import BUILTIN, Corpus
from adapmixed.data.demo import demo_base
from adapmixed.ensemble.public_model import reading_base
from adapmixed.training.base import base_facts
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.presets import HEAD
from adapmixed.training.run import TrainingRun, train_ensemble
from adapmixed.training.shards import create_public_key

NUM_MODELS = 64
CONFIG = FinetuneConfig(
    **HEAD | {"learning_rate": 1.2e-2, "epochs": 4, "batch_size": 4}, target_modules=("lm_head",)
)
"""Few passes at a high learning rate, because the user waits for them."""


def train_demo(
    folder: Path, *, base: str | None = None, seed: int = 0, workers: int | None = None
) -> Path:
    """Train members that adapt the output layer on the built-in private text.

    This takes seconds with the built-in public model, and shows a progress bar on a terminal.
    Members that are already trained are kept. `<folder>.private` is made, too. The text is public,
    and so is the key that divides it.

    Args:
        folder: the ensemble folder.
        base: public model, a folder or hub name; None for the one that comes with the package.
        seed: of the training; every seed has a division of its own.
        workers: number of processes that train; None for one per core. With more than one, a script
            must call this under `if __name__ == "__main__":`.

    Returns:
        the folder.

    Raises:
        ValueError: if the folder holds another ensemble, for instance one trained on the text of
            another Python version.
        RuntimeError: if a worker ended early, or the disk is full.
    """
    key = folder.with_name(folder.name + ".key")
    folder.parent.mkdir(parents=True, exist_ok=True)
    create_public_key(key, "adapmixed demonstration shards" + (f" {seed}" if seed else ""))
    base = str(demo_base()) if base is None else base
    with reading_base(base):
        head = base_facts(base).head
    run = TrainingRun(
        base=base,
        corpus=Corpus(BUILTIN),
        output=folder,
        num_models=NUM_MODELS,
        config=replace(CONFIG, target_modules=(head,)),
        seed=seed,
        key_file=key,
        validation_fraction=0.0,
    )
    train_ensemble(run, workers=workers or os.cpu_count() or 1, say=lambda _: None)
    return folder
