"""Train one member after the other in one process or several, and show the time left."""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from math import isfinite
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from adapmixed.data.builtin import Document
from adapmixed.ensemble.manifest import MEMBER_FILE, MEMBER_VERSION, read_member_record
from adapmixed.ensemble.public_model import load_base
from adapmixed.files import publish_folder, temporary_folder, write_file
from adapmixed.training.adapter import save_adapter, shorten
from adapmixed.training.blocks import token_stream
from adapmixed.training.finetune import AdapterTrainer
from adapmixed.training.head import adapts_head_alone
from adapmixed.training.shards import Spool, hold_out, hold_out_end, shard_record
from adapmixed.workers import start_server

if TYPE_CHECKING:
    from adapmixed.training.base import BaseFacts
    from adapmixed.training.run import TrainingRun

_LOG = logging.getLogger(__name__)
_TELL_SECONDS = 0.2  # between two messages of a worker
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_worker: tuple[MemberTrainer, Any] | None = None


class MemberTrainer:
    """A trainer of members, one after the other, on one public model that is never changed."""

    def __init__(
        self, run: TrainingRun, facts: BaseFacts, device: str, spool: Spool, key: bytes
    ) -> None:
        """Load the public model.

        Args:
            run: the settings of all members.
            facts: facts about the public model.
            device: the device, for instance "cpu" or "cuda:0".
            spool: the shards.
            key: the key of the partition.
        """
        model, tokenizer = load_base(run.base, getattr(torch, run.dtype), revision=facts.revision)
        self._run, self._facts, self._spool, self._key = run, facts, spool, key
        base = model.to(device).eval()
        self._vocab_size = base.config.get_text_config().vocab_size
        self._trainer = AdapterTrainer(base, run.config)
        self._tokenizer = tokenizer

    def train(self, shard: int, folder: Path, progress: Callable[[float], None]) -> None:
        """Train one member and move it to its folder.

        B of an output layer is rounded to bfloat16: an ensemble then keeps it in half the memory.

        Args:
            shard: the member's number.
            folder: the member's folder, which must not exist.
            progress: called with the fraction done.

        Raises:
            ValueError: if training diverged.
            RuntimeError: if the disk is full.
        """
        run = self._run
        documents = self._spool.read(shard)
        training, validation = hold_out(documents, run.validation_fraction, key=self._key)
        tokens, held = self._tokens(training), self._tokens(validation)
        if not validation:
            tokens, held = hold_out_end(tokens, run.validation_fraction)
        trained = self._trainer.train(
            tokens,
            seed=run.seed,
            shard=shard,
            beginning=self._facts.beginning,
            held_out=held,
            scratch=self._spool.folder,
            progress=lambda done, steps: progress(done / steps),
        )
        weights = (p for p in trained.model.parameters() if p.requires_grad)
        losses = (*trained.losses, *trained.held_out_losses)
        if not all(bool(p.isfinite().all()) for p in weights) or not all(map(isfinite, losses)):
            raise ValueError(f"{folder.name}: training diverged, use a lower learning_rate")
        if adapts_head_alone(trained.model.get_base_model()):
            shorten(trained.model)
        record: dict[str, Any] = {
            "format_version": MEMBER_VERSION,
            "shard": shard_record(documents, key=self._key),
            "tokens": len(tokens),
            "losses": trained.losses,
            "epoch": trained.epoch,
            "validation": None,
        }
        if trained.held_out_losses:  # nats per token
            public, *after = trained.held_out_losses
            record["validation"] = {
                "documents": len(validation),
                "tokens": len(held),
                "loss": trained.held_out_losses[trained.epoch],
                "public_loss": public,
                "losses": after,
            }
        temporary = temporary_folder(folder)
        save_adapter(trained.model, temporary, run.config, base_name=self._facts.name)
        text = json.dumps(record, indent=1) + "\n"
        write_file(temporary / MEMBER_FILE, text.encode())
        for file in temporary.iterdir():  # the weights, too, depend on private text
            file.chmod(0o600)
        publish_folder(temporary, folder)

    def _tokens(self, documents: Sequence[Document]) -> list[int]:
        texts = [document.text for document in documents]
        return token_stream(self._tokenizer, texts, self._vocab_size)


