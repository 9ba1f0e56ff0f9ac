"""Files that were altered, edited, cut, removed or exchanged, with every bit flipped once.

Every case must raise a LedgerError or give totals that the ledger had, both to verification and to
further charges. A log that lost its end gives earlier totals: only a noted digest can tell.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from privacy_cases import DELTA, answer, charged, copy, state

from adapmixed.cli import main
from adapmixed.errors import LedgerCorruptError, LedgerError
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy.events import canonical, to_json
from adapmixed.privacy.ledger import Record, _hash

CHARGES = 4
SUFFIXES = ("", "-wal", "-shm")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a ledger that was closed: the database alone."""
    path = tmp_path_factory.mktemp("closed") / "ledger.db"
    charged(CHARGES, 3, path).close()
    return path


def killed(folder: Path, charges: int = CHARGES) -> Path:
    """Return a killed ledger, whose charges are in the write-ahead log."""
    with charged(charges, 3, folder / "open.db"):
        return copy(folder / "open.db", folder / "killed.db", shm=True)


def _edit(*statements: str) -> Callable[[Path], None]:
    """Return a change that no trigger forbids."""

    def edit(path: Path) -> None:
        with closing(sqlite3.connect(path)) as other:
            query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
            names, triggers = zip(*other.execute(query), strict=True)
        _run(*(f"DROP TRIGGER {name}" for name in names), *statements, *triggers)(path)

    return edit


