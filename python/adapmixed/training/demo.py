"""Train the demonstration's ensemble on the user's machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from adapmixed.data import demo_base
from adapmixed.data.builtin import Document, private_documents
from adapmixed.data.corpus import BUILTIN, Corpus
from adapmixed.ensemble.public_model import reading_base
from adapmixed.files import write_file
from adapmixed.training.base import base_facts
from adapmixed.training.run import TrainingRun, train_ensemble
from adapmixed.training.settings import HEAD, FinetuneConfig
from adapmixed.training.shards import create_public_key

NUM_MODELS = 64
CONFIG = FinetuneConfig(
    **HEAD | {"learning_rate": 1.2e-2, "epochs": 4, "steps": 1, "batch_size": 4},
    target_modules=("lm_head",),
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
    run = TrainingRun(
        base=base,
        corpus=Corpus(BUILTIN),
        output=folder,
        num_models=NUM_MODELS,
        config=_config(base),
        seed=seed,
        key_file=key,
        validation_fraction=0.0,
    )
    train_ensemble(run, workers=workers or os.cpu_count() or 1, say=lambda _: None)
    return folder


def train_whole(
    folder: Path,
    base: str,
    *,
    seed: int = 0,
    documents: Sequence[Document] | None = None,
    config: FinetuneConfig | None = None,
) -> Path:
    """Train one adapter on the text of all shards; return its folder, an ensemble of one.

    It is a reference without privacy. One that is there already is kept.

    Args:
        folder: parent of the ensemble's folder.
        base: public model, a folder or hub name.
        seed: of the training.
        documents: the text; None: the built-in private text.
        config: settings of the training; None: the demonstration's.

    Raises:
        ValueError: if the ensemble's folder was begun with another text or other settings.
        RuntimeError: if the worker was killed.
    """
    output = folder / (f"one-adapter-{seed}" if seed else "one-adapter")
    text, key = output.with_suffix(".jsonl"), output.with_suffix(".key")
    rows = [
        json.dumps({"id": f"paragraph {number}", "text": one.text})
        for number, one in enumerate(private_documents() if documents is None else documents)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_file(text, "".join(f"{row}\n" for row in rows).encode())
    create_public_key(key, "adapmixed built-in text")
    run = TrainingRun(
        base=base,
        corpus=Corpus(str(text), id_column="id"),
        share_shards=True,
        output=output,
        num_models=1,
        config=config or _config(base),
        seed=seed,
        key_file=key,
        validation_fraction=0.0,
    )
    train_ensemble(run, say=lambda _: None)
    return output


def _config(base: str) -> FinetuneConfig:
    with reading_base(base):
        return replace(CONFIG, target_modules=(base_facts(base).head,))
