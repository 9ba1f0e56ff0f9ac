"""Careless uses of accountants and proposals: each raises, or pays for one answer."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from proposal_cases import BOX, DELTA, proposed

from adapmixed import Accountant, AdaPMixED, ClippedLogPool, ClippedMixing, PublicOnly
from adapmixed.errors import BudgetSpentError
from adapmixed.privacy import PublicAnswer, read_ledger
from adapmixed.rng import SeededRandom


def test_a_proposal_shows_public_constants_alone() -> None:
    """Private attributes hold the bits of the screening and the costs."""
    proposal = proposed(AdaPMixED(18.0, 0.2))
    shown = {name: value for name, value in vars(proposal).items() if not name.startswith("_")}
    assert set(shown) == {"mechanism", "num_models", "ensemble"}
    public = {name for name in dir(proposal) if not name.startswith("_")}
    assert public == {*shown, "release"}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, dataclasses.replace])
@pytest.mark.parametrize("kind", ["accountant", "budget", "ledger", "charged", "proposal"])
def test_there_are_no_copies(kind: str, copied: Callable[[Any], Any], tmp_path: Path) -> None:
    made: Any = {
        "accountant": lambda: Accountant(DELTA),
        "budget": lambda: Accountant(DELTA, epsilon=1.0),
        "ledger": lambda: Accountant(DELTA, path=tmp_path / "ledger.db"),
        "charged": lambda: proposed(BOX),
        "proposal": lambda: proposed(BOX),
    }[kind]()
    if kind == "charged":
        Accountant(DELTA).charge(made)
    with pytest.raises(TypeError):
        copied(made)


def fork_of_c() -> int:
    """Fork as C code does, which Python does not see."""
    return int(ctypes.PyDLL(None).fork())


def in_a_child(
    ask: Callable[[], object], words: str, fork: Callable[[], int] | None = None
) -> None:
    child = (fork or os.fork)()
    if child == 0:
        try:
            ask()
        except ValueError as error:
            os._exit(7 if words in str(error) else 1)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("recycled", [False, True], ids=["another id", "its parent's id"])
def test_a_child_of_a_fork_spends_nothing(
    recycled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This also holds for a child with its parent's process id, as in a new namespace."""
    parent = os.getpid()
    if recycled:
        monkeypatch.setattr(os, "getpid", lambda: parent)
    charged, waiting = proposed(BOX), proposed(BOX)
    with (
        Accountant(DELTA, path=tmp_path / "ledger.db") as durable,
        Accountant(DELTA, epsilon=1.0) as shared,
    ):
        durable.charge(charged)
        for one in (shared, durable):
            for ask in (
                lambda one=one: one.charge(waiting),
                lambda one=one: one.add(PublicAnswer(1)),
                lambda one=one: one.bind(PublicOnly(), 3),
            ):
                in_a_child(ask, "in the process that made it")
        in_a_child(charged.release, "in the process that made it")
        in_a_child(lambda: Accountant(DELTA).charge(waiting), "in the process that made it")
        durable.charge(waiting)
        assert charged.release().tokens is not None and waiting.release().tokens is not None
        assert (durable.queries, shared.queries) == (2, 0)


def test_a_child_of_a_fork_that_python_does_not_see_spends_nothing(tmp_path: Path) -> None:
    charged, waiting = proposed(BOX), proposed(BOX)
    with Accountant(DELTA, path=tmp_path / "ledger.db") as accountant:
        accountant.charge(charged)
        for ask in (
            charged.release,
            lambda: charged._distribution,
            lambda: Accountant(DELTA).charge(waiting),
            lambda: accountant.charge(waiting),
        ):
            in_a_child(ask, "in the process that made it", fork_of_c)
        accountant.charge(waiting)
        assert charged.release().tokens is not None and waiting.release().tokens is not None


def test_closing_ends_charging(tmp_path: Path) -> None:
    accountant = Accountant(DELTA, path=tmp_path / "ledger.db")
    accountant.charge(proposed(BOX))
    accountant.close()
    accountant.close()
    late = proposed(BOX)
    with pytest.raises(ValueError, match="must be opened again: it was closed"):
        accountant.charge(late)
    with pytest.raises(ValueError, match="it is not charged"):
        late.release()
    assert accountant.queries == accountant.guarantee().queries == 1


def test_a_seeded_source_never_charges_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Accountant(DELTA, path=path) as accountant:
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        seeded = proposed(BOX, rng=SeededRandom(1))
        with pytest.raises(ValueError, match=r"rng must be SecureRandom\(\) if charges go to a"):
            accountant.charge(seeded)
        with pytest.raises(ValueError, match="it is not charged"):
            seeded.release()
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
        assert accountant.charges == 0 and accountant.state()["account"]["binding"] is None
        accountant.charge(proposed(BOX))
    in_memory = Accountant(DELTA)
    in_memory.charge(proposed(BOX, rng=SeededRandom(1)))
    assert "seeded" in in_memory.guarantee().caveats
    assert "no privacy guarantee" in str(in_memory.guarantee())


def test_what_raises_writes_nothing(tmp_path: Path) -> None:
    """Neither the failed charge is written nor the binding that would come before it."""
    path = tmp_path / "ledger.db"
    with Accountant(DELTA, path=path) as accountant:
        for wrong in (
            proposed(BOX, positions=11),
            proposed(ClippedLogPool(-1.0, 1.0, queries=2), 3, 3),
        ):
            with pytest.raises(BudgetSpentError):
                accountant.charge(wrong)
        with pytest.raises(ValueError, match="queries must be given to ClippedMixing"):
            accountant.charge(proposed(ClippedMixing(0.5, 4.0)))
        assert accountant.charges == 0
    assert read_ledger(path).charges == 0
