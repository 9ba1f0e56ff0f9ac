"""Files that were altered, cut, edited or rolled back give an error, or the same totals.

`test_ledger_exchange.py` covers every byte of every file, and removed or exchanged files.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_cases import DELTA, answer, charge_more, copy, make, move, plain, remove, state

from adapmixed.errors import LedgerCorruptError, LedgerError
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy.ledger.head import SLOT

CHARGES = 4
READERS = (read_ledger, lambda path: Accountant(DELTA, path=path))


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a ledger that was closed: the database and its head."""
    path = tmp_path_factory.mktemp("closed") / "ledger.db"
    make(path, CHARGES, models=3).close()
    return path


def spoil(path: Path, at: int) -> Path:
    """Flip a bit of the head."""
    head = Path(f"{path}-head")
    content = bytearray(head.read_bytes())
    content[at] ^= 1
    head.write_bytes(content)
    return path


def test_a_flipped_bit_of_the_newest_slot_is_reported(
    closed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert CHARGES % 2 == 0  # the first slot is the newer one
    assert read_ledger(closed).warning is None
    for at in (*range(0, 200, 9), SLOT - 1):
        path = spoil(copy(closed, tmp_path / "ledger.db"), at)
        reading = read_ledger(path)
        assert (reading.charges, reading.behind, reading.torn) == (CHARGES, 1, True)
        assert "slot of charge 4 is not whole: either a process or" in str(reading.warning)
        assert "or it was damaged later" in str(reading.warning)
        if at % 5:
            continue
        caplog.clear()
        with Accountant(DELTA, path=path) as ledger:
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert caplog.records[0].getMessage() == f"ledger {path}: {reading.warning}"
            ledger.add(answer(9, models=3))
        assert (read_ledger(path).behind, read_ledger(path).warning) == (0, None)


def test_a_flipped_bit_of_the_older_slot_is_refused(closed: Path, tmp_path: Path) -> None:
    """The slot could be the newer one of a ledger that has lost its last charge."""
    for at in (*range(SLOT, SLOT + 200, 9), 2 * SLOT - 1):
        path = spoil(copy(closed, tmp_path / "ledger.db"), at)
        for reader in READERS:
            with pytest.raises(
                LedgerCorruptError, match="must hold 5 charges, found 4: .* a slot of"
            ):
                reader(path)


def test_the_first_slot_is_not_written_before_the_second(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    make(path, 0).close()
    with pytest.raises(LedgerCorruptError, match="with the slots spoilt, 0"):
        read_ledger(spoil(path, 30))


@pytest.mark.parametrize("charges", [0, 1, 2, 3])
def test_a_spoilt_slot_hides_no_lost_charge(tmp_path: Path, charges: int) -> None:
    path = tmp_path / "ledger.db"
    make(path, charges, models=3).close()
    before = charge_more(path, 1)
    move(before, path, "")
    spoil(path, SLOT * ((charges + 1) % 2) + 30)
    for reader in READERS:
        with pytest.raises(LedgerCorruptError, match=f"must hold {charges + 1} charges, found"):
            reader(path)


def _older_database(path: Path) -> None:
    move(charge_more(path, 1), path, "")


def _older_head(path: Path) -> None:
    move(charge_more(path, 2), path, "-head")


def _head(content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        head = Path(f"{path}-head")
        head.write_bytes(content(head.read_bytes()))

    return change


def _stale_slot(path: Path) -> None:
    """Restore the newest slot as it was at creation, and a database that is one charge older."""
    head = Path(f"{path}-head")
    move(charge_more(path, 1), path, "")
    content = head.read_bytes()
    fresh = path.with_name("fresh.db")
    make(fresh, 0).close()
    head.write_bytes(content[:SLOT] + Path(f"{fresh}-head").read_bytes()[SLOT:])


def _database_of_another(path: Path) -> None:
    other = path.with_name("other.db")
    make(other, CHARGES, models=3).close()
    move(other, path, "")


def _no_ledger(path: Path) -> None:
    os.unlink(path)
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE record (sequence)")


def _edit(*statements: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        other = sqlite3.connect(path, isolation_level=None)
        triggers = other.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        listed = triggers.fetchall()
        for name, _ in listed:
            other.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            other.execute(statement)
        for _, sql in listed:
            other.execute(sql)
        other.close()

    return edit


def _no_trigger(path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("DROP TRIGGER no_delete_of_record")
    other.close()


TAMPERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "older database": (_older_database, "must hold 5 charges, .* found 4: charges were lost"),
    "older head": (_older_head, "holds 6 charges and its head 4: .* the head is an older copy"),
    "no head": (lambda p: remove(p, "-head"), "ledger.db-head must lie next to its database"),
    "no database": (lambda p: remove(p, ""), "must hold 4 charges|no such file"),
    "empty head": (_head(lambda was: b""), "must hold a whole head, got 0 bytes"),
    "unreadable head": (_head(lambda was: bytes(2 * SLOT)), "a whole head, got 8192 bytes with"),
    "cut head": (_head(lambda was: was[:SLOT]), "must hold a whole head, got 4096 bytes"),
    "long head": (_head(lambda was: was + b"\0"), "must hold a whole head, got 8193 bytes"),
    "stale slot": (_stale_slot, "whole head, got 8192 bytes with the slots 4, 0"),
    "exchanged slots": (_head(lambda was: was[SLOT:] + was[:SLOT]), "with the slots 3, 4"),
    "another's database": (_database_of_another, "do not belong together"),
    "no ledger": (_no_ledger, "is not the database of a ledger"),
    "text": (lambda p: p.write_text("spent: nothing\n" * 500), "is not an intact ledger"),
    "empty": (lambda p: p.write_bytes(b""), "is not the database of a ledger"),
    "last record deleted": (
        _edit("DELETE FROM record WHERE sequence = 4"),
        "holds 3 records, but its checkpoint is of 4|the checkpoint is not what",
    ),
    "last record altered": (
        _edit("UPDATE record SET text = replace(text, '1', '0') WHERE sequence = 4"),
        "record 4 was altered",
    ),
    "renumbered": (
        _edit("UPDATE record SET sequence = sequence - 1"),
        "record 1 is missing|holds 3 records, but its checkpoint is of 4",
    ),
    "other type": (
        _edit("UPDATE record SET text = CAST(text AS BLOB)"), "does not have the columns of a rec"
    ),
    "description altered": (
        _edit(f"UPDATE description SET text = replace(text, '{DELTA}', '0.1')"),
        "record 1 was altered|the checkpoint does not fit the last record and the descr",
    ),
    "another identity": (
        _edit("UPDATE description SET text = replace(text, '\"identity\":\"', '\"identity\":\"0')"),
        "record 1 was altered|the checkpoint does not fit the last record and the descr",
    ),
    "description gone": (_edit("DELETE FROM description"), "must have one row for: SELECT text"),
    "newer": (_edit("PRAGMA user_version = 6"), "must have format_version 5, got 6: another vers"),
    "older": (_edit("PRAGMA user_version = 4"), "must have format_version 5, got 4"),
    "unknown": (_edit("PRAGMA user_version = 0"), "must have format_version 5, got 0"),
    "trigger gone": (_no_trigger, "does not have the tables of a ledger"),
    "table added": (_edit("CREATE TABLE gift (x)"), "does not have the tables of a ledger"),
    "checkpoint gone": (_edit("DELETE FROM checkpoint"), "must have one row for: SELECT sequence"),
    "checkpoint altered": (
        _edit("UPDATE checkpoint SET text = replace(text, '4', '3')"),
        "the checkpoint does not fit the last record|the checkpoint is not what the records give",
    ),
    "checkpoint of another number": (
        _edit("UPDATE checkpoint SET sequence = 3"),
        "holds 4 records, but its checkpoint is of 3|the checkpoint is not what the records give",
    ),
    "checkpoint and its digest altered": (
        _edit("UPDATE checkpoint SET digest = zeroblob(32)"),
        "the checkpoint does not fit the last record|the checkpoint is not what the records give",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TAMPERED))
def test_tampered_files_are_refused(closed: Path, tmp_path: Path, name: str) -> None:
    path = copy(closed, tmp_path / "ledger.db")
    change, words = TAMPERED[name]
    change(path)
    files = [file for file in (path, Path(f"{path}-head")) if file.exists()]
    before = [file.read_bytes() for file in files]
    with pytest.raises(LedgerError, match=words):
        read_ledger(path)
    for _ in range(2):  # again, since opening repaired nothing
        with pytest.raises(LedgerError, match=words):
            Accountant(DELTA, path=path)
    if name != "no ledger":
        assert before == [file.read_bytes() for file in files]


EARLIER: dict[str, tuple[Callable[[Path], None], str]] = {
    "first record deleted": (_edit("DELETE FROM record WHERE sequence = 1"), "record 1 is missing"),
    "events altered": (
        _edit("""UPDATE record SET text = '{"events":[]}' WHERE sequence = 2"""),
        "record 2 was altered",
    ),
    "hash altered": (_edit("UPDATE record SET hash = zeroblob(32) WHERE sequence = 1"), "record 1"),
}


def _lost_page(path: Path) -> None:
    """Make the file's header name an unused page that does not exist, which no record covers."""
    content = bytearray(path.read_bytes())
    content[36:40] = (1).to_bytes(4, "big")
    path.write_bytes(content)


EARLIER["lost page"] = (_lost_page, r"is damaged: [\s\S]*[Ff]reelist")


@pytest.mark.parametrize("name", list(EARLIER))
def test_earlier_records_are_read_by_those_who_verify(
    closed: Path, tmp_path: Path, name: str
) -> None:
    """Opening reads only the last two records and the checkpoint, and gives the same totals."""
    path = copy(closed, tmp_path / "ledger.db")
    change, words = EARLIER[name]
    change(path)
    with pytest.raises(LedgerCorruptError, match=words):
        read_ledger(path)
    with Accountant(DELTA, path=path) as ledger:
        assert state(ledger) == state(plain(CHARGES, models=3))
        ledger.add(answer(CHARGES, models=3))
        assert state(ledger) == state(plain(CHARGES + 1, models=3))
    with pytest.raises(LedgerCorruptError, match=words):
        read_ledger(path)


def test_a_head_that_is_one_behind_is_brought_forward(closed: Path, tmp_path: Path) -> None:
    path = copy(closed, tmp_path / "ledger.db")
    move(charge_more(path, 1), path, "-head")
    assert (read_ledger(path).charges, read_ledger(path).behind) == (CHARGES + 1, 1)
    Accountant(DELTA, path=path).close()
    assert (read_ledger(path).charges, read_ledger(path).behind) == (CHARGES + 1, 0)


def test_both_files_of_a_backup_cannot_be_told_from_the_ledger(
    closed: Path, tmp_path: Path
) -> None:
    """docs/how-to/keep-a-ledger.md says so; a count and digest noted elsewhere tell."""
    path = copy(closed, tmp_path / "ledger.db")
    before = charge_more(path, 3)
    noted = read_ledger(path)
    move(before, path, "", "-head")
    rolled_back = read_ledger(path)
    assert rolled_back.charges == CHARGES < noted.charges
    assert rolled_back.digest != noted.digest
