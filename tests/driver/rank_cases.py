"""Ranks as forked processes, and what they found."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training_cases import forked, status_of

from adapmixed.ranks import Group, Ranks, joined

TIMEOUT = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(
    world: int, work: Callable[[Group], object], folder: Path, timeout: float = TIMEOUT
) -> list[int]:
    """The processes of so many ranks; each leaves what the work gives, or its error's text."""
    port = free_port()

    def one(rank: int) -> None:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        signal.alarm(50)  # whatever happens, no process outlives the test
        found: object
        try:
            with joined(timeout_seconds=timeout) as ranks:
                assert isinstance(ranks, Group)
                found = work(ranks)
        except (ValueError, RuntimeError) as error:
            found = error
        (folder / f"rank-{rank}").write_bytes(pickle.dumps(found))

    return [forked(lambda rank=rank: one(rank)) for rank in range(world)]  # type: ignore[misc]


def result(folder: Path, rank: int) -> Any:
    return pickle.loads((folder / f"rank-{rank}").read_bytes())


def in_ranks(world: int, work: Callable[[Group], object], folder: Path) -> list[Any]:
    """What the work gives on each rank, or its ValueError or RuntimeError."""
    children = started(world, work, folder)
    assert [status_of(child) for child in children] == [0] * world
    return [result(folder, rank) for rank in range(world)]


__all__ = ["Group", "Ranks", "free_port", "in_ranks", "result", "started", "status_of"]