def _run(*statements: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            for statement in statements:
                other.execute(statement)

    return run


def _no_ledger(path: Path) -> None:
    os.unlink(path)
    _run("CREATE TABLE record (sequence)")(path)


def _lost_page(path: Path) -> None:
    """Make the file's header name an unused page that does not exist, which no record covers."""
    content = bytearray(path.read_bytes())
    content[36:40] = (1).to_bytes(4, "big")
    path.write_bytes(content)


def _replaced(old: str, new: str, where: str) -> Callable[[Path], None]:
    return _edit(
        f"UPDATE record SET text = replace(text, '{old}', '{new}') WHERE sequence = {where}"
    )


FIRST, TOTALS = "record 0 (is missing|was altered)", "the totals do not fit"
TAMPERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no database": (os.unlink, "ledger.db must be"),
    "no ledger": (_no_ledger, "is not the database of a ledger"),
    "text": (lambda p: p.write_text("spent: nothing\n" * 500), "is not an intact ledger"),
    "empty": (lambda p: p.write_bytes(b""), "is not the database of a ledger"),
    "last record deleted": (_edit("DELETE FROM record WHERE sequence = 4"), TOTALS),
    "last record altered": (_replaced("1", "0", "4"), "record 4 was altered"),
    "renumbered": (_edit("UPDATE record SET sequence = sequence - 1"), FIRST),
    "other type": (_edit("UPDATE record SET text = CAST(text AS BLOB)"), "columns of a record"),
    "no UTF-8": (_edit("UPDATE totals SET text = CAST(x'ff' AS TEXT)"), "is not an intact ledger"),
    "settings altered": (_replaced(str(DELTA), "0.1", "0"), FIRST),
    "another identity": (_replaced('ity":"', 'ity":"0', "0"), FIRST),
    "settings gone": (_edit("DELETE FROM record WHERE sequence = 0"), "record 0 is missing"),
    "records gone": (_edit("DELETE FROM record"), "record 0 is missing"),
    "newer": (_run("PRAGMA user_version = 14"), "version 13, got 14: read it with the version of"),
    "older": (_run("PRAGMA user_version = 12"), "must have format_version 13, got 12"),
    "trigger gone": (_run("DROP TRIGGER no_delete_of_record"), "have the tables of a ledger"),
    "table added": (_run("CREATE TABLE gift (x)"), "have the tables of a ledger"),
    "totals gone": (_edit("DELETE FROM totals"), "must have one row of totals"),
    "totals altered": (_edit("UPDATE totals SET text = replace(text, '4', '3')"), TOTALS),
    "hash of totals altered": (_edit("UPDATE totals SET hash = zeroblob(32)"), TOTALS),
    "last record twice": (
        _run("INSERT INTO record SELECT 5, text, hash FROM record WHERE sequence = 4"),
        "record 5 was altered",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_files_are_refused(closed: Path, tmp_path: Path, name: str) -> None:
    path = copy(closed, tmp_path / "ledger.db")
    change, words = TAMPERED[name]
    change(path)
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(LedgerError, match=words):
        read_ledger(path)
    for _ in range(2):  # again, since opening repaired nothing
        with pytest.raises(LedgerError, match=words):
            Accountant(DELTA, path=path, create=False)
    if name != "no ledger":
        assert before == (path.read_bytes() if path.exists() else None)


EARLIER: dict[str, tuple[Callable[[Path], None], str]] = {
    "first record deleted": (_edit("DELETE FROM record WHERE sequence = 1"), "record 1 is missing"),
    "events altered": (_edit("UPDATE record SET text = '{}' WHERE sequence = 2"), "record 2 was a"),
    "hash altered": (_edit("UPDATE record SET hash = zeroblob(32) WHERE sequence = 1"), "record 1"),
    "lost page": (_lost_page, r"is damaged: [\s\S]*[Ff]reelist"),
}


@pytest.mark.parametrize("name", EARLIER)
def test_earlier_records_are_read_by_those_who_verify(
    closed: Path, tmp_path: Path, name: str
) -> None:
    """Opening reads only three records and the totals, and gives the same totals."""
    path = copy(closed, tmp_path / "ledger.db")
    change, words = EARLIER[name]
    change(path)
    with Accountant(DELTA, path=path) as ledger:
        assert state(ledger) == state(charged(CHARGES, 3))
        ledger.add(answer(CHARGES, 3))
        assert state(ledger) == state(charged(CHARGES + 1, 3))
    with pytest.raises(LedgerCorruptError, match=words):
        read_ledger(path)


def _forged(path: Path, last: Record, totals: tuple[str, bytes]) -> None:
    """Write a last record and totals, whose hashes fit."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("INSERT OR IGNORE INTO record VALUES (?, ?, ?)", last)
        other.execute("UPDATE totals SET text = ?, hash = ?", totals)


def test_records_and_totals_with_fitting_hashes_must_give_each_other(
    closed: Path, tmp_path: Path
) -> None:
    """The hashes have no key, so verification charges every record again."""
    path = copy(closed, tmp_path / "ledger.db")
    reading = read_ledger(path)
    _forged(path, reading.last, replace(reading, account=charged(CHARGES - 1, 3)._account).totals)
    with Accountant(DELTA, path=path) as ledger:
        assert ledger.queries < reading.account.queries
    with pytest.raises(LedgerCorruptError, match="the totals are not what the records give"):
        read_ledger(path)
    others = replace(reading.account, delta=1e-6)
    _forged(path, reading.last, replace(reading, account=others).totals)
    for look in (read_ledger, lambda path: Accountant(1e-6, path=path)):
        with pytest.raises(LedgerCorruptError, match="do not have the settings of record 0"):
            look(path)
    text = canonical(to_json(tuple(answer(9, models=6))))
    last = Record.after(reading.last, text)
    _forged(path, last, replace(reading, last=last).totals)
    with pytest.raises(LedgerCorruptError, match="is not an intact ledger: num_models must be"):
        read_ledger(path)
    text = '{"settings":{}}'
    _forged(path, last, (text, _hash("totals", reading.first.hash, last.hash, text.encode())))
    with pytest.raises(LedgerCorruptError, match="is not an intact ledger: Account must have"):
        Accountant(DELTA, path=path)


@pytest.mark.parametrize(
    "text",
    ["{}", '{"events":[]}', "[[]]", '[{"event":"Binding"}]', '[{"event":"Gift","queries":1}]',
     '[{"event":"PublicAnswer","queries":true}]', '[{"event":[]}]', "[" * 100_000],
)  # fmt: skip
def test_a_record_is_a_list_of_events(closed: Path, tmp_path: Path, text: str) -> None:
    path = copy(closed, tmp_path / "ledger.db")
    reading = read_ledger(path)
    last = Record.after(reading.last, text)
    _forged(path, last, replace(reading, last=last).totals)
    with pytest.raises(LedgerCorruptError, match="is not an intact ledger"):
        read_ledger(path)


def test_a_rolled_back_copy_is_told_by_a_digest_noted_earlier(
    closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else can tell; docs/how-to/keep-a-ledger.md says so."""
    path = copy(closed, tmp_path / "ledger.db")
    earlier = read_ledger(path)
    with Accountant(DELTA, path=path) as accountant:
        accountant.add(answer(9, 3))
    noted = read_ledger(path)
    verify = ["ledger", "verify", str(path), "--expect"]
    for reading in (earlier, noted):
        assert main([*verify, reading.digest]) == 0
    copy(closed, path)
    assert read_ledger(path).charges == CHARGES < noted.charges
    with pytest.raises(LedgerCorruptError, match="was replaced while it was read"):
        list(noted.records())
    assert main([*verify, earlier.digest]) == 0
    capsys.readouterr()
    assert main([*verify, noted.digest]) == 2
    assert "--expect" in capsys.readouterr().err


def verified(path: Path) -> object:
    """Read a ledger's files; return the totals in bits, or the class of the error."""
    try:
        reading = read_ledger(path)
    except LedgerError as error:
        return type(error)
    return reading.charges, state(reading.account)


def going_on(path: Path) -> object:
    """Open the ledger and charge once more, as :func:`verified`; it then verifies or raises."""
    try:
        with Accountant(DELTA, path=path, create=False) as accountant:
            accountant.add(answer(50, 3))
            kept = accountant.charges, state(accountant)
    except LedgerError as error:
        return type(error)
    again = verified(path)
    assert again == kept or isinstance(again, type), again
    return kept


def seen(look: Callable[[Path], object]) -> list[object]:
    """Return what a look finds in the ledger after each of its charges."""
    views = list[object]()
    for charges in range(CHARGES + 1):
        accountant = charged(charges, 3)
        if look is going_on:
            accountant.add(answer(50, 3))
        views.append((charges + (look is going_on), state(accountant)))
    return views


looks = pytest.mark.parametrize("look", [verified, going_on])


@looks
@pytest.mark.parametrize(
    ("files", "suffix", "step"),
    [("closed", "", 67), ("killed", "", 67), ("killed", "-wal", 131), ("killed", "-shm", 311)],
)
@pytest.mark.slow
def test_a_flipped_bit_is_refused_or_has_no_meaning(
    closed: Path, tmp_path: Path, files: str, suffix: str, step: int, look: Callable[[Path], object]
) -> None:
    """One bit of every so many bytes is flipped."""
    original = closed if files == "closed" else killed(tmp_path)
    step = step if look is verified else 3 * step + 2
    allowed = seen(look) if suffix == "-wal" else seen(look)[-1:]
    generator, content = random.Random(step), Path(f"{original}{suffix}").read_bytes()
    views = list[object]()
    for at in range(generator.randrange(step), len(content), step):
        path = copy(original, tmp_path / "ledger.db", shm=True)
        changed = bytearray(content)
        changed[at] ^= 1 << generator.randrange(8)
        Path(f"{path}{suffix}").write_bytes(changed)
        views.append(look(path))
        assert isinstance(views[-1], type) or views[-1] in allowed, (at, views[-1])
    assert len(views) > 30 and (sum(isinstance(view, type) for view in views) > 3 or suffix != "")


@looks
@pytest.mark.parametrize("files", ["closed", "killed"])
def test_a_shortened_file_is_refused_or_gives_totals_that_it_had(
    closed: Path, tmp_path: Path, files: str, look: Callable[[Path], object]
) -> None:
    original = closed if files == "closed" else killed(tmp_path)
    for suffix in SUFFIXES:
        if not Path(f"{original}{suffix}").exists():
            continue
        size = Path(f"{original}{suffix}").stat().st_size
        for length in {0, 1, 4096, size // 2, size - 1} - {size}:
            path = copy(original, tmp_path / "ledger.db", shm=True)
            os.truncate(f"{path}{suffix}", length)
            view = look(path)
            # A page of the database may lie in the log, too.
            same = files == "killed" and view in seen(look)
            assert isinstance(view, type) or same, (suffix, length)


@looks
def test_files_of_another_ledger(tmp_path: Path, look: Callable[[Path], object]) -> None:
    """Some files are those of a ledger with fewer charges, so that its totals would be too low."""
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    ledger, other = killed(tmp_path / "own"), killed(tmp_path / "other", 2)
    allowed = [*seen(look), look(copy(other, tmp_path / "third.db"))]
    for size in (1, 2, 3):
        for taken in itertools.combinations(SUFFIXES, size):
            path = copy(ledger, tmp_path / "ledger.db", shm=True)
            for suffix in taken:
                shutil.copyfile(f"{other}{suffix}", f"{path}{suffix}")
            view = look(path)
            assert isinstance(view, type) or view in allowed, (taken, view)


def test_a_log_without_its_database_is_no_new_ledger(tmp_path: Path) -> None:
    path = copy(killed(tmp_path), tmp_path / "ledger.db")
    path.unlink()
    with pytest.raises(LedgerCorruptError, match="must exist if .*-wal holds charges"):
        Accountant(DELTA, path=path)


def test_a_ledger_that_was_read_can_be_moved_away(closed: Path, tmp_path: Path) -> None:
    """SQLite's log and index stay with a reader, and hold nothing."""
    path = copy(closed, tmp_path / "ledger.db")
    before, reading = path.read_bytes(), read_ledger(path)
    assert path.read_bytes() == before and Path(f"{path}-wal").stat().st_size == 0
    moved = path.rename(tmp_path / "moved.db")
    charged(1, 3, path).close()
    assert {*tmp_path.iterdir()} == {moved, path}
    assert read_ledger(moved).digest == reading.digest and read_ledger(path).charges == 1
