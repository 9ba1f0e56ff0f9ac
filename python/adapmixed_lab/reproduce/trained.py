"""Ensembles that an experiment trains for itself; existing ones are kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from adapmixed.data import Corpus, Document
from adapmixed.files import create_file
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.run import TrainingRun, train_ensemble


def write_corpus(path: Path, documents: Iterable[Document]) -> None:
    """Write documents as JSON lines with `id` and `text`, or check that the file holds the same.

    Raises:
        ValueError: if there are no documents, or the file holds others.
    """
    rows = [json.dumps({"id": one.identifier, "text": one.text}) for one in documents]
    if not rows:
        raise ValueError("documents must hold at least one document, got none")
    path.parent.mkdir(parents=True, exist_ok=True)
    _create_or_match(path, "".join(f"{row}\n" for row in rows).encode())


def trained(
    output: Path,
    *,
    base: str,
    text: Path,
    key: Path,
    num_models: int,
    config: FinetuneConfig,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Train the missing members of an ensemble over a file of `write_corpus`; return its folder.

    Raises:
        ValueError: if the folder holds an ensemble of other settings or another text.
        RuntimeError: if a worker was killed.
    """
    run = TrainingRun(
        base=base,
        corpus=Corpus(str(text), id_column="id"),
        output=output,
        num_models=num_models,
        config=config,
        seed=seed,
        key_file=key,
        validation_fraction=0.0,
    )
    train_ensemble(
        run, workers=workers or os.cpu_count() or 1, say=lambda _: None, progress=progress
    )
    return output


def _create_or_match(path: Path, content: bytes) -> None:
    """Write a file, or check that an existing one holds the same."""
    if create_file(path, content):
        return
    held = path.read_bytes()
    if held != content:
        raise ValueError(
            f"{path} must hold the requested text, {_facts(content)}, got {_facts(held)}; give "
            "another folder, or the text that this folder was begun with"
        )


def _facts(content: bytes) -> str:
    count, digest = content.count(b"\n"), hashlib.sha256(content).hexdigest()
    lines = f"{count} line" if count == 1 else f"{count} lines"
    return f"{lines}, {len(content):,} bytes, SHA-256 {digest[:12]}"
