"""Kills a charging process at random moments: what was released must have been charged.

    python tests/privacy/kill_ledger.py --count 500

A child, forked from this warm process, charges one query and then "releases" it, a line with its
number written unbuffered to a file, again and again, and tells the parent each time. The parent
waits for a random number of releases, none among them, and then for a random part of what the next
charge (or the opening) has taken so far, so that kills fall within it however slow the machine is.
After every kill the ledger is verified, opened and verified again: spent >= released.
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

sys.path.insert(0, str(Path(__file__).parent))

from ledger_cases import SETTINGS, answer, exit_status, forked, state  # noqa: E402

from adapmixed.privacy import Accountant, Ledger  # noqa: E402

MODELS = 3
MOST = 3  # releases that are waited for
OPENING, CHARGE = 0.02, 0.005  # seconds, guessed before any was seen
ROUNDS = 10  # kills of one ledger, before a new one is begun


def serve(path: Path, released: Path, told: int) -> None:
    """Charges and releases until it is killed; a byte to `told` when open and for each release."""
    file = os.open(released, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with Ledger.open(path, **SETTINGS) as ledger:
        os.write(told, b"o")
        while True:
            ledger.charge(answer(ledger.charges, MODELS))
            os.write(file, b"%d\n" % ledger.charges)
            os.write(told, b"r")


def last_released(released: Path) -> int:
    """The largest number that was written; 0 if none was."""
    text = released.read_bytes() if released.exists() else b""
    return max((int(line) for line in text.split()), default=0)


def check(path: Path, released: Path) -> str:
    """Verifies what a kill left, in words; AssertionError if anything was released uncharged."""
    given = last_released(released)
    if not path.exists():
        assert given == 0, f"{given} released without a ledger"
        return "no ledger yet"
    reading = Ledger.verify(path)
    assert reading.charges >= given, f"charged {reading.charges}, released {given}"
    assert reading.charges <= given + 1, f"charged {reading.charges}, released only {given}"
    with Ledger.open(path, **SETTINGS) as ledger:
        assert ledger.charges == ledger.totals.queries == reading.charges
        plain = Accountant(SETTINGS["delta"])
        for number in range(ledger.charges):
            plain.add(answer(number, MODELS))
        assert state(ledger.accountant) == state(plain), "other totals than were charged"
    again = Ledger.verify(path)
    assert (again.charges, again.hash, again.behind) == (reading.charges, reading.hash, 0)
    if reading.charges > given:
        # The next child goes on from here: this charge paid for an answer nobody saw.
        with open(released, "ab") as file:
            file.write(b"%d\n" % reading.charges)
        return "charged, not released" + (", head one behind" if reading.behind else "")
    return "all released"


@dataclass
class Pace:
    """How long the last opening and the last charge with its release took, in seconds."""

    opening: float = OPENING
    charge: float = CHARGE

    def watch(self, told: int, releases: int) -> None:
        """Returns after so many releases of a child that has just been started."""
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
    """Kills `count` times; how often each outcome was found, and how many charges there were."""
    generator, found, charges, pace = random.Random(seed), Counter[str](), 0, Pace()
    for number in range(count):
        path = folder / f"ledger-{number // ROUNDS}.db"
        released = path.with_suffix(".released")
        told, telling = os.pipe()
        child = forked(lambda path=path, released=released, to=telling: serve(path, released, to))
        os.close(telling)
        releases = generator.randrange(MOST + 1)
        pace.watch(told, releases)
        time.sleep(generator.uniform(0.0, pace.charge if releases else pace.opening))
        os.kill(child, signal.SIGKILL)
        assert exit_status(child) == -signal.SIGKILL, "the child ended by itself"
        os.close(told)
        found[check(path, released)] += 1
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
