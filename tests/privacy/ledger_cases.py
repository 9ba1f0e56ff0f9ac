"""Ledgers for tests: sample events, files that a crash leaves, work in a forked child."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapmixed.errors import LedgerError
from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Event,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
    read_ledger,
)
from adapmixed.privacy.account import Account
from adapmixed.privacy.encoding import canonical
from adapmixed.privacy.ledger import Ledger

DELTA = 1e-5
SUFFIXES = ("", "-wal", "-shm")


def losses(seed: int, models: int = 5) -> Event:
    generator = np.random.default_rng(seed)
    values = generator.exponential(1e-4, (models, 1, 1))
    values[generator.random(values.shape) < 0.2] = 0.0
    return LeaveOneOutLoss((18.0,), values, "zero_out")


def answer(seed: int, models: int = 5) -> list[Event]:
    """Return the events of one query of AdaPMixED."""
    return [GaussianScreening(models, 1, 1e-4, 1e-2), losses(seed, models), PublicAnswer(0)]


def every_event() -> list[Event]:
    """Return an event of every class, with values at the edges of float64."""
    tiny, huge = 5e-324, float(np.finfo(np.float64).max)
    odd = np.array([0.0, -0.0, tiny, 1 / 3, huge, np.inf, 1e-12, 0.1]).reshape(2, 2, 2)
    return [
        GaussianScreening(7, 3, 0.1, 1 / 3),
        GaussianScreening(1, 0, 0.0, 1e-6),
        LeaveOneOutLoss((1.0 + 2**-52, 18.0), odd, "zero_out"),
        LeaveOneOutLoss((2.5,), np.zeros((3, 0, 1)), "add_remove"),
        LeaveOneOutLoss((3.0,), np.asfortranarray(odd[..., :1]), "add_remove"),
        RenyiBound(3.0, 0.1 + 0.2, 5, 4, True, 10),
        RenyiBound(1e308, float("inf"), 1, 0),
        ClippedAnswer(1 / 3, 1e5, 7, 3, 2**40),
        ClippedAnswer(0.0, 1.0, 1, 0, 1),
        BoundedRangeAnswer(2.0, -0.25, 1 / 3, 5, 4, 10),
        BoundedRangeAnswer(0.0, 0.0, tiny, 1, 0),
        IndividualCharge("renyi", 1.0 + 2**-52, odd[0]),
        IndividualCharge("zcdp", None, np.zeros((3, 0))),
        PublicAnswer(2**70),
        UnprotectedAnswer(0),
        Caveat("shards"),
    ]


def make(path: Path, charges: int, models: int = 5) -> Accountant:
    """Return a new open ledger with some charges."""
    accountant = Accountant(DELTA, path=path)
    for number in range(charges):
        accountant.add(answer(number, models))
    return accountant


def plain(charges: int, models: int = 5) -> Accountant:
    """Return an accountant with the same charges and no ledger."""
    accountant = Accountant(DELTA)
    for number in range(charges):
        accountant.add(answer(number, models))
    return accountant


def state(one: Accountant | Account) -> str:
    """Return everything that was charged, to the bit."""
    return canonical((one._account if isinstance(one, Accountant) else one).written())


def file_of(accountant: Accountant) -> Ledger:
    """Return the open ledger file of an accountant."""
    assert accountant._ledger is not None
    return accountant._ledger


def copy(path: Path, to: Path, *, shm: bool = False) -> Path:
    """Copy the files of a ledger, also those that a writer has open."""
    for suffix in SUFFIXES:
        source, target = Path(f"{path}{suffix}"), Path(f"{to}{suffix}")
        target.unlink(missing_ok=True)
        if source.exists() and (shm or suffix != "-shm"):
            shutil.copyfile(source, target)
    return to


def forked(work: Callable[[], object]) -> int:
    """Start work in a forked child; return its process id. Its status is 0, or 1 on an error."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def exit_status(child: int) -> int:
    """Wait for a child; return its status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ends(work: Callable[[], Any]) -> int:
    """Do work in a forked child and return its status."""
    return exit_status(forked(work))


def outcome(path: Path) -> object:
    """Read a ledger's files; return the totals in bits, or the class of the error."""
    try:
        reading = read_ledger(path)
    except LedgerError as error:
        return type(error)
    return reading.charges, state(reading.account)


def opened(path: Path) -> object:
    """Open a ledger for charging; return the totals in bits, or the class of the error."""
    try:
        with Accountant(DELTA, path=path, create=False) as accountant:
            return accountant.charges, state(accountant)
    except LedgerError as error:
        return type(error)


def flips(
    original: Path,
    suffix: str,
    scratch: Path,
    step: int,
    look: Callable[[Path], object],
    allowed: Sequence[object],
) -> tuple[int, int]:
    """Flip one bit at every `step`-th byte of a file; count the errors and the survivals."""
    generator, victim = random.Random(step), Path(f"{scratch}{suffix}")
    content = Path(f"{original}{suffix}").read_bytes()
    refused = survived = 0
    for at in range(generator.randrange(step), len(content), step):
        copy(original, scratch, shm=True)
        changed = bytearray(content)
        changed[at] ^= 1 << generator.randrange(8)
        victim.write_bytes(changed)
        found = look(scratch)
        assert found in allowed or isinstance(found, type), f"byte {at} of {victim}: {found}"
        refused += isinstance(found, type)
        survived += not isinstance(found, type)
    return refused, survived


def charge_more(path: Path, charges: int) -> Path:
    """Charge more; return a copy of the files as they were before."""
    before = copy(path, path.with_name("before.db"))
    with Accountant(DELTA, path=path) as accountant:
        for number in range(charges):
            accountant.add(answer(100 + number, models=3))
    return before


def move(source: Path, target: Path, *suffixes: str) -> None:
    """Replace these files of a ledger by those of another."""
    for suffix in suffixes:
        Path(f"{target}{suffix}").unlink(missing_ok=True)
        if Path(f"{source}{suffix}").exists():
            shutil.copyfile(f"{source}{suffix}", f"{target}{suffix}")


def going_on(path: Path) -> object:
    """Charge once more and read; return the totals in bits, or the class of the error."""
    try:
        with Accountant(DELTA, path=path, create=False) as accountant:
            accountant.add(answer(50, models=3))
            found = accountant.charges, state(accountant)
    except LedgerError as error:
        return type(error)
    again = outcome(path)
    assert again == found or isinstance(again, type), again
    return found
