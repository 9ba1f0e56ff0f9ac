"""Kills a charging process at random moments: what was released must have been charged.

    python tests/privacy/kill_ledger.py --count 500

A child charges one query and then "releases" it, a line with its number written unbuffered to a
file, again and again; sometimes it is killed while it still opens or creates the ledger. After
every kill the ledger is verified, opened and verified again: spent >= released.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ledger_cases import SETTINGS, answer, exit_status, forked, state  # noqa: E402

from adapmixed.privacy import Accountant, Ledger  # noqa: E402

MODELS = 3
LONGEST = 0.1  # seconds until the kill
ROUNDS = 25  # kills of one ledger, before a new one is begun


def serve(path: Path, released: Path) -> None:
    """Charges and releases until it is killed."""
    file = os.open(released, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with Ledger.open(path, **SETTINGS) as ledger:
        while True:
            ledger.charge(answer(ledger.charges, MODELS))
            os.write(file, b"%d\n" % ledger.charges)


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


def trials(
    count: int, folder: Path, seed: int, longest: float = LONGEST
) -> tuple[Counter[str], int]:
    """Kills `count` times; how often each outcome was found, and how many charges there were."""
    generator, found, charges = random.Random(seed), Counter[str](), 0
    for number in range(count):
        path = folder / f"ledger-{number // ROUNDS}.db"
        released = path.with_suffix(".released")
        child = forked(lambda path=path, released=released: serve(path, released))
        time.sleep(generator.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        assert exit_status(child) == -signal.SIGKILL, "the child ended by itself"
        found[check(path, released)] += 1
        if number % ROUNDS == ROUNDS - 1 or number == count - 1:
            charges += last_released(released)
    return found, charges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds until a kill")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found, charges = trials(arguments.count, Path(folder), arguments.seed, arguments.longest)
    for outcome, times in sorted(found.items()):
        print(f"{outcome}: {times}")
    print(f"{arguments.count} kills, {charges} charges; nothing was released uncharged")


if __name__ == "__main__":
    main()
