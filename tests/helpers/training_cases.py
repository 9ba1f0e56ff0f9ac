"""A tiny public model with a tokenizer, a corpus of users, and runs over them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model

from adapmixed.data import Corpus, demo_base
from adapmixed.training import FinetuneConfig, TrainingRun, train_ensemble
from adapmixed.training.shards import TrainingFolder

CONFIG = FinetuneConfig(
    rank=2, alpha=4, target_modules=("c_attn",), learning_rate=0.01, epochs=2, batch_size=2,
    block_size=16, validation_fraction=0.2,
)  # fmt: skip
USERS = [f"user-{number}" for number in range(12)]
KEY = "00112233445566778899aabbccddeeff" * 2
NUM_MODELS = 4


def write_base(folder: Path) -> Path:
    """Write a random GPT-2 with the demonstration's tokenizer."""
    sizes = {"vocab_size": 2048, "hidden_size": 8, "num_hidden_layers": 1}
    tiny_model("gpt2", **sizes).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_base() / name, folder / name)
    return folder


def rows() -> list[dict[str, str]]:
    """Return five sentences of each user, with users in turn."""
    return [
        {"user": user, "text": f"{user} says that {number} and {len(user) * number} are numbers"}
        for number in range(5)
        for user in USERS
    ]


def write_corpus(path: Path, changed: list[dict[str, str]] | None = None) -> Corpus:
    content = "".join(json.dumps(row) + "\n" for row in changed or rows())
    path.parent.mkdir(exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return Corpus(str(path), id_column="user")


def a_run(folder: Path, base: Path, name: str = "ensemble", **changes: Any) -> TrainingRun:
    """Return a run over the corpus into `folder / name`, whose key is `KEY`.

    Users share shards unless `changes` say otherwise.
    """
    write_key(folder / name)
    run = TrainingRun(
        base=str(base),
        corpus=write_corpus(folder / "corpus.jsonl"),
        output=folder / name,
        num_models=NUM_MODELS,
        config=CONFIG,
        share_shards=True,
    )
    return replace(run, **changes)


def write_key(output: Path) -> Path:
    """Write `KEY` where a run into `output` reads it, and return the file."""
    key = TrainingFolder(output, 0).key_file
    key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key.write_text(KEY + "\n")
    key.chmod(0o600)
    return key


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def trained(run: TrainingRun, **settings: Any) -> dict[str, bytes]:
    """Train without a word, and return the ensemble's files."""
    train_ensemble(run, say=lambda line: None, **settings)
    return contents(run.output)


def refuses(reason: str, run: TrainingRun, **settings: Any) -> None:
    """Check that training raises ValueError with this reason."""
    with pytest.raises(ValueError, match=reason):
        trained(run, **settings)
