"""One writer at a time, however processes end; concurrent readers; the files themselves."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from accountant_cases import Offer
from ledger_cases import DELTA, answer, copy, ends, make, plain, state

from adapmixed.errors import LedgerBusyError, LedgerClosedError
from adapmixed.privacy import Accountant, read_ledger

HOLD = "import sys\nfrom adapmixed.privacy import Accountant\n"
HOLD += "ledger = Accountant(1e-5, path=sys.argv[1])\n"
HOLD += "print('open', flush=True)\nsys.stdin.read()\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_files_are_for_the_owner_alone(path: Path) -> None:
    with make(path, 1):
        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


def test_strange_names_and_links_lead_to_the_same_ledger(tmp_path: Path) -> None:
    path = tmp_path / "a ledger?mode=ro#%41'ä.db"
    make(path, 2).close()
    link = tmp_path / "link.db"
    link.symlink_to(path)
    with Accountant(DELTA, path=link) as ledger:
        assert ledger.charges == 2
        with pytest.raises(LedgerBusyError):
            Accountant(DELTA, path=path)


def test_a_second_writer_in_this_process_is_refused(path: Path) -> None:
    with make(path, 1) as ledger:
        with pytest.raises(LedgerBusyError, match="is held by another writer"):
            Accountant(DELTA, path=path)
        ledger.add(answer(1))  # and the first one goes on
    with Accountant(DELTA, path=path) as ledger:
        assert ledger.charges == 2
    ledger = Accountant(DELTA, path=path)
    del ledger  # forgotten without close
    gc.collect()
    Accountant(DELTA, path=path).close()


def test_a_second_writer_in_another_process_is_refused_until_the_first_is_killed(
    path: Path,
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        with pytest.raises(LedgerBusyError, match="is held by another writer"):
            Accountant(DELTA, path=path)
        assert read_ledger(path).charges == 0
        holder.kill()
        holder.wait()
        with Accountant(DELTA, path=path) as ledger:
            ledger.add(answer(0))


def test_a_forked_child_cannot_charge(path: Path) -> None:
    with make(path, 1) as ledger:

        def work() -> None:
            with pytest.raises(ValueError, match="in the process that made it"):
                ledger.add(answer(1))
            ledger.close()
            with pytest.raises(LedgerBusyError):
                Accountant(DELTA, path=path)

        assert ends(work) == 0
        ledger.add(answer(1))
    with Accountant(DELTA, path=path) as again:
        assert state(again) == state(plain(2))


def test_a_living_child_does_not_keep_a_closed_ledger(path: Path) -> None:
    ledger = make(path, 1)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        ledger.close()
        with Accountant(DELTA, path=path) as again:
            assert state(again) == state(plain(1))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_threads_share_a_ledger(path: Path) -> None:
    """Every charge is one record, and no shard pays more than its budget."""
    with Accountant(DELTA, epsilon=2.0, path=path) as ledger:
        ledger.charge(Offer(charges=[[0.0]]))
        part, offers = ledger.limit / 20.5, []

        def work() -> None:
            for _ in range(10):
                offers.append(Offer(charges=[[part]]))
                ledger.charge(offers[-1])

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reading = read_ledger(path)
        assert ledger.charges == reading.charges == 32
        assert sum(bool(one.active.all()) for one in offers) == 20
        assert (ledger.spent <= ledger.limit).all()
        assert state(reading.account) == state(ledger)


def test_reading_while_a_writer_is_at_work(path: Path) -> None:
    with make(path, 0) as ledger:
        done = threading.Event()
        seen: list[int] = []
        errors: list[BaseException] = []

        def look() -> None:
            while not done.is_set():
                try:
                    seen.append(read_ledger(path).charges)
                except BaseException as error:
                    errors.append(error)
                    return

        reader = threading.Thread(target=look)
        reader.start()
        for number in range(60):
            ledger.add(answer(number))
        done.set()
        reader.join()
        assert not errors and seen == sorted(seen) and seen[-1] <= 60
        assert read_ledger(path).charges == 60


def test_a_writer_that_was_killed_can_be_read_without_being_repaired(path: Path) -> None:
    with make(path, 4):
        copied = copy(path, path.with_name("copy.db"))
    before = {suffix: Path(f"{copied}{suffix}").read_bytes() for suffix in ("", "-wal")}
    assert read_ledger(copied).charges == 4
    for suffix, content in before.items():
        assert Path(f"{copied}{suffix}").read_bytes() == content


@pytest.mark.parametrize("how", ["replace", "remove"])
def test_a_file_that_is_taken_away_while_open_is_seen(path: Path, how: str) -> None:
    with make(path, 1) as ledger:
        older = copy(path, path.with_name("older.db"))
        if how == "replace":
            older.replace(path)
        else:
            path.unlink()
        with pytest.raises(LedgerClosedError, match="while it was open"):
            ledger.add(answer(1))
