"""Private texts, each with a public model that is near to it or far from it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapmixed.data import Document, held_out_documents
from adapmixed.files import publish_folder, temporary_folder
from adapmixed.training.blocks import token_blocks, token_stream
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.finetune import fit
from adapmixed_lab.reproduce.divided import paragraphs
from adapmixed_lab.reproduce.kinds.changelogs import changelog_documents
from adapmixed_lab.reproduce.trained import write_corpus

NO_CHANGELOGS = (
    "Change logs by author are left out, because this machine has none of Debian's packages below "
    "/usr/share/doc."
)
_HELD_OUT, _PUBLIC = 0.15, 0.4  # authors below the first are held out, below the second public
_FEWEST = 200  # fewest authors that make a study
TUNING = FinetuneConfig(learning_rate=1e-3, epochs=4, batch_size=8, block_size=256)
"""Training of all weights of the public model on other authors' text."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Domain:
    """A private corpus and the public model that answers about it.

    Attributes:
        name: for tables and figures.
        slug: for files.
        base: folder of the public model.
        text: file of the private documents (`write_corpus`).
        held_out: text that is in no shard.
        epochs: passes over a shard, for every kind of member.
        rate: factor of all learning rates; a public model that is near to the text overfits sooner.
    """

    name: str
    slug: str
    base: str
    text: Path
    held_out: tuple[str, ...]
    epochs: int
    rate: float = 1.0


def domains(folder: Path, base: str, progress: Progress | None = None) -> list[Domain]:
    """Write the corpora, and fine-tune a public model on the change logs of other authors.

    Args:
        folder: for the corpora and that model; existing ones are kept.
        base: folder of the built-in public model.
        progress: called after every step of that model's training.

    Returns:
        the built-in corpus, then the change logs twice, but not on a machine without them.
    """
    text = folder / "language-reference.jsonl"
    write_corpus(text, paragraphs())
    held_out = tuple(one.text for one in held_out_documents())
    found = [Domain("language reference", "reference", base, text, held_out, 8)]
    logs = changelog_documents()
    if len({one.identifier for one in logs}) < _FEWEST:
        return found
    parts = {
        "held out": [one for one in logs if _place(one) < _HELD_OUT],
        "public": [one for one in logs if _HELD_OUT <= _place(one) < _PUBLIC],
        "private": [one for one in logs if _place(one) >= _PUBLIC],
    }
    text = folder / "change-logs.jsonl"
    write_corpus(text, parts["private"])
    held_out = tuple(one.text for one in parts["held out"])
    tuned = folder / "public-model"
    if not tuned.exists():
        _tune(base, [one.text for one in parts["public"]], tuned, progress)
    return [
        *found,
        Domain("change logs", "logs", base, text, held_out, 6),
        Domain(
            "change logs, tuned public model", "logs-tuned", str(tuned), text, held_out, 4, 0.25
        ),
    ]


def _place(document: Document) -> float:
    """Return an author's place in [0, 1), which depends on the name alone."""
    digest = hashlib.blake2b(
        document.identifier.encode(), digest_size=8, key=b"adapmixed change logs"
    ).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def _tune(base: str, texts: Sequence[str], folder: Path, progress: Progress | None) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    inputs, labels = token_blocks(token_stream(tokenizer, texts), TUNING.block_size)
    generator = torch.Generator().manual_seed(0)
    fit(model, inputs, labels, TUNING, generator=generator, progress=progress)
    written = temporary_folder(folder)
    tokenizer.save_pretrained(written)
    model.save_pretrained(written)
    publish_folder(written, folder)
