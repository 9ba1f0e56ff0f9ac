"""Files that were altered, cut, mixed or rolled back: refused, or the same totals as before."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_cases import DELTA, SETTINGS, SUFFIXES, answer, copy, make, state

from adapmixed.privacy import Ledger, LedgerError
from adapmixed.privacy.ledger import LedgerCorruptError, read
from adapmixed.privacy.ledger.head import SLOT

CHARGES = 4


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger that was closed: the database and its head."""
    path = tmp_path_factory.mktemp("closed") / "ledger.db"
    make(path, CHARGES, models=3).close()
    return path


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a kill leaves: the charges are in the write-ahead log."""
    folder = tmp_path_factory.mktemp("killed")
    with make(folder / "open.db", CHARGES, models=3):
        return copy(folder / "open.db", folder / "ledger.db")


def outcome(path: Path) -> object:
    """What a ledger's files give: the totals in bits, or the refusal's class."""
    try:
        reading = read(path)
    except LedgerError as error:
        return type(error)
    return (reading.charges, reading.hash, state(reading.accountant))


def flips(original: Path, suffix: str, scratch: Path, step: int) -> tuple[int, int]:
    """Flips one bit at every `step`-th byte of a file; how often it was refused, and survived."""
    expected, generator = outcome(copy(original, scratch)), random.Random(step)
    victim = Path(f"{scratch}{suffix}")
    content = Path(f"{original}{suffix}").read_bytes()
    refused = survived = 0
    for at in range(generator.randrange(step), len(content), step):
        copy(original, scratch)
        changed = bytearray(content)
        changed[at] ^= 1 << generator.randrange(8)
        victim.write_bytes(changed)
        found = outcome(scratch)
        assert found == expected or isinstance(found, type), f"byte {at} of {victim}: {found}"
        refused += isinstance(found, type)
        survived += not isinstance(found, type)
    return refused, survived


@pytest.mark.parametrize(
    ("files", "suffix", "step"), [("closed", "", 67), ("killed", "", 71), ("killed", "-wal", 97)]
)
def test_a_flipped_bit_is_refused_or_has_no_meaning(
    request: pytest.FixtureRequest, tmp_path: Path, files: str, suffix: str, step: int
) -> None:
    refused, survived = flips(request.getfixturevalue(files), suffix, tmp_path / "ledger.db", step)
    assert refused > 10 and refused + survived > 100


def spoil(path: Path, at: int) -> Path:
    """Flips a bit of the head."""
    head = Path(f"{path}-head")
    content = bytearray(head.read_bytes())
    content[at] ^= 1
    head.write_bytes(content)
    return path


def test_a_flipped_bit_of_the_newest_slot_is_reported(
    closed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert CHARGES % 2 == 0  # the first slot is the newer one
    assert read(closed).warning is None
    for at in (*range(0, 200, 9), SLOT - 1):
        path = spoil(copy(closed, tmp_path / "ledger.db"), at)
        reading = read(path)
        assert (reading.charges, reading.behind, reading.torn) == (CHARGES, 1, True)
        assert "slot of charge 4 is not whole: either it was being written" in str(reading.warning)
        assert "or it was damaged later" in str(reading.warning)
        if at % 5:
            continue
        caplog.clear()
        with Ledger.open(path, **SETTINGS) as ledger:
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert caplog.records[0].getMessage() == f"ledger {path}: {reading.warning}"
            ledger.charge(answer(9, models=3))
        assert (read(path).behind, read(path).warning) == (0, None)


def test_a_flipped_bit_of_the_older_slot_is_refused(closed: Path, tmp_path: Path) -> None:
    """It could be the newer one of a ledger that has lost its last charge."""
    for at in (*range(SLOT, SLOT + 200, 9), 2 * SLOT - 1):
        path = spoil(copy(closed, tmp_path / "ledger.db"), at)
        for reader in (lambda p: Ledger.open(p, **SETTINGS), read):
            with pytest.raises(LedgerCorruptError, match="must hold 5 charges, found 4: a slot of"):
                reader(path)


def test_the_first_slot_is_not_written_before_the_second(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    make(path, 0).close()
    with pytest.raises(LedgerCorruptError, match="whose slots say: spoilt, 0"):
        read(spoil(path, 30))


@pytest.mark.parametrize("charges", [0, 1, 2, 3])
def test_a_spoilt_slot_hides_no_lost_charge(tmp_path: Path, charges: int) -> None:
    path = tmp_path / "ledger.db"
    make(path, charges, models=3).close()
    before = older(path, 1)
    move(before, path, "")
    spoil(path, SLOT * ((charges + 1) % 2) + 30)
    for reader in (lambda p: Ledger.open(p, **SETTINGS), read):
        with pytest.raises(LedgerCorruptError, match=f"must hold {charges + 1} charges, found"):
            reader(path)


@pytest.mark.parametrize("files", ["closed", "killed"])
def test_a_shortened_file_is_refused(
    request: pytest.FixtureRequest, tmp_path: Path, files: str
) -> None:
    original = request.getfixturevalue(files)
    expected = outcome(copy(original, tmp_path / "ledger.db"))
    suffix = "" if files == "closed" else "-wal"
    size = Path(f"{original}{suffix}").stat().st_size
    # The last bytes of the log may be lost without a loss: they repeat what the head lacks not.
    for length in (0, 1, 100, size // 2, size - 4096, size - 1):
        path = copy(original, tmp_path / "ledger.db")
        os.truncate(f"{path}{suffix}", length)
        for reader in (lambda p: Ledger.open(p, **SETTINGS), read):
            with pytest.raises(LedgerError):
                reader(path)
    assert isinstance(expected, tuple)


def older(path: Path, charges: int) -> Path:
    """Charges more and gives a copy of the files as they were before."""
    before = copy(path, path.with_name("before.db"))
    with Ledger.open(path, **SETTINGS) as ledger:
        for number in range(charges):
            ledger.charge(answer(100 + number, models=3))
    return before


def move(source: Path, target: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        shutil.copyfile(f"{source}{suffix}", f"{target}{suffix}")


def remove(path: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        os.unlink(f"{path}{suffix}")


def _older_database(path: Path) -> None:
    move(older(path, 1), path, "")


def _older_head(path: Path) -> None:
    move(older(path, 2), path, "-head")


def _empty_head(path: Path) -> None:
    Path(f"{path}-head").write_bytes(b"")


def _cut_head(path: Path) -> None:
    with open(f"{path}-head", "r+b") as file:
        file.truncate(SLOT)


def _long_head(path: Path) -> None:
    with open(f"{path}-head", "ab") as file:
        file.write(b"\0")


def _unreadable_head(path: Path) -> None:
    Path(f"{path}-head").write_bytes(bytes(2 * SLOT))


def _stale_slot(path: Path) -> None:
    """The newest slot as it was when the ledger was made, beside a database one charge older."""
    head = Path(f"{path}-head")
    move(older(path, 1), path, "")
    content = head.read_bytes()
    fresh = path.with_name("fresh.db")
    make(fresh, 0).close()
    head.write_bytes(content[:SLOT] + Path(f"{fresh}-head").read_bytes()[SLOT:])


def _exchanged_slots(path: Path) -> None:
    head = Path(f"{path}-head")
    content = head.read_bytes()
    head.write_bytes(content[SLOT:] + content[:SLOT])


def _lost_page(path: Path) -> None:
    """The file's header says that a page is unused which there is not: no record is of that."""
    content = bytearray(path.read_bytes())
    content[36:40] = (1).to_bytes(4, "big")
    path.write_bytes(content)


