"""Train the demonstration's ensemble on the user's machine."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from adapmixed.data import demo_base
from adapmixed.data.builtin import private_documents
from adapmixed.data.corpus import BUILTIN, Corpus
from adapmixed.files import write_file
from adapmixed.training.run import TrainingRun, train_ensemble
from adapmixed.training.settings import HEAD, FinetuneConfig, base_facts
from adapmixed.training.shards import TrainingFolder, create_key

NUM_MODELS = 64
CONFIG = FinetuneConfig(
    **HEAD | {"learning_rate": 1.2e-2, "epochs": 4, "steps": 1, "batch_size": 4},
    target_modules=("lm_head",),
    validation_fraction=0.0,
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
        RuntimeError: if a worker ended early.
    """
    base = str(demo_base()) if base is None else base
    workers = workers or os.cpu_count() or 1
    return _trained(folder, base, Corpus(BUILTIN), NUM_MODELS, seed=seed, workers=workers)


def train_whole(folder: Path, base: str, *, seed: int = 0) -> Path:
    """Train one adapter on all built-in private text; return its folder, an ensemble of one.

    It is a reference without privacy. One that is there already is kept.

    Args:
        folder: parent of the ensemble's folder.
        base: public model, a folder or hub name.
        seed: of the training.

    Raises:
        ValueError: if the ensemble's folder was begun with another text or other settings.
    """
    output = folder / (f"one-adapter-{seed}" if seed else "one-adapter")
    rows = [
        json.dumps({"id": f"paragraph {number}", "text": document.text})
        for number, document in enumerate(private_documents())
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_file(text := output.with_suffix(".jsonl"), "".join(f"{row}\n" for row in rows).encode())
    corpus = Corpus(str(text), id_column="id")
    return _trained(output, base, corpus, 1, seed=seed, workers=1)


def _trained(
    folder: Path, base: str, corpus: Corpus, num_models: int, *, seed: int, workers: int
) -> Path:
    """Train an ensemble whose key is made of public words; return its folder."""
    words = "adapmixed demonstration shards" + (f" {seed}" if seed else "")
    create_key(TrainingFolder(folder, 0).key_file, words)
    config = replace(CONFIG, target_modules=(base_facts(base).head,))
    run = TrainingRun(
        base=base,
        corpus=corpus,
        output=folder,
        num_models=num_models,
        config=config,
        seed=seed,
        share_shards=True,
    )
    train_ensemble(run, workers=workers, say=lambda _: None)
    return folder
