"""Work in forked children, and conditions to wait for."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing import forkserver
from typing import Any

import torch

CHANGES = ("open", "fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir")
"""Calls of `os` through which files are changed."""


def forked(work: Callable[[], object]) -> int:
    """Fork a child that does the work and exits with 0, or 1 on failure; return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)  # no process may outlive the test
        torch.set_num_threads(1)
        forkserver._forkserver.__init__()  # forget the parent's server
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def status_of(child: int) -> int:
    """Wait for a child; return its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ended(work: Callable[[], object]) -> int:
    """Do the work in a forked child; return its exit status, or minus the signal that ended it."""
    return status_of(forked(work))


def killed_before(
    work: Callable[[], object], number: int, calls: Sequence[str] = CHANGES[1:]
) -> int:
    """Work in a child that is killed before its number-th of these calls; return its status."""
    countdown = count(number, -1)

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if next(countdown) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return wrapped

    def watched() -> None:
        for name in calls:
            setattr(os, name, dying(getattr(os, name)))
        work()

    return ended(watched)


def until(condition: Callable[[], object], *, seconds: float = 20.0) -> None:
    """Wait for a condition, and fail the test if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
