"""The flushes to the device between a charge and the release of its answer."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger_cases import DELTA, answer, ends, file_of, make

from adapmixed.errors import LedgerWriteError
from adapmixed.privacy import Accountant
from adapmixed.privacy.ledger.head import HeadFile
from adapmixed.privacy.ledger.store import Store

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

    for call in ("pwrite", "fdatasync", "fsync"):
        watch(call, lambda file, *_: name(file))
    watch("rename", lambda _, new: Path(new).name)
    connect = functools.partial(sqlite3.connect, factory=Watched)
    monkeypatch.setattr(sqlite3, "connect", connect)
    return asked


CREATED = [
    "pwrite ledger.db-head-new", "fdatasync ledger.db-head-new", "rename ledger.db-head",
    "fsync folder", "COMMIT ledger.db-new", "wal_checkpoint ledger.db-new", "rename ledger.db",
    "fsync folder",
]  # fmt: skip
CHARGED = ["COMMIT ledger.db", "pwrite ledger.db-head", "fdatasync ledger.db-head"]


def test_record_and_head_are_flushed_before_the_release(path: Path, log: list[str]) -> None:
    for expected in (CREATED, []):  # made, opened again
        with Accountant(DELTA, path=path) as ledger:
            assert log == expected
            for number in range(2):
                log.clear()
                ledger.add(answer(number))
                assert [*log, "released"] == [*CHARGED, "released"]
        log.clear()


def test_the_settings_of_an_open_writer_wait_for_the_device(path: Path) -> None:
    for _ in range(2):
        with Accountant(DELTA, path=path) as ledger:
            found = {key: file_of(ledger)._store._value(f"PRAGMA {key}") for key in DURABLE}
            assert found == DURABLE


def test_a_creation_that_is_begun_again_flushes_the_removal(path: Path, log: list[str]) -> None:
    make(path, 0).close()
    path.unlink()
    log.clear()
    make(path, 0).close()
    assert log == ["fsync folder", *CREATED]


def charge_without_head(path: Path) -> None:
    """Charge twice; end the process when the third charge is in the database but not the head."""

    def work() -> None:
        ledger = make(path, 2)
        HeadFile.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        ledger.add(answer(2))

    assert ends(work) == -signal.SIGKILL


def in_the_file_alone(path: Path) -> int:
    """Return the number of records in the database's file, without its log."""
    alone = path.with_name("alone.db")
    shutil.copyfile(path, alone)
    connection = sqlite3.connect(f"file:{alone}?immutable=1", uri=True)
    (count,) = connection.execute("SELECT count(*) FROM record").fetchone()
    connection.close()
    return int(count)


def test_the_head_never_says_more_than_is_on_the_device(
    path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log must be flushed before the head names the last record.

    A killed writer may have left a record of the log in the system's cache only, and the next
    commit would flush it. If the head were written first and the power failed, the head would name
    a lost charge, and the ledger could never be opened again.
    """
    charge_without_head(path)
    assert in_the_file_alone(path) < 3
    write, found = HeadFile.write, []

    def watched(head: HeadFile, last: Any) -> None:
        found.append(in_the_file_alone(path))
        write(head, last)

    monkeypatch.setattr(HeadFile, "write", watched)
    log.clear()
    with Accountant(DELTA, path=path) as ledger:
        assert ledger.charges == 3 and found == [3]
    assert log[:3] == ["wal_checkpoint ledger.db", *CHARGED[1:]]


def test_a_record_that_cannot_be_made_durable_leaves_the_head(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapmixed.privacy.ledger.database.BUSY_SECONDS", 0.1)
    ledger = make(path, 2)
    reader = Store(str(path), read_only=True)  # at this moment, the log is needed to its end
    with monkeypatch.context() as patched:
        patched.setattr(HeadFile, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ledger.add(answer(2))
    ledger.close()
    head = Path(f"{path}-head").read_bytes()
    with pytest.raises(LedgerWriteError, match="could not be made durable: it is being read"):
        Accountant(DELTA, path=path)
    assert Path(f"{path}-head").read_bytes() == head
    reader.close()
    with Accountant(DELTA, path=path) as ledger:
        assert ledger.charges == 3