def _database_of_another(path: Path) -> None:
    other = path.with_name("other.db")
    make(other, CHARGES, models=3).close()
    move(other, path, "")


def _no_ledger(path: Path) -> None:
    os.unlink(path)
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE record (sequence)")


def _edit(statement: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        other = sqlite3.connect(path, isolation_level=None)
        triggers = other.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        listed = triggers.fetchall()
        for name, _ in listed:
            other.execute(f"DROP TRIGGER {name}")
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
    "older head": (_older_head, "holds 6 charges, its head 4: .* the head is an older copy"),
    "no head": (lambda p: remove(p, "-head"), "ledger.db-head must lie beside its database"),
    "no database": (lambda p: remove(p, ""), "must hold 4 charges|no such file"),
    "empty head": (_empty_head, "ledger.db-head"),
    "unreadable head": (_unreadable_head, "holds no whole head in its 8192 bytes"),
    "cut head": (_cut_head, "holds no whole head in its 4096 bytes"),
    "long head": (_long_head, "holds no whole head in its 8193 bytes"),
    "stale slot": (_stale_slot, "no whole head in its 8192 bytes, whose slots say: 4, 0"),
    "exchanged slots": (_exchanged_slots, "whose slots say: 3, 4"),
    "lost page": (_lost_page, r"is damaged: [\s\S]*[Ff]reelist"),
    "another's database": (_database_of_another, "do not belong together"),
    "no ledger": (_no_ledger, "is not the database of a ledger"),
    "text": (lambda p: p.write_text("spent: nothing\n" * 500), "is not an intact ledger"),
    "empty": (lambda p: p.write_bytes(b""), "is not the database of a ledger"),
    "last record deleted": (_edit("DELETE FROM record WHERE sequence = 4"), "charges were lost"),
    "first record deleted": (_edit("DELETE FROM record WHERE sequence = 1"), "record 1 is missing"),
    "renumbered": (_edit("UPDATE record SET sequence = sequence - 1"), "record 1 is missing"),
    "events altered": (
        _edit("UPDATE record SET events = '[]' WHERE sequence = 2"), "record 2 was altered"
    ),
    "other type": (
        _edit("UPDATE record SET charges = CAST(charges AS TEXT)"), "columns of a record|UTF-8"
    ),
    "totals altered": (
        _edit("UPDATE record SET totals = replace(totals, '1', '0')"), "record 1 was altered"
    ),
    "format altered": (_edit("UPDATE record SET format_version = 1"), "record 1 was altered"),
    "description altered": (
        _edit(f"UPDATE description SET text = replace(text, '{DELTA}', '0.1')"),
        "altered|delta must be",
    ),
    "newer": (
        _edit("PRAGMA user_version = 4"), "format_version 4, written by a newer version .* to 3"
    ),
    "older": (_edit("PRAGMA user_version = 1"), "must be that of its description, 3, got 1"),
    "unknown": (_edit("PRAGMA user_version = 0"), "must be >= 1, got 0"),
    "trigger gone": (_no_trigger, "does not have the tables of a ledger"),
    "table added": (_edit("CREATE TABLE gift (x)"), "does not have the tables of a ledger"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TAMPERED))
