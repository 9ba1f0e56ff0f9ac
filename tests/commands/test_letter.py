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
from adapmixed.privacy.ledger.register import together

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
        factor = float(re.findall(r"e\^ε = ([\d.]+) times", letter)[0])
        sure = float(re.findall(r"at most ([\d.]+) % sure", letter)[0])
        assert math.exp(epsilon) <= factor < 1.01 * math.exp(epsilon)
        assert 0 <= sure - 100 / (1 + math.exp(-epsilon)) < 0.1
        for words in ("64 private models", "one whole shard", "at most 1 in 100 000", "emptied"):
            assert words in letter
        assert found.words in letter and ("so far:" in letter) == (name == "b.db")
    assert f"{Path('b.db').resolve()} is one of 2 ledgers" in caplog.text


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
