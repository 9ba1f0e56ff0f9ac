"""Ensembles over the same built-in text, divided into fewer or more shards.

Paragraphs are assigned one by one, so that even hundreds of shards hold some text each. The
demonstration's own ensemble keeps topics whole instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from adapmixed.data import Document, private_documents
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.demo import CONFIG
from adapmixed.training.shards import create_public_key
from adapmixed_lab.reproduce.trained import trained, write_corpus

SIZES = (8, 32, 128)


def paragraphs(documents: Iterable[Document] | None = None) -> list[Document]:
    """Return the documents, by default the built-in private ones, each under its own name."""
    found = private_documents() if documents is None else documents
    return [Document(f"paragraph {number}", one.text) for number, one in enumerate(found)]


def builtin_divided(
    folder: Path,
    base: str,
    sizes: Sequence[int] = SIZES,
    *,
    documents: Iterable[Document] | None = None,
    config: FinetuneConfig = CONFIG,
    seed: int = 0,
    workers: int | None = None,
) -> list[Path]:
    """Train an ensemble of each size and return the folders; existing members are kept.

    Args:
        folder: parent of the ensembles' folders, ``divided-N``.
        base: folder of the public model.
        sizes: numbers of models N.
        documents: the text; None: the built-in private text.
        config: settings of every member's training, by default the demonstration's.
        seed: of the training and the division.
        workers: processes that train; None: one for each core.

    Raises:
        ValueError: if there are no documents, or if the folder holds another text, another key or
            an ensemble of other settings.
        RuntimeError: if a worker was killed.
    """
    other = f"-seed-{seed}" if seed else ""
    text, key = folder / "divided-text.jsonl", folder / f"divided{other}.key"
    write_corpus(text, paragraphs(documents))
    create_public_key(key, f"adapmixed built-in text, divided{other}")
    return [
        trained(
            folder / f"divided-{size}{other}", base=base, text=text, key=key, num_models=size,
            config=config, seed=seed, workers=workers,
        )
        for size in sizes
    ]  # fmt: skip
