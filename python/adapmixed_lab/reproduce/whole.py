"""One adapter on the built-in private text of all shards, the reference without a division."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from adapmixed.data import Corpus, Document, private_documents
from adapmixed.files import write_file
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.demo import CONFIG
from adapmixed.training.run import TrainingRun, train_ensemble
from adapmixed.training.shards import create_public_key


def builtin_whole(
    folder: Path,
    base: str,
    *,
    seed: int = 0,
    documents: Sequence[Document] | None = None,
    config: FinetuneConfig = CONFIG,
) -> Path:
    """Train an ensemble of one and return its folder; an existing one is kept.

    Args:
        folder: parent of the ensemble's folder.
        base: folder of the public model.
        seed: of the training.
        documents: the text; None: the built-in private text.
        config: settings of the training, by default the demonstration's.

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
        output=output,
        num_models=1,
        config=config,
        seed=seed,
        key_file=key,
        validation_fraction=0.0,
    )
    train_ensemble(run, say=lambda _: None)
    return output
