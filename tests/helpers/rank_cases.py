"""Run ranks as forked processes and collect their results."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_models import adapted_layers, write_adapter
from training_cases import forked, status_of, write_base

from adapmixed.cli import main
from adapmixed.ensemble import Manifest, write_manifest
from adapmixed.ranks import Group, joined

TIMEOUT = 20.0


def write_models(folder: Path, *, members: int, zero: int | None = None) -> None:
    """Write a base and an ensemble of `members`, one with an empty shard, to files."""
    from transformers import GPT2LMHeadModel

    base = GPT2LMHeadModel.from_pretrained(write_base(folder / "base"))
    names = tuple(f"member-{i}" for i in range(members))
    for i, name in enumerate(names):
        path = folder / "ensemble" / name
        write_adapter(base, path, seed=i, zero=i == zero, target_modules=["c_attn"])
        config = json.loads((path / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "base"
        (path / "adapter_config.json").write_text(json.dumps(config))
    write_manifest(
        folder / "ensemble",
        Manifest("base", names, adapted_layers([folder / "ensemble" / n for n in names])),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(
    world: int,
    work: Callable[[Group], object],
    folder: Path,
    timeout: float = TIMEOUT,
    missing: int = 0,
) -> list[int]:
    """Start the processes of `world` ranks, without the last `missing` ones.

    Each stores the result of the work, or its ValueError or RuntimeError.
    """
    port = free_port()

    def one(rank: int) -> None:
        os.environ |= environment(rank, world, port)
        signal.alarm(50)  # no process may outlive the test
        found: object
        try:
            with joined(timeout_seconds=timeout) as ranks:
                assert isinstance(ranks, Group)
                found = work(ranks)
        except (ValueError, RuntimeError) as error:
            found = error
        (folder / f"rank-{rank}").write_bytes(pickle.dumps(found))

    return [forked(lambda rank=rank: one(rank)) for rank in range(world - missing)]  # type: ignore[misc]


def commands(world: int, arguments: list[str], folder: Path) -> list[int]:
    """Start `adapmixed` in `world` ranks, whose output goes to `folder`; see `said`."""
    port = free_port()

    def one(rank: int) -> None:
        os.environ |= environment(rank, world, port)
        signal.alarm(50)
        sys.stdout = open(folder / f"out-{rank}", "w", encoding="utf-8")
        sys.stderr = open(folder / f"err-{rank}", "w", encoding="utf-8")
        status = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    return [forked(lambda rank=rank: one(rank)) for rank in range(world)]  # type: ignore[misc]


def said(folder: Path, rank: int) -> tuple[str, str]:
    """Return standard output and error of a rank of `commands`."""
    return (folder / f"out-{rank}").read_text(), (folder / f"err-{rank}").read_text()


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def result(folder: Path, rank: int) -> Any:
    return pickle.loads((folder / f"rank-{rank}").read_bytes())


def in_ranks(world: int, work: Callable[[Group], object], folder: Path) -> list[Any]:
    """Return the result of the work on each rank, or its ValueError or RuntimeError."""
    children = started(world, work, folder)
    assert [status_of(child) for child in children] == [0] * world
    return [result(folder, rank) for rank in range(world)]
