"""The flushes to the device between a charge and the release of its answer."""

from __future__ import annotations

import functools
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger_cases import DELTA, answer

from adapmixed.privacy import Accountant

DURABLE = {"journal_mode": "wal", "synchronous": 2, "fullfsync": 1, "checkpoint_fullfsync": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def log(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record system calls from here on, in order, as the call and the file's name."""
    asked: list[str] = []

    def name(file: int) -> str:
        one = os.fstat(file)
        for place in (path.parent, *path.parent.iterdir()):
            if os.path.samestat(one, place.stat()):
                return "folder" if place == path.parent else place.name
        return "another"

    class Watched(sqlite3.Connection):
        """A connection that records commits and checkpoints, and that they wait for the device."""

        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            execute = super().execute
            word = statement.split("(")[0].removeprefix("PRAGMA ")
            if word in ("COMMIT", "wal_checkpoint"):
                asked.append(f"{word} {Path(execute('PRAGMA database_list').fetchone()[2]).name}")
                found = {key: execute(f"PRAGMA {key}").fetchone()[0] for key in DURABLE}
                assert found == DURABLE, f"{asked[-1]}: {found}"
            return execute(statement, *values)

    def watch(call: str, named: Callable[..., str]) -> None:
        function = getattr(os, call)

        @functools.wraps(function)
        def watched(*values: Any) -> Any:
            asked.append(f"{call} {named(*values)}")
            return function(*values)

        monkeypatch.setattr(os, call, watched)

    watch("fsync", name)
    watch("rename", lambda _, new: Path(new).name)
    connect = functools.partial(sqlite3.connect, factory=Watched)
    monkeypatch.setattr(sqlite3, "connect", connect)
    return asked


CREATED = [
    "COMMIT ledger.db-new", "wal_checkpoint ledger.db-new", "rename ledger.db", "fsync folder",
]  # fmt: skip


def test_a_record_is_flushed_before_the_release(path: Path, log: list[str]) -> None:
    for expected in (CREATED, []):  # made, opened again
        with Accountant(DELTA, path=path) as ledger:
            assert log == expected
            for number in range(2):
                log.clear()
                ledger.add(answer(number))
                assert [*log, "released"] == ["COMMIT ledger.db", "released"]
        log.clear()
