"""Time the sending of the members' rows to the main process, over gloo on one machine.

    python -m benchmarks.ranks [--quick] [--out PREFIX]

Two processes, each with half of the members:

- gather: the rows of N members alone, at the sizes of decoding (1 query) and of an evaluation
  (several positions at once);
- decoding and evaluating: one token, and a window of 128 tokens, of GPT-2 small with members that
  adapt c_attn in every block (random weights, r = 8, fp32). They time the members' forward pass,
  sending, and ClippedLogPool with its charge on the main process. Members of the output layer alone
  send nothing, since every process computes them.

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

from adapmixed.ensemble import Ensemble
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant
from adapmixed.ranks import Group, Place, Ranks, joined
from adapmixed.rng import SecureRandom
from benchmarks.forward import SMALL, TINY, Shape, make_base
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
POSITIONS = 64  # that an evaluation answers at once
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


def say_parts(report: Report, title: str, parts: dict[str, float], runs: int) -> None:
    total = sum(parts.values())
    report.say(f"\n{title}")
    for name, seconds in parts.items():
        report.say(f"  {name:14}{1e3 * seconds:9.1f} ms  {seconds / total:6.1%}")
    report.tables.setdefault("steps", []).append({"step": title, "seconds": parts, "runs": runs})


def decoding(report: Report, ranks: Group, members: int, quick: bool, runs: int) -> None:
    shape, length = (TINY, 8) if quick else (SMALL, 128)
    spread = ranks.over(members)
    ensemble = own_members(spread, members, shape)
    decoder = ensemble.decoder(
        make_prompt(shape.vocab, 1, length), memory_bytes=MEMORY, new_tokens=runs + 1
    )
    rng, accountant = SecureRandom(), Accountant(1e-5)
    parts = {
        "forward pass": median_seconds(lambda: decoder.append(torch.tensor([7])), runs),
        "sending": median_seconds(lambda: spread.gather(decoder.logits[0]), runs),
    }
    whole = spread.gather(decoder.logits[0])
    if whole is not None:
        start = time.perf_counter()
        for _ in range(runs):
            proposal = POOL.propose(whole, decoder.logits[1], rng=rng)
            accountant.charge(proposal)
            proposal.release()
        parts["answer"] = (time.perf_counter() - start) / runs
        title = f"decoding: one token, {shape.name}, N = {members}, c_attn, {length} tokens before"
        say_parts(report, title, parts, runs)


def evaluating(report: Report, ranks: Group, members: int, quick: bool, runs: int) -> None:
    shape, length, memory = (TINY, 8, 1 << 30) if quick else (SMALL, 128, 2 << 30)
    spread = ranks.over(members)
    ensemble = own_members(spread, members, shape)
    ids = make_prompt(shape.vocab, 1, length)
    rng, accountant = SecureRandom(), Accountant(1e-5)
    found = []
    for _ in range(runs + 1):  # the first one is not counted
        parts = dict.fromkeys(("forward pass", "sending", "answer"), 0.0)
        dist.barrier()
        start = time.perf_counter()
        for where, private, public in ensemble.iter_logits(ids, memory_bytes=memory):
            dist.barrier()
            parts["forward pass"] += time.perf_counter() - start
            for first in range(where.start, where.stop, POSITIONS):
                part = slice(first - where.start, first - where.start + POSITIONS)
                start = time.perf_counter()
                whole = spread.gather(private[:, 0, part])
                parts["sending"] += time.perf_counter() - start
                start = time.perf_counter()
                if whole is not None:
                    proposal = POOL.propose(
                        whole, public[0, part], targets=ids[0, where][part], rng=rng
                    )
                    accountant.charge(proposal)
                    proposal.release()
                parts["answer"] += time.perf_counter() - start
                dist.barrier()
            start = time.perf_counter()
        found.append(parts)
    if ranks.is_main:
        medians = {name: statistics.median(one[name] for one in found[1:]) for name in found[0]}
        title = f"evaluating: a window of {length} tokens, {shape.name}, N = {members}, c_attn"
        say_parts(report, title, medians, runs)


def own_members(spread: Ranks, members: int, shape: Shape) -> Ensemble:
    own = spread.own(members)
    base = make_base(shape, torch.device("cpu"))
    return make_ensemble(base, "deep (c_attn)", own.stop - own.start)


def process(rank: int, port: int, quick: bool, runs: int, out: Path | None) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORLD))
    about, report = machine(), Report()
    with joined(place=Place(rank, WORLD)) as ranks:
        assert isinstance(ranks, Group)
        if ranks.is_main:
            report.say(f"{headline(about)}\n{WORLD} processes over gloo on one machine\n")
        gathering(report, ranks, quick, runs)
        decoding(report, ranks, 4 if quick else 100, quick, runs)
        decoding(report, ranks, 6 if quick else 1000, quick, min(runs, 5))
        evaluating(report, ranks, 4 if quick else 100, quick, min(runs, 3))
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
