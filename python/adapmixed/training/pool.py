"""Train members in several processes at once."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import torch

from adapmixed.ensemble.manifest import read_member_record
from adapmixed.training.member import MemberTrainer
from adapmixed.training.progress import Progress
from adapmixed.workers import start_server

_TELL_SECONDS = 0.2  # between two messages of a worker
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_worker: tuple[MemberTrainer, Any] | None = None


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
