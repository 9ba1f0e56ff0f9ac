"""Several ledgers of one ensemble on the command line, and the letter for a privacy officer."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from trained_demo import DEMO_ENSEMBLE, link_ensemble

from adapmixed.cli import main
from adapmixed.data.demo import demo_base
from adapmixed.privacy.ledger.register import register_of, together
from adapmixed.serving.listener import Listener

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
        assert found.words in capsys.readouterr().err
        assert main(["ledger", "show", "a.db", "--all"]) == 0
        shown = capsys.readouterr().out
        assert all(str(one.guarantee) in shown for one in found.readings)
        assert (found.words or "There is one ledger") in shown
        assert main(["ledger", "letter", name]) == 0
        letter, epsilon = capsys.readouterr().out, found.epsilon or 0.0
        factor, (sure,) = factor_of(letter), map(float, re.findall(r"at most (.+) % sure", letter))
        assert math.exp(epsilon) <= factor < 1.01 * math.exp(epsilon)
        assert 0 <= sure - 100 / (1 + math.exp(-epsilon)) < 0.1
        for words in ("At most 64 private", "1 in 100 000", "in every period", "shares its shard"):
            assert words in letter
        assert letter.count("(replace-one) is covered with") == (2 if name == "b.db" else 1)
        assert found.words in letter and ("so far:" in letter) == (name == "b.db")
    assert f"{Path('b.db').resolve()} is one of 2 ledgers" in caplog.text


def test_a_weak_sum_and_a_lost_ledger(ensemble: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The factor was written as 8.06E+3, and no warning was there."""
    for name, tokens, weak in (("a.db", 6000, False), ("b.db", 6001, True), ("b.db", 0, True)):
        generate(ensemble, name, f"{POOL} queries={tokens}") if tokens else Path(name).unlink()
        capsys.readouterr()
        assert main(["ledger", "letter", "a.db"]) == 0
        letter, epsilon = capsys.readouterr().out, together(ensemble).epsilon or 0.0
        assert math.exp(6.9) < math.exp(epsilon) <= factor_of(letter) < 1.01 * math.exp(epsilon)
        assert ("a weak guarantee" in letter) == weak == ("was found unmet" not in letter)
    assert f"so counted in full: {Path('b.db').resolve()} (lost or moved)." in letter
    generate(ensemble, "c.db", f"{POOL} queries=none"), Path("c.db").unlink(), capsys.readouterr()
    assert main(["ledger", "letter", "a.db"]) == 2
    assert "'adapmixed ledger show --all' shows them; put lost ones" in capsys.readouterr().err


def test_before_the_first_charge(
    ensemble: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused command leaves no ledger, and a server's sum says what it does not count."""
    with pytest.raises(AssertionError):
        generate(ensemble, "a.db", f"{POOL} queries=8", "--max-new-tokens", "9")
    assert "Ledger a.db was removed: nothing was charged." in capsys.readouterr().err
    assert not Path("a.db").exists() and not register_of(ensemble).exists()
    monkeypatch.setattr(Listener, "run", lambda self, sockets: self._ready())
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
    alone = capsys.readouterr().out
    generate(ensemble, "b.db", f"{POOL} queries=500")
    capsys.readouterr()
    assert main(["ledger", "letter", "a.db"]) == 0
    both = capsys.readouterr().out
    assert "any other text in one shard" in alone and "any other text in one shard" not in both
    assert "one shard emptied" in both and "zero-out)." in both
    assert together(ensemble).adjacency == "zero_out"


def test_a_unit_and_what_no_letter_is_about(
    ensemble: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(ensemble, "a.db", POOL, "--epsilon", "3", "--adjacency", "replace_one")
    with monkeypatch.context() as patched:
        unit = SimpleNamespace(unit="user")
        patched.setattr("adapmixed.ensemble.manifest.read_manifest", lambda folder: unit)
        assert main(["ledger", "letter", "a.db", "--ensemble", str(ensemble)]) == 0
    letter = capsys.readouterr().out
    assert "Protected is everything of one 'user'" in letter and "any other text" in letter
    assert "That a table of so many names exists" in letter and "names in every period" in letter
    assert "e^ε = 20.1 times" in letter and "at most 95.3 % sure" in letter
    assert main(["ledger", "letter", "a.db", "--ensemble", str(DEMO_ENSEMBLE)]) == 2
    assert f"whose register has {Path('a.db').resolve()}, got {DEMO_ENSEMBLE}" in (
        capsys.readouterr().err
    )
    (ensemble.parent / "far").mkdir()
    moved = Path("a.db").rename(ensemble.parent / "far" / "a.db")
    monkeypatch.chdir("/")
    assert main(["ledger", "letter", str(moved)]) == 0  # the ensemble lies in the folder above
    generate(ensemble, str(moved.with_name("b.db")), "adapmixed")
    capsys.readouterr()
    assert main(["ledger", "letter", str(moved)]) == 2
    assert "must have an ε that is fixed in advance for a letter" in capsys.readouterr().err
