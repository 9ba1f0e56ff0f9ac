"""A tiny public model with a tokenizer, a corpus of users, and runs over them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from adapmixed.data import Corpus, demo_base
from adapmixed.training import FinetuneConfig, TrainingRun

CONFIG = FinetuneConfig(
    rank=2, alpha=4, target_modules=("c_attn",), learning_rate=0.01, epochs=2, batch_size=2,
    block_size=16,
)  # fmt: skip
# Every call by which training changes what is on the disk.
CALLS = ("fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir")
USERS = [f"user-{number}" for number in range(12)]
KEY = "00112233445566778899aabbccddeeff" * 2
NUM_MODELS = 4


def write_base(folder: Path) -> Path:
    """A random GPT-2 that takes the demonstration's tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=2048, n_positions=32, n_embd=8, n_layer=1, n_head=2, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_base() / name, folder / name)
    return folder


def rows() -> list[dict[str, str]]:
    """Five sentences of each user, in turn."""
    return [
        {"user": user, "text": f"{user} says that {number} and {len(user) * number} are numbers"}
        for number in range(5)
        for user in USERS
    ]


def write_corpus(path: Path, changed: list[dict[str, str]] | None = None) -> Corpus:
    content = "".join(json.dumps(row) + "\n" for row in changed or rows())
    path.write_text(content, encoding="utf-8")
    return Corpus(str(path), id_column="user")


def a_run(folder: Path, base: Path, name: str = "ensemble", **changes: Any) -> TrainingRun:
    """A run into `folder / name` over the corpus, its key lying outside of the run's folders."""
    key = folder / "operator.key"
    if not key.exists():
        key.write_text(KEY + "\n")
        key.chmod(0o600)
    run = TrainingRun(
        base=str(base),
        corpus=write_corpus(folder / "corpus.jsonl"),
        output=folder / name,
        num_models=NUM_MODELS,
        config=CONFIG,
        key_file=key,
        validation_fraction=0.2,
    )
    return replace(run, **changes)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def forked(work: Callable[[], object]) -> int:
    """The process id of a child that does the work and ends with 0, or with 1 if it fails."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        forkserver._forkserver.__init__()  # the parent's server is none of this process's
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def killed_before(work: Callable[[], object], number: int) -> int:
    """Work in a child that is killed before its number-th change of the disk: how it ended."""
    left = number

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return wrapped

    def watched() -> None:
        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        work()

    return status_of(forked(watched))


def status_of(child: int) -> int:
    """How a child ended: its exit status, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def until(condition: Callable[[], object], *, seconds: float) -> None:
    """Waits; a condition that never comes fails the test."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
