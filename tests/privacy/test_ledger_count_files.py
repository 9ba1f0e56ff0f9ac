"""Records of counts that were altered, and processes that end amid a count: at most K are shown."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from count_cases import MODELS, SETTINGS, SIGMA, K, answer, begin, count
from ledger_cases import copy, exit_status, forked
from test_ledger_crashes import CHARGE

from adapmixed.privacy import Ledger, ReleasedCount
from adapmixed.privacy.filter_total import FilterTotal
from adapmixed.privacy.ledger import LedgerCorruptError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


# Files that were altered


def three_counts(path: Path) -> Path:
    with Ledger.open(path, **SETTINGS) as ledger:
        model_filter = begin(ledger)
        for _ in range(K):
            answer(ledger, model_filter)
            count(model_filter)
    return path


def forged(path: Path, events: Sequence[Any]) -> Path:
    """A whole chain with these events besides, as who means to deceive makes it."""
    check = FilterTotal._check_count
    FilterTotal._check_count = lambda *_: None  # type: ignore[method-assign]
    try:
        with Ledger.open(path, **SETTINGS) as ledger:
            begin(ledger)
            ledger.charge(events)
    finally:
        FilterTotal._check_count = check  # type: ignore[method-assign]
    return path


def test_records_of_counts_that_were_altered_are_refused(path: Path, tmp_path: Path) -> None:
    three_counts(path)
    changes = {
        "DELETE FROM record WHERE sequence = 6": "must hold 6 charges, as its head says, found 5",
        "DELETE FROM record WHERE sequence = 2": "record 2 is missing, found 3",
        "UPDATE record SET events = replace(events, '\"noisy_count\":3', '\"noisy_count\":0')":
            "record 2 was altered",
        "UPDATE record SET events = replace(events, 'ReleasedCount', 'PublicAnswer')":
            "record 2 was altered",
        "UPDATE description SET text = replace(text, '\"releases\":3', '\"releases\":9')":
            "record 1 was altered|belong to another configuration|belongs to another",
        "UPDATE description SET text = replace(text, '\"sigma\":20.0', '\"sigma\":99.0')":
            "record 1 was altered|belongs to another",
    }  # fmt: skip
    for number, (statement, words) in enumerate(changes.items()):
        other = copy(path, tmp_path / f"{number}.db")
        with closing(sqlite3.connect(other, isolation_level=None)) as database:
            table = "description" if "description" in statement else "record"
            act = statement.split()[0].lower()
            name = f"no_{act}_of_{table}"
            query = "SELECT sql FROM sqlite_master WHERE name = ?"
            (trigger,) = database.execute(query, (name,)).fetchone()
            database.execute(f"DROP TRIGGER {name}")
            database.execute(statement)
            database.execute(trigger)
        with pytest.raises(LedgerCorruptError, match=words):
            Ledger.open(other, **SETTINGS)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (ReleasedCount(MODELS, 0.1, SIGMA, 3), "within the 3 that the budget reserves"),
        (ReleasedCount(MODELS, 0.1, 1.0, 3), "sigma must be that of the budget, 20.0"),
    ],
)
def test_a_forged_chain_holds_no_more_counts_either(
    path: Path, event: ReleasedCount, words: str
) -> None:
    forged(three_counts(path), [event])
    for reader in (lambda: Ledger.open(path, **SETTINGS), lambda: Ledger.verify(path)):
        with pytest.raises(LedgerCorruptError, match=f"record 7 cannot be charged: .*{words}"):
            reader()


# Processes that end


@pytest.mark.parametrize("name", list(CHARGE))
def test_a_process_that_ends_amid_a_count(path: Path, name: str) -> None:
    step, counted, _ = CHARGE[name]
    shown = path.with_name("shown")

    def work() -> None:
        ledger = Ledger.open(path, **SETTINGS)
        model_filter = begin(ledger)
        answer(ledger, model_filter)
        count(model_filter)
        step(ledger)
        shown.write_text(str(count(model_filter)))

    assert exit_status(forked(work)) == -signal.SIGKILL
    assert not shown.exists()
    left = K - 1 - counted
    with Ledger.open(path, **SETTINGS) as ledger:
        assert len(ledger.accountant.released_counts) == K - left
        model_filter = begin(ledger)
        for _ in range(left):
            count(model_filter)
        with pytest.raises(ValueError, match="got none left"):
            count(model_filter)
    assert len(Ledger.verify(path).accountant.released_counts) == K


def serve(path: Path, shown: Path, telling: int) -> None:
    """Releases what is left, each with its own noise, and shows it."""
    with Ledger.open(path, **SETTINGS) as ledger:
        model_filter = begin(ledger)
        os.write(telling, b"o")
        file = os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            while True:
                noise = random.SystemRandom().randrange(1, 2**50)
                os.write(file, b"%d\n" % count(model_filter, noise=noise))
                os.write(telling, b"r")
        except ValueError:
            os.write(telling, b"e")


def lines(shown: Path) -> list[int]:
    return [int(line) for line in shown.read_bytes().split()] if shown.exists() else []


def test_kills_at_random_moments_never_show_a_count_too_many(tmp_path: Path) -> None:
    generator, between, whole, pace = random.Random(os.urandom(4)), 0, 0, 0.01
    path, number = tmp_path / "0.db", 0
    for _ in range(80):
        shown = path.with_suffix(".shown")
        told, telling = os.pipe()
        work: Callable[[], None] = lambda path=path, shown=shown, to=telling: serve(  # noqa: E731
            path, shown, to
        )
        child = forked(work)
        os.close(telling)
        for _ in range(generator.randrange(3)):  # the opening, and one count
            before = time.monotonic()
            if os.read(told, 1) == b"r":
                pace = time.monotonic() - before
        time.sleep(generator.uniform(0.0, pace))
        os.kill(child, signal.SIGKILL)
        assert exit_status(child) in (-signal.SIGKILL, 0)
        os.close(told)
        seen = lines(shown)
        recorded = []
        if path.exists():
            counts = Ledger.verify(path).accountant.released_counts
            recorded = [one.noisy_count for one in counts]
        # In their order; what was recorded and not shown counts as released.
        rest = iter(recorded)
        assert len(recorded) <= K and all(one in rest for one in seen), (recorded, seen)
        between += len(recorded) - len(seen)
        if len(recorded) == K:
            with Ledger.open(path, **SETTINGS) as ledger:
                model_filter = begin(ledger)
                with pytest.raises(ValueError, match="got none left"):
                    count(model_filter)
            whole, number = whole + 1, number + 1
            path = tmp_path / f"{number}.db"
    assert whole >= 5 and between >= 1, (whole, between)
