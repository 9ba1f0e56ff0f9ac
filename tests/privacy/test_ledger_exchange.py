"""The files that a kill leaves, with bits flipped, and each file cut, removed and exchanged.

Every case must raise a LedgerError or give totals that the ledger had, both to verification and to
further charges. A log that lost its end gives earlier totals: only a noted digest can tell.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_cases import (
    DELTA,
    SUFFIXES,
    answer,
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

from adapmixed.errors import LedgerCorruptError
from adapmixed.privacy import Accountant

CHARGES = 4
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
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a ledger that was closed: the database alone."""
    path = tmp_path_factory.mktemp("closed") / "ledger.db"
    make(path, CHARGES, models=3).close()
    return path


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
