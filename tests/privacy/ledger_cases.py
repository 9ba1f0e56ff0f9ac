"""Ledgers to try things on: sample events, files that a crash leaves, work in a forked child."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Event,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    Ledger,
    PublicAnswer,
    ReleasedCount,
    RenyiBound,
    UnprotectedAnswer,
)

DELTA = 1e-5
SETTINGS: dict[str, Any] = dict(delta=DELTA, configuration="a mechanism")
SUFFIXES = ("", "-head", "-wal", "-shm")


def losses(seed: int, models: int = 5, positions: int = 1, orders: Any = (18.0,)) -> Event:
    generator = np.random.default_rng(seed)
    values = generator.exponential(1e-4, (models, positions, len(orders)))
    values[generator.random(values.shape) < 0.2] = 0.0
    return LeaveOneOutLoss(orders, values, "add_remove", 1e-5)


def answer(seed: int, models: int = 5) -> list[Event]:
    """What one query of AdaPMixED emits."""
    return [GaussianScreening(models, 1, 1e-4, 1e-2), losses(seed, models), PublicAnswer(0)]


def every_event() -> list[Event]:
    """Every class, with values at the edges of float64."""
    tiny, huge = 5e-324, float(np.finfo(np.float64).max)
    odd = np.array([0.0, -0.0, tiny, 1 / 3, huge, np.inf, 1e-12, 0.1]).reshape(2, 2, 2)
    return [
        GaussianScreening(7, 3, 0.1, 1 / 3),
        GaussianScreening(1, 0, 0.0, tiny),
        LeaveOneOutLoss((1.0 + 2**-52, 18.0), odd, "zero_out", 1e-5),
        LeaveOneOutLoss((2.5,), np.zeros((3, 0, 1)), "add_remove", 0.0),
        LeaveOneOutLoss((3.0,), np.asfortranarray(odd[..., :1]), "add_remove", 0.0),
        RenyiBound(3.0, 0.1 + 0.2, 5, 4, "zero_out", True, 10),
        RenyiBound(1e308, float("inf"), 1, 0, "add_remove"),
        ClippedAnswer(1 / 3, 1e100, 7, 3, 2**40),
        ClippedAnswer(0.0, 1.0, 1, 0),
        BoundedRangeAnswer(2.0, -0.25, 1 / 3, 5, 4, 10),
        BoundedRangeAnswer(0.0, 0.0, tiny, 1, 0),
        IndividualCharge("renyi", 1.0 + 2**-52, odd[0]),
        IndividualCharge("zcdp", None, np.zeros((3, 0))),
        ReleasedCount(5, float("inf"), 1 / 3, -(2**60)),
        PublicAnswer(2**70),
        UnprotectedAnswer(0),
        Caveat("shards"),
    ]


def make(path: Path, charges: int, models: int = 5) -> Ledger:
    """A new open ledger with some charges."""
    ledger = Ledger.open(path, **SETTINGS)
    for number in range(charges):
        ledger.charge(answer(number, models))
    return ledger


def state(accountant: Accountant) -> tuple[Any, ...]:
    """Everything that an accountant knows, in bits."""
    fields = dict(accountant._state.__dict__)
    total = fields.pop("total")
    parts = {} if total is None else vars(total)
    arrays = {name: value.tobytes() for name, value in parts.items() if hasattr(value, "tobytes")}
    rest = {name: value for name, value in parts.items() if name not in arrays}
    known = (accountant.delta, accountant.rule, accountant.order_weights, accountant.adjacency)
    return (*known, type(total), arrays, rest, repr(sorted(fields.items())),
            accountant.filter_budget, repr(accountant.epsilon()))  # fmt: skip


def copy(path: Path, to: Path) -> Path:
    """Copies the files of a ledger as they are, the open ones of a writer included."""
    for suffix in SUFFIXES:
        source, target = Path(f"{path}{suffix}"), Path(f"{to}{suffix}")
        target.unlink(missing_ok=True)
        if source.exists() and suffix != "-shm":
            shutil.copyfile(source, target)
    return to


def forked(work: Callable[[], object]) -> int:
    """Starts work in a forked child; its process id. The child's status is 0, or 1 on an error."""
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
    """Waits for a child: its status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
