"""Ledgers that an older accounting charged: refused, in other words than damaged ones.

`tests/formats/older` holds two, written by the versions before their totals changed.
"""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapmixed.cli import main
from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    FilterBudget,
    IndividualCharge,
    Ledger,
    PerModelFilter,
    PublicAnswer,
)
from adapmixed.privacy.ledger import LedgerCorruptError, LedgerOlderError, read, records, totals

OLDER = Path(__file__).parents[1] / "formats" / "older"
BUDGET = FilterBudget("renyi", 0.3, 1e-5, 4.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "filter": dict(delta=1e-5, configuration="specimen", filter_budget=BUDGET),
    "pool": dict(delta=1e-5, configuration="specimen", adjacency="add_remove"),
}
FORMATS = {"filter": 1, "pool": 2}
STATED = {"filter": 3.3878634843659867, "pool": 0.8994489127197349}
"""What the version that wrote it printed."""


@pytest.fixture(params=["filter", "pool"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(name: str, tmp_path: Path) -> Path:
    for suffix in ("", "-head"):
        found = OLDER / f"ledger-{name}.sqlite{suffix}"
        shutil.copyfile(found, tmp_path / f"ledger.db{suffix}")
    return tmp_path / "ledger.db"


def readers(path: Path, name: str) -> list[Callable[[], object]]:
    return [
        lambda: Ledger.open(path, **SETTINGS[name]),
        lambda: Ledger.open(path, **SETTINGS[name] | {"configuration": "another"}),
        lambda: Ledger.verify(path),
        lambda: read(path),
    ]


def test_it_is_refused_and_says_why(path: Path, name: str) -> None:
    before = [Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-head")]
    for reader in readers(path, name):
        with pytest.raises(LedgerOlderError) as refusal:
            reader()
        words = str(refusal.value)
        assert not isinstance(refusal.value, LedgerCorruptError)
        assert words.startswith(f"{path} was charged by an older accounting, of ")
        assert f"(format {FORMATS[name]}): its records are intact" in words
        assert "takes no more charges" in words and "Begin a new ledger in another file" in words
        assert f"state ε = {STATED[name]!r} where this version computes" in words
        # Never less than it said itself, nor than its events are known to cost now.
        spent = float(words.split("what it has spent counts as ε = ")[1].split()[0])
        computed = float(words.split("this version computes ")[1].split(",")[0])
        assert "at δ = 1e-05" in words
        if name == "pool":
            assert spent == computed > STATED[name]
        else:  # six answers, whose charges may have lacked (2α-1)/(α-1) η, and 1e-11 of 0.3
            lacking = 6 * 7 / 3 * (1.6e-11 + 5 * 2.0**-52)
            assert STATED[name] + lacking < spent < STATED[name] + lacking + 2e-11
            assert STATED[name] > computed
    assert before == [Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-head")]


def test_the_command_shows_its_records_all_the_same(
    path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "export", str(path)]) == 2
    output = capsys.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    assert [line["sequence"] for line in lines[1:]] == [1, 2, 3]
    assert lines[-1]["totals"]["epsilon"] == STATED[name]
    for action in ("show", "verify"):
        assert main(["ledger", action, str(path)]) == 2
        again = capsys.readouterr()
        assert again.err == output.err and again.out == ""
    assert len(output.err.splitlines()) == 1


def test_a_charge_that_was_lost_is_told_first(path: Path, name: str) -> None:
    """What it says that it has spent is of all its charges."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        query = "SELECT sql FROM sqlite_master WHERE name = 'no_delete_of_record'"
        (trigger,) = database.execute(query).fetchone()
        database.execute("DROP TRIGGER no_delete_of_record")
        database.execute("DELETE FROM record WHERE sequence = 3")
        database.execute(trigger)
    for reader in readers(path, name):
        with pytest.raises(LedgerCorruptError, match="must hold 3 charges, as its head says"):
            reader()


def test_an_altered_total_is_no_older_one(path: Path, name: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        query = "SELECT sql FROM sqlite_master WHERE name = 'no_update_of_record'"
        (trigger,) = database.execute(query).fetchone()
        database.execute("DROP TRIGGER no_update_of_record")
        database.execute(
            "UPDATE record SET totals = replace(totals, '\"epsilon\":', '\"epsilon\":1')"
        )
        database.execute(trigger)
    for reader in readers(path, name):
        with pytest.raises(LedgerCorruptError, match="record 1 was altered: its hash does not fit"):
            reader()


def charged(
    path: Path, name: str, version: int, wrong: Callable[[Accountant], dict[str, Any]]
) -> Path:
    """A whole chain of that format whose totals are others."""
    fresh, right = records.Description.fresh, records.totals_of

    def older(*arguments: Any) -> records.Description:
        return replace(fresh(*arguments), format_version=version)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(records.Description, "fresh", staticmethod(older))
        patched.setattr(records, "totals_of", lambda found: right(found) | wrong(found))
        with Ledger.open(path, **SETTINGS[name]) as ledger:
            for _ in range(2):
                ledger.charge(_events(ledger, name))
    return path


def _events(ledger: Ledger, name: str) -> Any:
    if name == "pool":
        return BoundedRangeAnswer(1000.0, -0.25, 0.5, 8192, 2)
    spent = ledger.accountant.individual_spent
    ledger.attach(PerModelFilter(5, BUDGET, spent=spent))
    return IndividualCharge("renyi", 4.0, np.full((5, 1), 0.01))


def _formerly(name: str) -> Callable[[Accountant], dict[str, Any]]:
    if name == "filter":
        return lambda _: {"epsilon": totals._with_drawing(BUDGET, "zero_out")}
    return lambda found: {"epsilon": found.epsilon("replace_one").epsilon}


@pytest.mark.parametrize("version", [1, 2])
def test_totals_of_before_are_known_by_their_value(name: str, tmp_path: Path, version: int) -> None:
    path = charged(tmp_path / "ledger.db", name, version, _formerly(name))
    with pytest.raises(LedgerOlderError, match=rf"\(format {version}\)"):
        Ledger.verify(path)


@pytest.mark.parametrize(
    ("version", "wrong"),
    [
        (3, None),  # that accounting was over
        (1, lambda found: {"epsilon": totals.totals_of(found)["epsilon"] + 1e-6}),
        (1, lambda found: {"epsilon": 0.0}),
        (1, lambda found: {"epsilon": None}),
        (1, lambda found: {"epsilon": "inf"}),
        (2, lambda found: {"epsilon": 1e9}),
        (1, lambda found: {"epsilon": [1]}),
        (1, lambda found: {"epsilon": True}),
        (1, lambda found: {"epsilon": 1}),
    ],
)
def test_other_totals_are_damage(name: str, tmp_path: Path, version: int, wrong: Any) -> None:
    path = charged(tmp_path / "ledger.db", name, version, wrong or _formerly(name))
    with pytest.raises(LedgerCorruptError, match="totals after record 1 must be those recorded"):
        Ledger.verify(path)


@pytest.mark.parametrize("field", [{"queries": 99}, {"kind": "public"}])
def test_an_older_total_of_other_answers_is_damage(
    name: str, tmp_path: Path, field: dict[str, Any]
) -> None:
    path = charged(tmp_path / "ledger.db", name, 1, lambda found: _formerly(name)(found) | field)
    with pytest.raises(LedgerCorruptError, match="totals after record 1 must be those recorded"):
        Ledger.verify(path)


def test_the_older_epsilon_is_the_larger_one() -> None:
    """Of a filter: what was taken off δ is never given back."""
    for budget in (BUDGET, FilterBudget("zcdp", 0.05, 1e-6), FilterBudget("renyi", 2.0, 1e-3, 9.0)):
        for adjacency in ("zero_out", "replace_one"):
            assert totals._with_drawing(budget, adjacency) > budget.epsilon(adjacency)
    assert totals._with_drawing(replace(BUDGET, delta=1e-300), "zero_out") == math.inf


@pytest.mark.parametrize("zero", [0, False, "0.0"])
def test_an_epsilon_of_another_type_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: object
) -> None:
    path, right = tmp_path / "ledger.db", records.totals_of
    monkeypatch.setattr(records, "totals_of", lambda found: right(found) | {"epsilon": zero})
    with Ledger.open(path, delta=1e-5, configuration="public") as ledger:
        ledger.charge(PublicAnswer(1))
    with pytest.raises(LedgerCorruptError, match="totals after record 1 must be those recorded"):
        Ledger.verify(path)
