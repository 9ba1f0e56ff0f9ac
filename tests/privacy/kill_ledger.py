"""Kill a charging process at random moments: all that it released must have been charged.

    python tests/privacy/kill_ledger.py --count 500

A child, forked from this warm process, repeatedly charges a proposal, "releases" it and tells the
parent. A release is a line with its number, written unbuffered to a file. The parent waits for a
random number of releases, possibly 0. It then waits for a random part of the time that a charge, or
the opening, took before, so that the kill falls within it on any machine. After every kill, the
ledger is verified, opened and verified again: spent >= released.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from accountant_cases import Kind, Offer  # noqa: E402
from ledger_cases import DELTA, answer, exit_status, forked, state  # noqa: E402

from adapmixed.privacy import Accountant, read_ledger  # noqa: E402

MODELS = 3
EPSILON = 1.0  # budget of every shard, spent after about thirty queries of one ledger
MOST = 3  # largest number of releases to wait for
OPENING, CHARGE = 0.02, 0.005  # seconds, a guess before the first was measured
ROUNDS = 10  # kills of one ledger before a new one is begun


def offered(number: int, budget: bool) -> Offer:
    """Return the proposal of one query."""
    if not budget:
        return Offer(answer(number, MODELS), models=MODELS)
    charges = np.random.default_rng(number).exponential(2e-3, (MODELS, 1))
    return Offer(charges=charges, mechanism=Kind(measure=("zcdp", None)))


def settings(budget: bool) -> dict[str, Any]:
    """Return the arguments of the accountant."""
    return {"delta": DELTA, "epsilon": EPSILON if budget else None}


def serve(path: Path, released: Path, told: int, budget: bool) -> None:
    """Charge and release until killed. Write a byte to `told` when open and for each release."""
    file = os.open(released, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with Accountant(path=path, **settings(budget)) as accountant:
        os.write(told, b"o")
        while True:
            accountant.charge(offered(accountant.queries, budget))
            os.write(file, b"%d\n" % accountant.queries)
            os.write(told, b"r")


def last_released(released: Path) -> int:
    """Return the largest number that was written; 0 if there is none."""
    text = released.read_bytes() if released.exists() else b""
    return max((int(line) for line in text.split()), default=0)


def check(path: Path, released: Path, budget: bool) -> str:
    """Verify the ledger after a kill; return a description of it.

    Raises:
        AssertionError: something was released without a charge.
    """
    given = last_released(released)
    if not path.exists():
        assert given == 0, f"{given} released without a ledger"
        return "no ledger yet"
    reading = read_ledger(path)
    charged = reading.account.queries
    assert reading.charges - charged in (0, 1), "the binding and one record for each query"
    assert given <= charged <= given + 1, f"charged {charged}, released {given}"
    with Accountant(path=path, **settings(budget)) as accountant:
        assert accountant.charges == reading.charges
        plain = Accountant(**settings(budget))
        for number in range(charged):
            plain.charge(offered(number, budget))
        if charged:
            assert state(accountant) == state(plain), "other totals than were charged"
        assert state(accountant) == state(reading.account), "other totals than the records give"
    again = read_ledger(path)
    assert (again.charges, again.digest) == (reading.charges, reading.digest)
    if charged > given:
        # The next child continues from here. This charge paid for an answer that nobody saw.
        with open(released, "ab") as file:
            file.write(b"%d\n" % charged)
        return "charged, not released"
    return "all released" if charged == reading.charges - 1 else "nothing charged yet"


@dataclass
class Pace:
    """Seconds that the last opening, and the last charge with its release, took."""

    opening: float = OPENING
    charge: float = CHARGE

    def watch(self, told: int, releases: int) -> None:
        """Wait for so many releases of a child that has just started."""
        before = time.monotonic()
        for number in range(1 + releases if releases else 0):
            assert os.read(told, 1), "the child ended by itself"
            now = time.monotonic()
            if number == 0:
                self.opening = now - before
            else:
                self.charge = now - before
            before = now


def trials(count: int, folder: Path, seed: int) -> tuple[Counter[str], int]:
    """Kill `count` times; return how often each outcome was found, and the number of charges."""
    generator, found, charges, pace = random.Random(seed), Counter[str](), 0, Pace()
    for number in range(count):
        path = folder / f"ledger-{number // ROUNDS}.db"
        released, budget = path.with_suffix(".released"), number // ROUNDS % 2 == 1
        told, telling = os.pipe()
        here = (path, released, telling, budget)
        child = forked(lambda here=here: serve(*here))
        os.close(telling)
        releases = generator.randrange(MOST + 1)
        pace.watch(told, releases)
        time.sleep(generator.uniform(0.0, pace.charge if releases else pace.opening))
        os.kill(child, signal.SIGKILL)
        assert exit_status(child) == -signal.SIGKILL, "the child ended by itself"
        os.close(told)
        found[check(path, released, budget)] += 1
        if number % ROUNDS == ROUNDS - 1 or number == count - 1:
            charges += last_released(released)
    return found, charges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, charges = trials(arguments.count, Path(folder), arguments.seed)
    for outcome, times in sorted(found.items()):
        print(f"{outcome}: {times}")
    print(f"{arguments.count} kills, {charges} charges; nothing was released uncharged")


if __name__ == "__main__":
    main()
