"""Train one ensemble in several processes, which share nothing but files.

Rank r of R trains the members r, r + R, r + 2R, ... and holds a lock. The operating system releases
the lock when the process ends, however it ends. So a process that waits for a member sees whether
the member's rank still runs.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from adapmixed.ranks import Rank

START_SECONDS = 60.0
"""Seconds that a rank waits for another one to appear, after finishing its own members."""
_POLL_SECONDS = 0.2
_LOCK_SECONDS = 1.0  # a rank that tests a lock takes it for an instant


@contextmanager
def locked(folder: Path, rank: int) -> Iterator[None]:
    """Hold a rank's lock in `folder` while the context is entered.

    Raises:
        ValueError: if another process holds it.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        with idle(folder, rank, fcntl.LOCK_EX) as free:
            if free:
                yield
                return
        if time.monotonic() > deadline:
            raise ValueError(
                f"another process trains as rank {rank} with {folder}: wait for it or end it"
            )
        time.sleep(0.05)


@contextmanager
def idle(folder: Path, rank: int, kind: int = fcntl.LOCK_SH) -> Iterator[bool]:
    """Yield whether no process has a rank's lock in `folder`, and meanwhile let none take it.

    Processes that only ask share the lock, so that none of them is taken for the rank.
    """
    descriptor = os.open(folder / f"rank-{rank:03d}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        free = True
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(descriptor)


def wait_for_members(place: Rank, folder: Path, missing: Callable[[], list[int]]) -> None:
    """Wait until no member is missing, of which rank r of R trains r, r + R, r + 2R, ...

    Args:
        place: the rank of this process.
        folder: where the ranks' locks are.
        missing: returns the members that are not finished.

    Raises:
        RuntimeError: if the rank of a missing member has ended or never began.
    """
    started = time.monotonic()
    seen = {place.rank}
    while True:
        # The order matters: a rank may finish its last member and end between the two checks.
        living = set()
        for rank in range(place.world):
            with idle(folder, rank) as free:
                if not free:
                    living.add(rank)
        left = missing()
        if not left:
            return
        seen |= living
        waited = time.monotonic() - started > START_SECONDS
        for rank in sorted({member % place.world for member in left} - living):
            if rank in seen or waited:
                lost = sum(member % place.world == rank for member in left)
                raise RuntimeError(
                    f"rank {rank} of {place.world} {'ended' if rank in seen else 'never began'} "
                    f"and left {lost} members untrained; the finished ones are kept: "
                    "run the same command again"
                )
        time.sleep(_POLL_SECONDS)
