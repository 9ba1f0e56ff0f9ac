"""``adapmixed ledger``: one ledger, several of one ensemble, and the privacy officer's letter."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from decoding_cases import MECHANISMS, answered
from fake_ensemble import FakeEnsemble
from trained_demo import DEMO_ENSEMBLE, link_ensemble

from adapmixed.cli import main
from adapmixed.data import demo_base
from adapmixed.mechanisms import Origin
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy.ledger import register_of, together
from adapmixed.rng import SecureRandom
from adapmixed.serving.app import Listener

POOL = "clipped-log-pool lower=-0.25 upper=1 scale=2"


@pytest.fixture
def ensemble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_ensemble: Path) -> Path:
    """Return an ensemble with a register of its own, in the current folder."""
    monkeypatch.chdir(tmp_path)
    return link_ensemble(tmp_path / "customers")


def generate(ensemble: Path, ledger: str, mechanism: str, *more: str) -> None:
    models = ["--base", str(demo_base()), "--ensemble", str(ensemble), "--prompt", "The"]
    charged = ["--max-new-tokens", "2", "--mechanism", mechanism, "--ledger", ledger]
    assert main(["generate", *models, *charged, *more]) == 0


def factor_of(letter: str) -> float:
    """Return e^ε of a letter, which writes it in ordinary digits."""
    (written,) = re.findall(r"e\^ε = (\d{1,3}(?: \d{3})*(?:\.\d+)?) times", letter)
    return float(written.replace(" ", ""))


def test_two_ledgers_and_their_letter(
    ensemble: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name, tokens in (("a.db", 500), ("b.db", 900)):
        assert caplog.text == ""
        generate(ensemble, name, f"{POOL} queries={tokens}")
        found = together(ensemble)
        assert (found.words in capsys.readouterr().err) == (name == "b.db")
        assert main(["ledger", "show", "a.db", "--all"]) == 0
        shown = capsys.readouterr().out
        assert all(f"ledger {r.path}: {r.guarantee}\n" in shown for r in found.readings)
        assert found.words in shown
        assert main(["ledger", "letter", name]) == 0
        letter, epsilon = capsys.readouterr().out, found.stated.epsilon or 0.0
        factor, (sure,) = factor_of(letter), map(float, re.findall(r"at most (.+) % sure", letter))
        assert math.exp(epsilon) <= factor < 1.01 * math.exp(epsilon)
        assert 0 <= sure - 100 / (1 + math.exp(-epsilon)) < 0.1
        for words in ("At most 64 private", "1 in 100 000", "in every period", "shares its shard"):
            assert words in letter
        assert letter.count("(replace-one) is covered with") == (2 if name == "b.db" else 1)
        assert "and of other ensembles of the same text" in letter
        assert (found.words in letter) == ("is fixed only if" in letter) == (name == "b.db")
        assert ("none was found unmet" in letter) == (name == "a.db")
    assert f"{Path('b.db').resolve()} is one of 2 ledgers" in caplog.text
    update = ["train", "--base", str(demo_base()), "--corpus", "builtin", "--update", "--output"]
    assert main([*update, str(ensemble)]) == 2  # it has no places
    assert f"Private: {found.words}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mechanism", "condition"),
    [(f"{POOL} queries=none", "if the number of queries and the settings of each were fixed"),
     ("pmixed epsilon=8 order=12 queries=9", "- The rounding of what PMixED and AdaPMixED draw")],
)  # fmt: skip
def test_no_letter_says_that_an_open_condition_is_met(
    mechanism: str, condition: str, ensemble: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(ensemble, "a.db", mechanism)
    assert main(["ledger", "letter", "a.db"]) == 0
    letter = capsys.readouterr().out
    assert condition in letter and "found unmet" not in letter


def test_a_weak_sum_and_a_lost_ledger(ensemble: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The factor was written as 8.06E+3, and no warning was there."""
    for name, tokens, weak in (("a.db", 6000, False), ("b.db", 6001, True), ("b.db", 0, True)):
        generate(ensemble, name, f"{POOL} queries={tokens}") if tokens else Path(name).unlink()
        capsys.readouterr()
        assert main(["ledger", "letter", "a.db"]) == 0
        letter, epsilon = capsys.readouterr().out, together(ensemble).stated.epsilon or 0.0
        assert math.exp(6.9) < math.exp(epsilon) <= factor_of(letter) < 1.01 * math.exp(epsilon)
        assert ("a weak guarantee" in letter) == weak == ("was found unmet" not in letter)
    assert f"counted in full, caveats unknown: {Path('b.db').resolve()} (lost or moved)." in letter
    generate(ensemble, "c.db", f"{POOL} queries=none"), Path("c.db").unlink(), capsys.readouterr()
    assert main(["ledger", "letter", "a.db"]) == 2
    assert "'adapmixed ledger show --all' shows them; put lost ones" in capsys.readouterr().err