def train_members(
    paths: Mapping[int, Path],
    trainer: Callable[[], MemberTrainer],
    *,
    workers: int,
    threads: int,
    progress: Progress,
) -> None:
    """Train the given members in one process or several; each is written when it is finished.

    Args:
        paths: the folder of each member, by number; none of them may exist.
        trainer: makes the trainer of a process.
        workers: number of processes, >= 1; 1 trains in this process.
        threads: threads of each process. The last bits of sums depend on this number, so a member
            depends on it, too.
        progress: called at every step, or a few times a second by each of several processes.

    Raises:
        ValueError: as `MemberTrainer`.
        RuntimeError: if a worker process ended early.
    """

    def finished(shard: int) -> None:
        progress.finished(shard, paths[shard].name, read_member_record(paths[shard]))

    if not paths:
        return
    if workers == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            made = trainer()
            for shard, path in paths.items():
                made.train(shard, path, partial(progress.update, shard))
                finished(shard)
        finally:
            torch.set_num_threads(before)
        return
    context = start_server()
    messages = context.Queue()
    executor = ProcessPoolExecutor(
        min(workers, len(paths)),
        mp_context=context,
        initializer=_begin,
        initargs=(trainer, threads, messages),
    )
    try:
        running: dict[Future[None], int] = {
            executor.submit(_train, shard, path): shard for shard, path in paths.items()
        }
        while running:
            done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            while not messages.empty():
                progress.update(*messages.get())
            for future in done:
                future.result()
                finished(running.pop(future))
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process ended early, and finished members are kept: in a script, call this "
            'under `if __name__ == "__main__":`; if memory was short, use fewer workers'
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(trainer: Callable[[], MemberTrainer], threads: int, messages: Any) -> None:
    """Prepare a worker process."""
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _keep_freed_memory()
    torch.set_num_threads(threads)
    _worker = trainer(), messages


def _keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory, so that steps need no new pages."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, 1 << 30):
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def _end_with_parent() -> None:
    """End this worker if its parent is killed; otherwise it would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


def _train(shard: int, path: Path) -> None:
    """Train one member in a worker process."""
    assert _worker is not None
    trainer, messages = _worker
    told = time.monotonic()

    def tell(fraction: float) -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            messages.put((shard, fraction))

    trainer.train(shard, path, tell)


class Progress:
    """A progress bar on a terminal, and a line per finished member.

    The work of a member is measured by its steps: an empty shard has none. Values that depend on
    the text of a shard, such as its validation loss, are only logged and never in a line.

    Args:
        steps: expected steps of each member to be trained.
        say: called with each line.
    """

    def __init__(self, steps: Mapping[int, int], say: Callable[[str], None]) -> None:
        self._steps, self._say = steps, say
        self._fractions = dict.fromkeys(steps, 0.0)
        self._done, self._begun = 0.0, time.monotonic()  # steps, and when they began
        self._bar = tqdm(
            total=sum(self._steps.values()),
            disable=None,
            leave=False,
            bar_format="{percentage:3.0f}% |{bar}| {elapsed}, {remaining} left",
        )

    def update(self, shard: int, fraction: float) -> None:
        """Record the fraction done of a member's training."""
        self._done += self._steps[shard] * (fraction - self._fractions[shard])
        self._fractions[shard] = fraction
        self._bar.n = min(self._done, self._bar.total)
        self._bar.refresh()

    def finished(self, shard: int, name: str, record: Mapping[str, Any]) -> None:
        """Print the line of a finished member, and log its losses."""
        self.update(shard, 1.0)
        count = sum(fraction == 1.0 for fraction in self._fractions.values())
        documents = record["shard"]["documents"]
        validation = record["validation"]
        loss = "no validation text"
        if documents == 0:
            loss = "the public model"
        elif validation is not None:
            loss = (
                f"validation loss {validation['loss']:.3f}, public model "
                f"{validation['public_loss']:.3f} nats per token"
            )
        self._say(f"{name}: finished ({count} of {len(self._steps)}{self._time_left()})")
        self._bar.clear()
        _LOG.info("%s: %d documents, %d tokens, %s", name, documents, record["tokens"], loss)

    def _time_left(self) -> str:
        """Return the time left at the speed so far, as a phrase; "" before there is a speed."""
        left = max(self._bar.total - self._done, 0.0)
        if left and not self._done:
            return ""
        seconds = (time.monotonic() - self._begun) * left / max(self._done, 1.0)
        if seconds < 90:
            return f", {seconds:.0f} s left"
        return (
            f", {seconds / 60:.0f} min left" if seconds < 5400 else f", {seconds / 3600:.1f} h left"
        )

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
