"""Ranks as forked processes, their results, and mechanisms over five members."""

from __future__ import annotations

import math
import os
import pickle
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mechanism_cases import MECHANISMS as PLAIN
from processes import forked, status_of
from tiny_models import adapted_layers, write_adapter
from torch import Tensor
from training_cases import write_base

from adapmixed import ranks as module
from adapmixed.cli import main
from adapmixed.ensemble import Manifest, write_manifest
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.ranks import Ranks, joined

TIMEOUT = 20.0


def write_models(folder: Path) -> None:
    """Write a base with a tokenizer, and an ensemble of three, the last one with an empty shard."""
    from transformers import GPT2LMHeadModel

    base = GPT2LMHeadModel.from_pretrained(write_base(folder / "base"))
    write_ensemble(folder / "ensemble", base, [["c_attn"]] * 3, zero=2)


def write_ensemble(
    folder: Path, base: Any, members: list[list[str] | None], zero: int | None = None
) -> None:
    """Write members of these target modules; None is a missing one."""
    names = tuple(None if modules is None else f"member-{i}" for i, modules in enumerate(members))
    written = [
        write_adapter(base, folder / name, seed=i, zero=i == zero, target_modules=members[i])
        for i, name in enumerate(names)
        if name is not None
    ]
    write_manifest(folder, Manifest("base", names, adapted_layers(written)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_processes(world: int, work: Callable[[int], None]) -> list[int]:
    """Start the work of every rank in a process of its own, as torchrun does."""
    port = free_port()

    def run(rank: int) -> None:
        os.environ |= environment(rank, world, port)
        work(rank)

    return [forked(partial(run, rank)) for rank in range(world)]


def started(
    world: int, work: Callable[[Ranks], object], folder: Path, timeout: float = TIMEOUT
) -> list[int]:
    """Start ranks that store the result of the work, or its ValueError or RuntimeError."""

    def run(rank: int) -> None:
        outcome: object
        module.TIMEOUT_SECONDS = timeout
        try:
            with joined() as ranks:
                assert not ranks.single
                outcome = work(ranks)
        except (ValueError, RuntimeError) as error:
            outcome = error
        (folder / f"rank-{rank}").write_bytes(pickle.dumps(outcome))

    return in_processes(world, run)


def commands(world: int, arguments: list[str], folder: Path) -> list[int]:
    """Start `adapmixed` in `world` ranks, whose output goes to `folder`; see `texts`."""

    def run(rank: int) -> None:
        sys.stdout = open(folder / f"out-{rank}", "w", encoding="utf-8")
        sys.stderr = open(folder / f"err-{rank}", "w", encoding="utf-8")
        status = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    return in_processes(world, run)


def texts(folder: Path, rank: int) -> tuple[str, str]:
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


def in_ranks(world: int, work: Callable[[Ranks], object], folder: Path) -> list[Any]:
    """Return the result of the work on each rank, or its ValueError or RuntimeError."""
    children = started(world, work, folder)
    assert [status_of(child) for child in children] == [0] * world
    return [result(folder, rank) for rank in range(world)]


MODELS, POSITIONS, VOCAB = 5, 6, 61
# Each mechanism with the epsilon of every shard's budget, or None. Some members, but not all, spend
# their budgets before the last position.
MECHANISMS: dict[str, tuple[Mechanism, float | None]] = {
    **{name: (mechanism, None) for name, mechanism in PLAIN.items()},
    "adapmixed, orders": (AdaPMixED(3.0, 0.4, screen=None, loss_orders=(2.0, 3.0, 18.0)), None),
    "clipped-mixing, unsure": (ClippedMixing(0.6, 2.0, 100, public_confidence=0.2), None),
    "clipped-mixing, budgets": (ClippedMixing(0.5, 2.0, order=8.0), 1.27),
    "clipped-log-pool, unsure": (ClippedLogPool(-0.5, 1.0, 2.0, public_confidence=0.2), None),
    "clipped-log-pool, budgets": (ClippedLogPool(-0.5, 1.0, 2.0), 2.4),
}


def logits(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Return logits (N, B, V) and (B, V) with an empty shard, masked tokens and ties in q."""
    generator = torch.Generator().manual_seed(seed)
    public = (2.0 * torch.randn(POSITIONS, VOCAB, generator=generator)).round(decimals=0)
    private = public + torch.randn(MODELS, POSITIONS, VOCAB, generator=generator)
    private[1] = public
    public[:, 3] = private[:, :, 3] = -math.inf
    private[2, :, 5] = -math.inf
    return private, public
