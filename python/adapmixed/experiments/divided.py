"""Ensembles over the same built-in text, divided into fewer and larger or more and smaller shards.

Paragraphs are dealt out one by one, so that every N up to hundreds has shards of some text; the
demonstration's own ensemble keeps topics whole instead.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from adapmixed.data import Corpus, Document, private_documents
from adapmixed.files import create_file
from adapmixed.training.finetune import FinetuneConfig
from adapmixed.training.run import TrainingRun, train_ensemble

SIZES = (8, 32, 128)
CONFIG = FinetuneConfig(
    rank=4, alpha=32.0, learning_rate=3e-3, epochs=20, batch_size=4, block_size=256
)
"""Of the demonstration's members."""


def builtin_divided(
    folder: Path,
    base: str,
    sizes: Sequence[int] = SIZES,
    *,
    documents: Iterable[Document] | None = None,
    config: FinetuneConfig = CONFIG,
    workers: int | None = None,
) -> list[Path]:
    """An ensemble folder for each size; members that are there are kept.

    Args:
        folder: in which they lie, as ``divided-N``.
        base: folder of the public model.
        sizes: numbers of models N.
        documents: the text; None: the built-in private one.
        config: of every member's training.
        workers: processes that train; None: one a core.

    Raises:
        ValueError: no documents; the folder holds another text or key, or an ensemble of other
            settings.
        RuntimeError: a worker was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        json.dumps({"id": f"paragraph {number}", "text": document.text})
        for number, document in enumerate(private_documents() if documents is None else documents)
    ]
    if not rows:
        raise ValueError("documents must hold at least one document, got none")
    text = folder / "divided-text.jsonl"
    _create_or_match(text, "".join(f"{row}\n" for row in rows).encode())
    # The text is public, and so is the key: every run divides it alike.
    key = folder / "divided.key"
    digest = hashlib.sha256(b"adapmixed built-in text, divided").hexdigest()
    _create_or_match(key, f"{digest}\n".encode(), mode=0o600)
    found = []
    for size in sizes:
        run = TrainingRun(
            base=base,
            corpus=Corpus(str(text), id_column="id"),
            output=folder / f"divided-{size}",
            num_models=size,
            config=config,
            key_file=key,
            validation_fraction=0.0,
        )
        train_ensemble(run, workers=workers or os.cpu_count() or 1, say=lambda _: None)
        found.append(run.output)
    return found


def _create_or_match(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Writes a file, or sees that the one which is there holds the same."""
    if create_file(path, content, mode=mode):
        return
    held = path.read_bytes()
    if held != content:
        raise ValueError(
            f"{path} must hold what is asked for, {_facts(content)}, got {_facts(held)}: give "
            "another folder, or the text that this one was begun with"
        )


def _facts(content: bytes) -> str:
    count, digest = content.count(b"\n"), hashlib.sha256(content).hexdigest()
    lines = f"{count} line" if count == 1 else f"{count} lines"
    return f"{lines}, {len(content):,} bytes, SHA-256 {digest[:12]}"
