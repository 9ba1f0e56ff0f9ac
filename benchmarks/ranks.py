"""Time the sending of the members' rows to the main process, over gloo on one machine.

    python -m benchmarks.ranks [--quick] [--out PREFIX]

Two processes, each with half of the members:

- gather: the rows of N members alone, at the sizes of decoding (1 query) and of an evaluation
  (several positions at once);
- step: one decoded token of GPT-2 small with N = 100 members that adapt c_attn in every block
  (random weights, r = 8, fp32). It times the members' forward pass, sending, and ClippedLogPool
  with its charge and draw on the main process. Members of the output layer alone send nothing,
  since every process computes them.

The gathered rows are compared with those of one process before the timing.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant
from adapmixed.ranks import Group, Place, joined
from adapmixed.rng import SecureRandom
from benchmarks.forward import SMALL, TINY, make_base
from benchmarks.harness import Report, headline, machine
from benchmarks.trunk import MEMORY, make_ensemble, make_prompt

WORLD = 2
POOL = ClippedLogPool(-0.25, 1.0, 2.0)
CASES = [
    # members, queries, vocabulary, dtype
    (100, 1, 50257, torch.float32),
    (100, 16, 50257, torch.float32),
    (1000, 1, 32000, torch.bfloat16),
    (1000, 4, 32000, torch.bfloat16),
]
QUICK = [(4, 1, 512, torch.float32)]


def median_seconds(call: Callable[[], object], runs: int) -> float:
    """Return the median over runs; the processes begin each run together."""
    found = []
    for _ in range(runs + 1):  # the first one is not counted
        dist.barrier()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def gathering(report: Report, ranks: Group, quick: bool, runs: int) -> None:
    if ranks.is_main:
        report.say("gather: half of the rows are the main process's own")
    for members, queries, vocab, dtype in QUICK if quick else CASES:
        spread = ranks.over(members)
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(members, queries, vocab, generator=generator).to(dtype)
        rows = whole[spread.own(members)].clone()
        found = spread.gather(rows)
        assert found is None or torch.equal(found, whole)
        del whole, found
        seconds = median_seconds(lambda spread=spread, rows=rows: spread.gather(rows), runs)  # type: ignore[misc]
        sent = (members - rows.shape[0]) * queries * vocab * rows.element_size()
        if ranks.is_main:
            report.say(
                f"  N = {members:4}, {queries:2} queries, V = {vocab}, "
                f"{str(dtype).removeprefix('torch.'):8} {sent / 1e6:8.1f} MB sent "
                f"{1e3 * seconds:8.1f} ms  {sent / seconds / 1e9:5.2f} GB/s"
            )
            report.tables.setdefault("gather", []).append(
                {"members": members, "queries": queries, "vocab": vocab, "dtype": str(dtype),
                 "bytes": sent, "seconds": seconds, "runs": runs}
            )  # fmt: skip


def step(report: Report, ranks: Group, quick: bool, runs: int) -> None:
    shape, members, length = (TINY, 4, 8) if quick else (SMALL, 100, 128)
    base = make_base(shape, torch.device("cpu"))
    spread = ranks.over(members)
    own = spread.own(members)
    ensemble = make_ensemble(base, "deep (c_attn)", own.stop - own.start)
    decoder = ensemble.decoder(
        make_prompt(shape.vocab, 1, length), memory_bytes=MEMORY, new_tokens=3 * runs + 3
    )
    rng, accountant = SecureRandom(), Accountant(1e-5)

    def forward() -> None:
        decoder.append(torch.tensor([7]))

    def answer(whole: torch.Tensor) -> None:
        proposal = POOL.propose(whole, decoder.logits[1], rng=rng)
        accountant.charge(proposal)
        proposal.release()

    parts = {
        "forward pass": median_seconds(forward, runs),
        "sending": median_seconds(lambda: spread.gather(decoder.logits[0]), runs),
    }
    whole = spread.gather(decoder.logits[0])
    if whole is not None:
        start = time.perf_counter()
        for _ in range(runs):
            answer(whole)
        parts["answer"] = (time.perf_counter() - start) / runs
        total = sum(parts.values())
        report.say(
            f"\nstep: one token, {shape.name}, N = {members}, c_attn, {length} tokens before"
        )
        for name, seconds in parts.items():
            report.say(f"  {name:14}{1e3 * seconds:8.1f} ms  {seconds / total:6.1%}")
        report.tables["step"] = [parts]


def process(rank: int, port: int, quick: bool, runs: int, out: Path | None) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORLD))
    about, report = machine(), Report()
    with joined(place=Place(rank, WORLD)) as ranks:
        assert isinstance(ranks, Group)
        if ranks.is_main:
            report.say(f"{headline(about)}\n{WORLD} processes over gloo on one machine\n")
        gathering(report, ranks, quick, runs)
        step(report, ranks, quick, runs)
    if ranks.is_main and out:
        report.write(out, machine=about, quick=quick)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few runs, no meaning")
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs = 2 if arguments.quick else arguments.runs
    mp.spawn(process, (port, arguments.quick, runs, arguments.out), nprocs=WORLD)


if __name__ == "__main__":
    main()
