"""Files that were altered, edited, cut, removed or exchanged, with every bit flipped once.

Every case must raise a LedgerError or give totals that the ledger had, both to verification and to
further charges. A log that lost its end gives earlier totals: only a noted digest can tell.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_cases import (
    DELTA,
    SUFFIXES,
    answer,
    charge_more,
    copy,
    flips,
    going_on,
    make,
    move,
    opened,
    outcome,
    plain,
    state,
)

from adapmixed.cli import main
from adapmixed.errors import LedgerCorruptError, LedgerError
from adapmixed.privacy import Accountant, read_ledger

CHARGES = 4


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a ledger that was closed: the database alone."""
    path = tmp_path_factory.mktemp("closed") / "ledger.db"
    make(path, CHARGES, models=3).close()
    return path


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
    "no database": (os.unlink, "no such file"),
    "no ledger": (_no_ledger, "is not the database of a ledger"),
    "text": (lambda p: p.write_text("spent: nothing\n" * 500), "is not an intact ledger"),
    "empty": (lambda p: p.write_bytes(b""), "is not the database of a ledger"),
    "last record deleted": (
        _edit("DELETE FROM record WHERE sequence = 4"),
        "the totals do not fit the first and last record",
    ),
    "last record altered": (
        _edit("UPDATE record SET text = replace(text, '1', '0') WHERE sequence = 4"),
        "record 4 was altered",
    ),
    "renumbered": (
        _edit("UPDATE record SET sequence = sequence - 1"),
        "record 0 (is missing|was altered)",
    ),
    "other type": (
        _edit("UPDATE record SET text = CAST(text AS BLOB)"), "does not have the columns of a rec"
    ),
    "settings altered": (
        _edit(f"UPDATE record SET text = replace(text, '{DELTA}', '0.1') WHERE sequence = 0"),
        "record 0 (is missing|was altered)",
    ),
    "another identity": (
        _edit("UPDATE record SET text = replace(text, 'ity\":\"', 'ity\":\"0') WHERE sequence = 0"),
        "record 0 (is missing|was altered)",
    ),
    "settings gone": (_edit("DELETE FROM record WHERE sequence = 0"), "record 0 is missing"),
    "newer": (_edit("PRAGMA user_version = 11"), "must have format_version 10, got 11: read it"),
    "older": (_edit("PRAGMA user_version = 9"), "must have format_version 10, got 9: begin an"),
    "trigger gone": (_no_trigger, "does not have the tables of a ledger"),
    "table added": (_edit("CREATE TABLE gift (x)"), "does not have the tables of a ledger"),
    "totals gone": (_edit("DELETE FROM totals"), "must have one row of totals"),
    "totals altered": (
        _edit("UPDATE totals SET text = replace(text, '4', '3')"), "the totals do not fit"
    ),
    "last record twice": (
        _edit("INSERT INTO record SELECT 5, text, hash FROM record WHERE sequence = 4"),
        "record 5 was altered",
    ),
    "totals and their hash altered": (
        _edit("UPDATE totals SET hash = zeroblob(32)"), "the totals do not fit"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TAMPERED))
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
    """Opening reads only three records and the totals, and gives the same totals."""
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


def test_a_rolled_back_copy_is_told_by_a_digest_noted_earlier(
    closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else can tell; docs/how-to/keep-a-ledger.md says so."""
    path = copy(closed, tmp_path / "ledger.db")
    earlier = read_ledger(path)
    before = charge_more(path, 3)
    noted = read_ledger(path)
    verify = ["ledger", "verify", str(path), "--expect"]
    for known in (earlier, noted):
        assert main([*verify, known.digest]) == 0
    move(before, path, "")
    assert read_ledger(path).charges == CHARGES < noted.charges
    assert main([*verify, earlier.digest]) == 0
    capsys.readouterr()
    assert main([*verify, noted.digest]) == 2
    assert "--expect" in capsys.readouterr().err


LOOKS: dict[str, Callable[[Path], object]]
LOOKS = {"verified": outcome, "opened": opened, "charged": going_on}


def had(look: str, most: int = CHARGES) -> list[object]:
    """Return what a look finds in the ledger after each of its charges."""
    if look != "charged":
        return [(charges, state(plain(charges, models=3))) for charges in range(most + 1)]
    found = []
    for charges in range(most + 1):
        accountant = plain(charges, models=3)
        accountant.add(answer(50, models=3))
        found.append((charges + 1, state(accountant)))
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a killed ledger, whose charges are in the write-ahead log."""
    folder = tmp_path_factory.mktemp("killed")
    with make(folder / "open.db", CHARGES, models=3):
        return copy(folder / "open.db", folder / "ledger.db", shm=True)


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another killed ledger, with fewer charges, so that its totals would be too low."""
    folder = tmp_path_factory.mktemp("another")
    with make(folder / "open.db", 2, models=3):
        return copy(folder / "open.db", folder / "ledger.db", shm=True)


STEPS = {"": 67, "-wal": 131, "-shm": 311}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    ("files", "suffix"), [("closed", ""), ("killed", ""), ("killed", "-wal"), ("killed", "-shm")]
)
@pytest.mark.slow
def test_a_flipped_bit_is_refused_or_has_no_meaning(
    request: pytest.FixtureRequest, tmp_path: Path, files: str, suffix: str, look: str
) -> None:
    step = STEPS[suffix] if look == "verified" else 3 * STEPS[suffix] + 2
    allowed = had(look) if suffix == "-wal" else had(look)[-1:]
    original = request.getfixturevalue(files)
    refused, survived = flips(original, suffix, tmp_path / "ledger.db", step, LOOKS[look], allowed)
    assert refused + survived > 30 and (refused > 3 or suffix != "")


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("files", ["closed", "killed"])
def test_a_shortened_file_is_refused_or_gives_totals_that_it_had(
    request: pytest.FixtureRequest, tmp_path: Path, files: str, look: str
) -> None:
    original = request.getfixturevalue(files)
    for suffix in SUFFIXES:
        if not Path(f"{original}{suffix}").exists():
            continue
        size = Path(f"{original}{suffix}").stat().st_size
        for length in {0, 1, 4096, size // 2, size - 1} - {size}:
            path = copy(original, tmp_path / "ledger.db", shm=True)
            os.truncate(f"{path}{suffix}", length)
            found = LOOKS[look](path)
            # A page of the database may lie in the log, too.
            same = files == "killed" and found in had(look)
            assert isinstance(found, type) or same, (suffix, length)


def subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    sizes = range(1, len(names) + 1)
    return [found for size in sizes for found in itertools.combinations(names, size)]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("taken", subsets(SUFFIXES), ids="+".join)
def test_files_of_another_ledger(
    killed: Path, another: Path, tmp_path: Path, taken: tuple[str, ...], look: str
) -> None:
    path = copy(killed, tmp_path / "ledger.db", shm=True)
    move(another, path, *taken)
    found = LOOKS[look](path)
    allowed = [*had(look), LOOKS[look](copy(another, tmp_path / "third.db"))]
    assert isinstance(found, type) or found in allowed, (taken, found)


def test_a_log_without_its_database_is_no_new_ledger(killed: Path, tmp_path: Path) -> None:
    path = copy(killed, tmp_path / "ledger.db")
    path.unlink()
    with pytest.raises(LedgerCorruptError, match="must exist if .*-wal does"):
        Accountant(DELTA, path=path)