def test_before_the_first_charge(
    ensemble: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused command leaves no ledger, and a server's sum says what it does not count."""
    with pytest.raises(AssertionError):
        generate(ensemble, "a.db", f"{POOL} queries=8", "--max-new-tokens", "9")
    assert "Ledger a.db is new." in capsys.readouterr().err
    assert not Path("a.db").exists() and not register_of(ensemble).exists()
    monkeypatch.setattr(Listener, "run", lambda self, sockets: None)
    models = ["--base", str(demo_base()), "--ensemble", str(ensemble), "--port", "0"]
    generate(ensemble, "a.db", f"{POOL} queries=8")
    for words in ("Before the first private token of this one: All 2", "of the plan. All 2"):
        serve = ["serve", *models, "--mechanism", f"{POOL} queries=9", "--ledger", "b.db"]
        assert main(serve) == 0 and words in capsys.readouterr().err
        generate(ensemble, "b.db", f"{POOL} queries=9")


def test_the_sum_and_its_neighbours_are_of_one_kind(
    ensemble: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sum for zero-out says nothing of any other text in a shard."""
    generate(ensemble, "a.db", f"{POOL} queries=500", "--adjacency", "replace_one")
    assert main(["ledger", "letter", "a.db"]) == 0
    single = capsys.readouterr().out
    generate(ensemble, "b.db", f"{POOL} queries=500")
    capsys.readouterr()
    assert main(["ledger", "letter", "a.db"]) == 0
    both = capsys.readouterr().out
    whole = "any change of the records in one shard"
    assert f"period: {whole}" in single and f"period: {whole}" not in both
    assert "period: one shard is emptied" in both and "zero-out)." in both
    assert together(ensemble).stated.adjacency == "zero_out"


def test_a_unit_and_what_no_letter_is_about(
    ensemble: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        unit, of = SimpleNamespace(unit="user"), Origin.of
        patched.setattr(Origin, "of", lambda *given: replace(of(*given), unit="user"))
        generate(ensemble, "a.db", POOL, "--epsilon", "3", "--adjacency", "replace_one")
        patched.setattr("adapmixed.ensemble.members.read_manifest", lambda folder: unit)
        assert main(["ledger", "letter", "a.db", "--ensemble", str(ensemble)]) == 0
    letter = capsys.readouterr().out
    assert "What the answers of customers can tell about one 'user'\n" in letter
    assert "Protected is everything of one 'user'" in letter
    assert "period: any change of the records of one 'user' (replace-one)" in letter
    assert "That a table of so many names exists" in letter and "names in every period" in letter
    assert "e^ε = 20.1 times" in letter and "at most 95.3 % sure" in letter
    assert main(["ledger", "letter", "a.db", "--ensemble", str(DEMO_ENSEMBLE)]) == 2
    assert f"whose register has {Path('a.db').resolve()}, got {DEMO_ENSEMBLE}: 'adapmixed" in (
        capsys.readouterr().err
    )
    whole = register_of(ensemble).read_bytes()
    register_of(ensemble).write_bytes(whole[:-9])
    assert main(["ledger", "letter", "a.db", "--ensemble", str(ensemble)]) == 2
    assert f"got {ensemble}: {register_of(ensemble)} must be a reg" in capsys.readouterr().err
    register_of(ensemble).write_bytes(whole)
    (ensemble.parent / "far").mkdir()
    moved = Path("a.db").rename(ensemble.parent / "far" / "a.db")
    monkeypatch.chdir("/")
    assert main(["ledger", "letter", str(moved)]) == 0  # the ensemble lies in the folder above
    generate(ensemble, str(moved.with_name("b.db")), "adapmixed")
    capsys.readouterr()
    assert main(["ledger", "letter", str(moved)]) == 2
    assert "must have an ε that is fixed in advance for a letter" in capsys.readouterr().err


@pytest.fixture
def charged(tmp_path: Path) -> Path:
    path = tmp_path / "charged.db"
    with Accountant(1e-5, path=path) as accountant:
        settings: Any = dict(accountant=accountant, rng=SecureRandom())
        answered(FakeEnsemble(), MECHANISMS["adapmixed"], **settings)
    return path


def test_show_verify_and_export(charged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*action: str) -> str:
        assert main(["ledger", action[0], str(charged), *action[1:]]) == 0
        return capsys.readouterr().out

    reading, mechanism = read_ledger(charged), repr(MECHANISMS["adapmixed"])
    shown = printed("show")
    assert f"guarantee: {reading.guarantee}" in shown and "charges: 5\n" in shown
    facts = dict(line.split(": ", 1) for line in shown.splitlines()[:-2])
    assert float(facts["epsilon"]) == reading.guarantee.epsilon and facts["queries"] == "12"
    assert facts["mechanism"] == mechanism and facts["shard budget"] == "-"
    shown = printed("verify")
    assert "intact: yes\ncharges: 5\n" in shown and reading.digest in shown
    assert "guarantee" not in shown
    first, *lines = map(json.loads, printed("export").splitlines())
    assert first["ledger"]["settings"] == reading.account.settings
    assert [line["sequence"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["events"][0]["mechanism"] == mechanism
    kinds = [event["event"] for event in lines[1]["events"]]
    assert kinds == ["GaussianScreening", "LeaveOneOutLoss", "PublicAnswer"]
    assert lines[1]["events"][1]["loss"]["shape"][0] == 3  # of every member
    assert lines[-1]["hash"] == reading.digest
    charged.unlink()
    Accountant(1e-5, path=charged).close()  # nothing is charged yet
    assert "ε = 0, δ = 0" in printed("show") and '"format_version":13' in printed("export")


@pytest.mark.parametrize("action", ["show", "verify", "export"])
def test_what_is_not_intact_has_status_2(
    charged: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    with closing(sqlite3.connect(charged, isolation_level=None)) as other:
        other.execute("UPDATE totals SET hash = zeroblob(32)")
    for path, words in ((charged, "totals do not fit"), (charged.with_name("no"), "existing")):
        assert main(["ledger", action, str(path)]) == 2
        output = capsys.readouterr()
        assert output.err.startswith("adapmixed ledger: ") and output.out == ""
        assert len(output.err.strip().splitlines()) == 1 and words in output.err
