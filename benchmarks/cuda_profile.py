"""Microseconds per kernel of a query on a GPU, by torch.profiler.

    python -m benchmarks.cuda_profile --out kernels.txt
    python -m benchmarks.cuda_profile --once               # one call each, for ncu to watch

The calls are `log_pool` + `mixture` + `sample` and `project` + `leave_one_out`, at B = 8 and 1, in
bf16 and fp32. `--dry-run` runs them on the CPU, whatever that tells.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import adapmixed_ext
from adapmixed.rng import SeededRandom
from benchmarks.harness import Query
from benchmarks.inputs import ORDER, RADIUS, make_query, pool_token, two_calls
from benchmarks.timing import Device

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STEPS = 20


def steps(query: Query, rng: SeededRandom) -> dict[str, Callable[[], object]]:
    return {
        "log_pool + mixture + sample": lambda: pool_token(query, rng),
        "project + leave_one_out": lambda: two_calls(query, ORDER, RADIUS, ORDER),
    }


def table(call: Callable[[], object], positions: int, gpu: bool) -> list[str]:
    """Return a line for each kernel: microseconds a query, launches a call, name."""
    for _ in range(3):
        call()
    activity = ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as watched:
        for _ in range(STEPS):
            call()
        if gpu:
            torch.cuda.synchronize()
    rows = []
    for event in watched.key_averages():
        taken = event.self_device_time_total if gpu else event.self_cpu_time_total
        if taken > 0:
            rows.append((taken / STEPS / positions, event.count / STEPS, event.key))
    rows.sort(reverse=True)
    total = sum(row[0] for row in rows)
    launches = sum(row[1] for row in rows)
    return [
        f"  {total:9.2f} µs a query in kernels, {launches:g} of them a call",
        *(f"  {taken:9.2f} {count:6g}  {name[:100]}" for taken, count, name in rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="file for the tables, besides the screen")
    parser.add_argument("--once", action="store_true", help="run each call once, without profiler")
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU, tiny")
    options = parser.parse_args()
    device, rng = Device("cuda", options.dry_run), SeededRandom(0)
    models, vocab = (6, 512) if options.dry_run else (100, 50_257)
    built = adapmixed_ext.build_info()["cuda_architectures"]
    lines = [
        f"{models} models, {vocab} tokens, order {ORDER:g}, radius {RADIUS:g}; "
        f"torch {torch.__version__}, built for {built}"
    ]
    for (dtype, kind), positions in itertools.product(DTYPES.items(), (8, 1)):
        query = make_query(models, vocab, positions=positions, dtype=kind, device=device.device)
        for name, call in steps(query, rng).items():
            if options.once:
                call()
            else:
                lines += ["", f"{name}, {dtype}, B = {positions}"]
                lines += table(call, positions, device.gpu)
    if device.gpu:
        torch.cuda.synchronize()
    print("\n".join(lines), flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
