"""Writes that fail: nothing is released, and the ledger must be opened again."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledger_cases import SETTINGS, answer, exit_status, forked, make

from adapmixed.privacy import Ledger, LedgerError, PublicAnswer
from adapmixed.privacy.ledger import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerCorruptError,
    LedgerWriteError,
)
from adapmixed.privacy.ledger import head as heads


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def refuses_until_reopened(ledger: Ledger, path: Path, *, spent: tuple[int, ...]) -> None:
    """After a failed second charge: no more charges, and what is found is one of `spent`."""
    assert (ledger.charges, ledger.accountant.queries) == (1, 1)
    with pytest.raises(LedgerClosedError, match="must be opened again: a charge failed"):
        ledger.charge(answer(2))
    ledger.close()
    with Ledger.open(path, **SETTINGS) as again:
        assert again.charges in spent
        again.charge(answer(2))
    assert Ledger.verify(path).charges in {charges + 1 for charges in spent}


def test_a_full_database_is_refused_and_releases_nothing(path: Path) -> None:
    ledger = make(path, 1)
    pages = ledger._store._value("PRAGMA page_count")
    ledger._store._value(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerWriteError, match="could not be read or written: .* full"):
        ledger.charge(answer(1, models=5) + [PublicAnswer(1)] * 300)
    refuses_until_reopened(ledger, path, spent=(1,))


@pytest.mark.parametrize("name", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_head_that_cannot_be_written_releases_nothing(
    path: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = make(path, 1)

    def fail(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(heads.os, name, fail)
        with pytest.raises(LedgerWriteError, match="ledger.db-head could not be written"):
            ledger.charge(answer(1))
    refuses_until_reopened(ledger, path, spent=(2,))


def test_a_short_write_of_the_head_releases_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, write = make(path, 1), os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr(heads.os, "pwrite", lambda file, data, at: write(file, data[:100], at))
        with pytest.raises(LedgerWriteError, match="100 of 4096 bytes of the head"):
            ledger.charge(answer(1))
    refuses_until_reopened(ledger, path, spent=(2,))


def test_an_interruption_in_the_middle_releases_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = make(path, 1)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ledger._head, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.charge(answer(1))
    refuses_until_reopened(ledger, path, spent=(2,))


def test_a_file_that_may_not_grow_releases_nothing(path: Path) -> None:
    """The kernel's own refusal: RLIMIT_FSIZE, met by the write-ahead log."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with make(path, 0) as ledger:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
            charged = 0
            try:
                for number in range(100):
                    ledger.charge(answer(number))
                    charged += 1
            except LedgerWriteError as error:
                assert "could not be read or written" in str(error)
            assert 1 < charged < 100, charged
            try:
                ledger.charge(answer(0))
            except LedgerClosedError:
                pass
            else:
                raise AssertionError("a charge after a failed one")
            path.with_name("charged").write_text(str(charged))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    assert exit_status(forked(work)) == 0
    charged = int(path.with_name("charged").read_text())
    with Ledger.open(path, **SETTINGS) as ledger:
        assert charged <= ledger.charges <= charged + 1


def as_nobody(folder: Path, work: Callable[[], None]) -> None:
    """Runs work without the superuser's rights in a folder that everyone may enter."""

    def child() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        work()

    assert exit_status(forked(child)) == 0


@pytest.mark.parametrize("closed", ["", "-head", "folder"])
def test_files_that_are_read_only_are_refused(closed: str) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o777)
        path = folder / "ledger.db"
        if closed != "folder":
            make(path, 2).close()
            for suffix in ("", "-head"):
                os.chmod(f"{path}{suffix}", 0o444 if suffix == closed else 0o666)
        else:
            folder.chmod(0o555)

        def work() -> None:
            try:
                Ledger.open(path, **SETTINGS)
            except LedgerWriteError as error:
                assert "ledger.db" in str(error), error
            else:
                raise AssertionError("opened")

        as_nobody(folder, work)
        folder.chmod(0o777)
        if closed != "folder":
            assert Ledger.verify(path).charges == 2
    finally:
        shutil.rmtree(folder)


def test_another_program_that_writes_is_refused(path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("adapmixed.privacy.ledger.store.BUSY_SECONDS", 0.1)
    ledger = make(path, 1)
    other = sqlite3.connect(path, isolation_level=None)
    with pytest.raises(sqlite3.DatabaseError, match="only ever added to"):
        other.execute("DELETE FROM record")
    with pytest.raises(sqlite3.DatabaseError, match="only ever added to"):
        other.execute("UPDATE record SET sequence = 2")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerBusyError, match="is locked by another program"):
        ledger.charge(answer(1))
    other.execute("ROLLBACK")
    other.close()
    refuses_until_reopened(ledger, path, spent=(1,))


def test_a_foreign_record_is_seen_at_once(path: Path) -> None:
    ledger = make(path, 1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("INSERT INTO record SELECT 2, format_version, configuration, events, charges, "
                  "totals, hash FROM record")  # fmt: skip
    other.close()
    with pytest.raises(LedgerError):
        ledger.charge(answer(1))
    ledger.close()
    with pytest.raises(LedgerCorruptError, match="record 2 was altered"):
        Ledger.open(path, **SETTINGS)
