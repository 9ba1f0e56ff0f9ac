"""Measure an accountant with a ledger: charges a second, size of the file, time to open.

    python -m benchmarks.ledger --folder /path/on/the/disk/in/question

One charge is AdaPMixED's for one query: a screening and the losses of N models at K orders.
Between the runs of charges the same disk flushes 4096 bytes and nothing else. No durable charge can
be faster than that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from adapmixed.privacy import (
    Accountant,
    Event,
    GaussianScreening,
    LeaveOneOutLoss,
    PublicAnswer,
    read_ledger,
)

DELTA = 1e-5


def charges(count: int, models: int, orders: int) -> list[list[Event]]:
    """Return the charges of `count` queries; losses have as many random digits as real ones."""
    generator = np.random.default_rng(0)
    at = tuple(2.0 + k for k in range(orders))
    return [
        [
            GaussianScreening(models, 1, 1e-4, 1e-2),
            LeaveOneOutLoss(at, generator.exponential(1e-5, (models, 1, orders)), "zero_out", 1e-5),
            PublicAnswer(0),
        ]
        for _ in range(count)
    ]


def flushes_per_second(folder: Path, seconds: float = 1.0) -> float:
    """Return writes of 4096 bytes a second, each flushed, over the same block."""
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
            with Accountant(DELTA, path=path) as accountant:
                if accountant.charges:
                    openings.append(1e3 * (time.perf_counter() - start))
                rates.append(charged(accountant, listed))
                total = accountant.charges
        size = path.stat().st_size / total
        start = time.perf_counter()
        assert read_ledger(path).charges == total
        replay = 1e3 * (time.perf_counter() - start) / total
    print(f"N = {arguments.models}, K = {arguments.orders}, {total} charges, one query each")
    for name, values in (("charges", rates), ("flushes", flushes)):
        low, high = min(values), max(values)
        print(f"{name} per second: {statistics.median(values):.0f} ({low:.0f} to {high:.0f})")
    print(f"charges per second without a ledger: {charged(Accountant(DELTA), listed):.0f}")
    print(f"bytes per charge in the closed database: {size:.0f}")
    if openings:
        first = arguments.charges
        print(f"opening after {first} charges: {openings[0]:.1f} ms")
        print(f"opening after {total - first} charges: {openings[-1]:.1f} ms")
    print(f"verifying, per charge: {replay:.3f} ms")


def charged(accountant: Accountant, listed: list[list[Event]]) -> float:
    """Return charges per second."""
    start = time.perf_counter()
    for events in listed:
        accountant.add(events)
    return len(listed) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