def test_tampered_files_are_refused(closed: Path, tmp_path: Path, name: str) -> None:
    path = copy(closed, tmp_path / "ledger.db")
    change, words = TAMPERED[name]
    change(path)
    files = [file for file in (path, Path(f"{path}-head")) if file.exists()]
    before = [file.read_bytes() for file in files]
    with pytest.raises(LedgerError, match=words):
        Ledger.verify(path)
    for _ in range(2):  # refused again, since opening repaired nothing
        with pytest.raises(LedgerError, match=words):
            Ledger.open(path, **SETTINGS)
    if name != "no ledger":
        assert before == [file.read_bytes() for file in files]


def test_a_deleted_log_is_refused(killed: Path, tmp_path: Path) -> None:
    path = copy(killed, tmp_path / "ledger.db")
    assert read(path).charges == CHARGES
    for suffix in SUFFIXES[2:]:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    with pytest.raises(LedgerCorruptError, match="charges were lost .* a deleted .*-wal"):
        Ledger.open(path, **SETTINGS)


def test_a_log_without_its_database_is_no_new_ledger(killed: Path, tmp_path: Path) -> None:
    path = copy(killed, tmp_path / "ledger.db")
    remove(path, "", "-head")
    with pytest.raises(LedgerCorruptError, match="must lie beside its .*-wal"):
        Ledger.open(path, **SETTINGS)


def test_a_head_that_is_one_behind_is_brought_forward(closed: Path, tmp_path: Path) -> None:
    path = copy(closed, tmp_path / "ledger.db")
    before = older(path, 1)
    move(before, path, "-head")
    assert (read(path).charges, read(path).behind) == (CHARGES + 1, 1)
    Ledger.open(path, **SETTINGS).close()
    assert (read(path).charges, read(path).behind) == (CHARGES + 1, 0)


def test_both_files_of_a_backup_cannot_be_told_from_the_ledger(
    closed: Path, tmp_path: Path
) -> None:
    """What docs/ledger.md says is not covered; the noted count and hash tell."""
    path = copy(closed, tmp_path / "ledger.db")
    before = older(path, 3)
    noted = read(path)
    move(before, path, "", "-head")
    rolled_back = read(path)
    assert rolled_back.charges == CHARGES < noted.charges
    assert rolled_back.hash != noted.hash
