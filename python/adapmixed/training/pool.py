"""Train one member after the other in one process or several, and show the time left."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from math import isfinite
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from adapmixed.ensemble.manifest import MEMBER_FILE, MEMBER_VERSION, read_member_record
from adapmixed.ensemble.public_model import load_base
from adapmixed.files import publish_folder, temporary_folder, write_file
from adapmixed.text import Document, token_stream
from adapmixed.training.blocks import adapts_head_alone
from adapmixed.training.finetune import AdapterTrainer, save_adapter, shorten
from adapmixed.training.shards import Spool, hold_out, hold_out_end, shard_record
from adapmixed.workers import start_server

if TYPE_CHECKING:
    from adapmixed.training.base import BaseFacts
    from adapmixed.training.run import TrainingRun

_LOG = logging.getLogger(__name__)
_worker: MemberTrainer | None = None


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

    def train(self, shard: int, folder: Path) -> None:
        """Train one member and move it to its folder.

        B of an output layer is rounded to bfloat16: an ensemble then keeps it in half the memory.

        Args:
            shard: the member's number.
            folder: the member's folder, which must not exist.

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
        progress: told of every finished member.

    Raises:
        ValueError: as `MemberTrainer`.
        RuntimeError: if a worker process ended early.
    """
    if not paths:
        return
    if workers == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            made = trainer()
            for shard, path in paths.items():
                made.train(shard, path)
                progress.finished(shard, path)
        finally:
            torch.set_num_threads(before)
        return
    executor = ProcessPoolExecutor(
        min(workers, len(paths)),
        mp_context=start_server(),
        initializer=_begin,
        initargs=(trainer, threads),
    )
    try:
        running = {executor.submit(_train, *one): one for one in paths.items()}
        for future in as_completed(running):
            future.result()
            progress.finished(*running[future])
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process ended early, and finished members are kept: in a script, call this "
            'under `if __name__ == "__main__":`; if memory was short, use fewer workers'
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(trainer: Callable[[], MemberTrainer], threads: int) -> None:
    """Prepare a worker process."""
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _worker = trainer()


def _end_with_parent() -> None:
    """End this worker if its parent is killed; otherwise it would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _train(shard: int, path: Path) -> None:
    """Train one member in a worker process."""
    assert _worker is not None
    _worker.train(shard, path)


class Progress:
    """A progress bar on a terminal, and a line per finished member with the time left.

    The work of a member is measured by its steps: an empty shard has none. Values that depend on
    the text of a shard, such as its validation loss, are only logged and never in a line.

    Args:
        steps: expected steps of each member to be trained.
        say: called with each line.
    """

    def __init__(self, steps: Mapping[int, int], say: Callable[[str], None]) -> None:
        self._left, self._say, self._begun = dict(steps), say, time.monotonic()
        self._members, self._steps = len(steps), sum(steps.values())
        self._bar = tqdm(
            total=self._steps,
            disable=None,
            leave=False,
            bar_format="{percentage:3.0f}% |{bar}| {elapsed}, {remaining} left",
        )

    def finished(self, shard: int, path: Path) -> None:
        """Print the line of a finished member, and log its losses."""
        self._bar.update(self._left.pop(shard))
        left, count = sum(self._left.values()), self._members - len(self._left)
        shown = ""  # before there is a speed
        if (done := self._steps - left) or not left:
            seconds = (time.monotonic() - self._begun) * left / max(done, 1)
            shown = f", {tqdm.format_interval(seconds)} left"
        self._say(f"{path.name}: finished ({count} of {self._members}{shown})")
        self._bar.clear()
        record = read_member_record(path)
        found = (record["shard"]["documents"], record["tokens"], record["validation"])
        _LOG.info("%s: %d documents, %d tokens, validation %s", path.name, *found)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
