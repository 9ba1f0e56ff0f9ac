"""Processes that train one ensemble together without talking: files are all they share.

Rank r of R trains the members r, r + R, r + 2R ... and holds a lock, which the operating system
releases when the process ends, however it ends. So whoever waits for a member sees whether its rank
still lives.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adapmixed import ranks

START_SECONDS = 60.0
"""How long a rank may take to appear after another one has finished its own members."""
_POLL_SECONDS = 0.2
_LOCK_SECONDS = 1.0  # a rank that looks whether the lock is held takes it for an instant


@dataclass(frozen=True)
class Place(ranks.Place):
    """Which of how many ranks this process is, and which members are its own."""

    def members(self, num_models: int) -> range:
        """The members this rank trains."""
        return range(self.rank, num_models, self.world)

    @contextmanager
    def lock(self, folder: Path) -> Iterator[None]:
        """Held while this rank works in `folder`.

        Raises:
            ValueError: if another process has the place.
        """
        descriptor = os.open(_lock_file(folder, self.rank), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"another process trains as rank {self.rank} with {folder}: wait for it, "
                        "or end it"
                    )
                time.sleep(0.05)
            yield
        finally:
            os.close(descriptor)

    def wait(self, folder: Path, missing: Callable[[], list[int]]) -> None:
        """Returns when no member is missing.

        Args:
            folder: as `lock`.
            missing: members that are not finished.

        Raises:
            RuntimeError: if members are missing whose rank has ended, or never began.
        """
        started = time.monotonic()
        seen = {self.rank}
        while True:
            # In this order: a rank may finish its last member and end between the two looks.
            living = {rank for rank in range(self.world) if _is_held(folder, rank)}
            left = missing()
            if not left:
                return
            seen |= living
            waited = time.monotonic() - started > START_SECONDS
            for rank in sorted({member % self.world for member in left} - living):
                if rank in seen or waited:
                    lost = sum(member % self.world == rank for member in left)
                    raise RuntimeError(
                        f"rank {rank} of {self.world} {'ended' if rank in seen else 'never began'} "
                        f"and left {lost} members untrained; the finished ones are kept: "
                        "run the same command again"
                    )
            time.sleep(_POLL_SECONDS)


def _lock_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:03d}.lock"


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_held(folder: Path, rank: int) -> bool:
    try:
        descriptor = os.open(_lock_file(folder, rank), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
