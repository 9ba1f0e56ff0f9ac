"""How fast a ledger charges, how large it grows, and how long opening it takes.

    python -m benchmarks.ledger --folder /path/on/the/disk/in/question

One charge is what AdaPMixED emits for one query: a screening and the losses of N models at K
orders. Between the runs of charges the same disk flushes 4096 bytes and nothing else, which is
what a durable charge cannot be faster than.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from adapmixed.privacy import Event, GaussianScreening, LeaveOneOutLoss, Ledger, PublicAnswer
from adapmixed.privacy.ledger.codec import encode

SETTINGS = {"delta": 1e-5, "configuration": "benchmark"}


def charges(count: int, models: int, orders: int) -> list[list[Event]]:
    """What `count` queries emit; losses with as many random digits as real ones."""
    generator = np.random.default_rng(0)
    at = tuple(2.0 + k for k in range(orders))
    return [
        [
            GaussianScreening(models, 1, 1e-4, 1e-2),
            LeaveOneOutLoss(
                at, generator.exponential(1e-5, (models, 1, orders)), "add_remove", 1e-5
            ),
            PublicAnswer(0),
        ]
        for _ in range(count)
    ]


def flushes_per_second(folder: Path, seconds: float = 1.0) -> float:
    """Writes of 4096 bytes, each flushed, over the same block."""
    file = os.open(folder / "flush", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            os.pwrite(file, bytes(4096), 0)
            os.fdatasync(file)
            done += 1
        return done / (time.perf_counter() - start)
    finally:
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--charges", type=int, default=1000, help="per run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--orders", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the ledger is written")
    arguments = parser.parse_args()
    rates, flushes, openings = [], [], []
    listed = charges(arguments.charges, arguments.models, arguments.orders)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "ledger.db"
        for _ in range(arguments.runs):
            flushes.append(flushes_per_second(Path(folder)))
            start = time.perf_counter()
            ledger = Ledger.open(path, **SETTINGS)  # type: ignore[arg-type]
            if ledger.charges:
                openings.append(1e3 * (time.perf_counter() - start) / ledger.charges)
            with ledger:
                start = time.perf_counter()
                for events in listed:
                    ledger.charge(events)
                rates.append(arguments.charges / (time.perf_counter() - start))
                total = ledger.charges
        size = path.stat().st_size / total
    start = time.perf_counter()
    compressed = [len(encode(events)[1]) for events in listed]
    encoding = 1e3 * (time.perf_counter() - start) / len(listed)
    print(f"N = {arguments.models}, K = {arguments.orders}, {total} charges, one query each")
    for name, values in (("charges", rates), ("flushes", flushes)):
        low, high = min(values), max(values)
        print(f"{name} per second: {statistics.median(values):.0f} ({low:.0f} to {high:.0f})")
    print(f"bytes per charge in the closed database: {size:.0f}")
    print(f"of these, compressed losses: {statistics.mean(compressed):.0f}")
    print(f"encoding a charge: {encoding:.3f} ms")
    if openings:
        print(f"opening, per charge: {statistics.median(openings):.3f} ms")


if __name__ == "__main__":
    main()
