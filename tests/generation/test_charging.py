"""The decoding loop and the command line with a ledger: charges are durable before a release."""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from decoding_cases import MECHANISMS, PROMPT, Spy, answered, steps
from fake_ensemble import FakeEnsemble
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import main
from adapmixed.data import demo_base
from adapmixed.errors import BudgetSpentError, LedgerClosedError, LedgerWriteError
from adapmixed.generation.loop import Answerer
from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism, PMixED, PublicOnly
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy.ledger import Ledger
from adapmixed.rng import SecureRandom, SeededRandom

pytestmark = pytest.mark.usefixtures("demo_ensemble")

MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
SHORT = ["--prompt", "The try statement", "--max-new-tokens", "3"]
POOL = ["--mechanism", "clipped-log-pool lower=-0.5 upper=0.5"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_every_token_is_on_the_device_before_it_is_drawn(path: Path) -> None:
    spy = Spy(MECHANISMS["adapmixed"])
    with Accountant(1e-5, path=path) as accountant:
        ensemble: Any = FakeEnsemble()
        answerer = Answerer(ensemble, spy, accountant, SecureRandom())
        assert read_ledger(path).charges == 1  # the binding
        ledger: Any = accountant._ledger
        write = ledger._write

        def logged(reading: Any) -> None:
            write(reading)
            spy.log.append(("durable", reading.charges))

        ledger._write = logged
        for number, _ in enumerate(answerer.stream(PROMPT, max_new_tokens=3), start=1):
            assert spy.phases == ["propose", "events", "durable", "release"] * number
            assert read_ledger(path).charges == number + 1
        assert read_ledger(path).guarantee == accountant.guarantee()
        assert accountant.queries == 3 * len(PROMPT)


def test_a_charge_that_fails_releases_nothing(path: Path, monkeypatch: Any) -> None:
    spy, ensemble = Spy(MECHANISMS["adapmixed"]), FakeEnsemble()
    with Accountant(1e-5, path=path) as accountant:
        settings: Any = dict(accountant=accountant, rng=SecureRandom())
        stepwise = steps(ensemble, spy, max_new_tokens=3, **settings)
        next(stepwise)

        def fail(*arguments: object) -> None:
            raise LedgerWriteError(28, os.strerror(28))

        monkeypatch.setattr(Ledger, "_write", fail)
        with pytest.raises(LedgerWriteError):
            next(stepwise)
        assert spy.phases.count("release") == 1 and spy.phases[-1] == "fail"
        assert next(stepwise, None) is None
        # It is not known what is on the device, so this accountant charges no more.
        monkeypatch.undo()
        with pytest.raises(LedgerClosedError):
            next(steps(ensemble, spy, **settings))
        assert spy.phases.count("release") == 1


@pytest.mark.parametrize("rng", [SeededRandom(3), SimpleNamespace(reserve=SeededRandom(3).reserve)])
def test_a_seeded_source_is_never_charged_for(path: Path, rng: Any) -> None:
    with Accountant(1e-5, path=path) as accountant:
        with pytest.raises(
            ValueError, match=r"rng must be SecureRandom\(\) if charges go to a led"
        ):
            answered(FakeEnsemble(), PublicOnly(), rng=rng, accountant=accountant)
        assert accountant.charges == 0


@pytest.mark.slow
def test_generate_charges_one_ledger_across_runs(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", *MODELS, *SHORT, "--ledger", str(path)]
    six = ["--mechanism", "adapmixed order=6"]
    assert main([*arguments, *six]) == 0
    first = capsys.readouterr()
    assert f"Ledger {path} is new." in first.err
    charges = read_ledger(path).charges
    assert 2 <= charges <= 4 and f"The ledger holds {charges} records;" in first.err
    assert "ε = " not in first.err and "for the operator alone" in first.err
    assert main([*arguments, *six, "--operator"]) == 0
    second = capsys.readouterr().err
    assert f"{charges} records so far" in second and "ε = " in second
    charges = read_ledger(path).charges
    assert main([*arguments, "--mechanism", "adapmixed order=7"]) == 2
    error = capsys.readouterr().err
    assert "accountant must be charged for what it is bound to" in error
    assert "order=6.0" in error and "order=7.0" in error
    assert main([*arguments, *six, "--delta", "1e-6"]) == 2
    assert "--delta must be what the ledger was created with" in capsys.readouterr().err
    assert read_ledger(path).charges == charges


def test_generate_refuses_a_seed_with_a_ledger(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", *MODELS, *SHORT, "--ledger", str(path), "--seed", "4", *POOL]
    assert main(arguments) == 2
    assert "--seed cannot be used with --ledger, got 4" in capsys.readouterr().err
    assert not path.exists()


def test_no_ledger_is_created_for_what_cannot_be_charged(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", *MODELS, *SHORT, "--ledger", str(path)]
    assert main([*arguments, "--epsilon", "2", "--mechanism", "adapmixed"]) == 2
    assert "--epsilon must be None for AdaPMixED" in capsys.readouterr().err
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    "mechanism",
    [
        PMixED(8.0, 1e-5, 7, 6.0),
        ClippedLogPool(-0.25, 0.5, queries=7),
        ClippedMixing(0.5, 2.0, queries=7),
    ],
)
def test_what_exceeds_the_rest_of_a_budget_is_refused_at_the_call(
    path: Path, mechanism: Mechanism
) -> None:
    """The error comes before anything is read or charged, with and without a ledger."""
    words = (
        "within the 7 that .* was planned for, 6 of which are spent, got up to 2 more with 1 left: "
        r"ask for fewer \(evaluate: --queries, else --max-new-tokens"
    )
    for place in (None, path):
        ensemble = FakeEnsemble()
        settings: dict[str, Any] = {"rng": SecureRandom(), "temperature": 0.5, "top_k": 4}
        with Accountant(1e-5, path=place) as accountant:
            settings["accountant"] = accountant
            answered(ensemble, mechanism, max_new_tokens=2, **settings)
        if place is not None:
            accountant = settings["accountant"] = Accountant(1e-5, path=place)
        read, charges = len(ensemble.decoders), accountant.charges
        with pytest.raises(BudgetSpentError, match=words):
            steps(ensemble, mechanism, PROMPT[:1], max_new_tokens=2, **settings)
        assert (accountant.charges, accountant.queries) == (charges, 6)
        assert len(ensemble.decoders) == read
        answered(ensemble, mechanism, PROMPT[:1], max_new_tokens=1, **settings)
        assert accountant.queries == 7
        accountant.close()


@pytest.mark.slow
def test_generate_and_chat_refuse_what_a_budget_has_no_room_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is one line with status 2. The output holds what chat released before.

    An answer may end after one token, so ten answers are asked for; 8 queries are spent before.
    """
    common = [*MODELS, "--mechanism", f"{POOL[1]} queries=8", "--ledger", str(path)]
    monkeypatch.setattr("sys.stdin", io.StringIO("The value\nIf the name\n" * 5))
    assert main(["chat", *common, "--plain", "--max-new-tokens", "3"]) == 2
    out = capsys.readouterr()
    spent = read_ledger(path).guarantee.queries
    assert 6 <= spent <= 8 and len(out.out.splitlines()) >= 2  # 3 more would be too many
    assert f"within the 8 that the mechanism was planned for, {spent} of which" in out.err
    assert (
        main(["generate", *common, "--prompt", "a", "--prompt", "b", "--max-new-tokens", "4"]) == 2
    )
    out = capsys.readouterr()
    assert out.out == "" and f"{spent} of which are spent, got up to 8 more with" in out.err
    assert read_ledger(path).guarantee.queries == spent


@pytest.fixture
def charged(path: Path) -> Path:
    with Accountant(1e-5, path=path) as accountant:
        settings: Any = dict(accountant=accountant, rng=SecureRandom())
        answered(FakeEnsemble(), MECHANISMS["adapmixed"], **settings)
    return path


def test_show_and_verify(charged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reading = read_ledger(charged)
    assert main(["ledger", "show", str(charged)]) == 0
    shown = capsys.readouterr().out
    assert f"guarantee: {reading.guarantee}" in shown and "charges: 5\n" in shown
    assert main(["ledger", "show", str(charged), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["epsilon"] == reading.guarantee.epsilon and facts["queries"] == 12
    assert facts["mechanism"] == repr(MECHANISMS["adapmixed"]) and facts["shard_budget"] is None
    assert facts["guarantee"] == str(reading.guarantee)
    assert main(["ledger", "verify", str(charged)]) == 0
    shown = capsys.readouterr().out
    assert "intact: yes" in shown and reading.digest in shown and "guarantee" not in shown
    assert main(["ledger", "verify", str(charged), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["charges"] == 5


def test_export(charged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "export", str(charged)]) == 0
    first, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    settings = first["ledger"]["settings"]
    assert Accountant(1e-5).state()["settings"] == settings
    assert [line["sequence"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["binding"]["mechanism"] == repr(MECHANISMS["adapmixed"])
    kinds = [event["event"] for event in lines[1]["events"]]
    assert kinds == ["GaussianScreening", "LeaveOneOutLoss", "PublicAnswer"]
    assert lines[1]["events"][1]["loss"]["shape"][0] == 3  # of every member
    assert lines[-1]["hash"] == read_ledger(charged).digest


def test_an_empty_ledger_is_shown_and_exported(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Accountant(1e-5, path=path).close()
    for action, words in (("show", "ε = 0, δ = 0"), ("export", '"format_version":11')):
        assert main(["ledger", action, str(path)]) == 0
        assert words in capsys.readouterr().out


@pytest.mark.parametrize("action", ["show", "verify", "export"])
def test_what_is_not_intact_has_status_2(
    charged: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    other = sqlite3.connect(charged, isolation_level=None)
    other.execute("UPDATE totals SET hash = zeroblob(32)")
    other.close()
    assert main(["ledger", action, str(charged)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("adapmixed ledger: ") and output.out == ""
    assert len(output.err.strip().splitlines()) == 1
    assert "the totals do not fit" in output.err
    assert main(["ledger", action, str(charged.with_name("none.db"))]) == 2
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_ledger_belongs_to_the_members_in_their_order(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Charges belong to members: in another order, one shard would pay for another."""
    folder = tmp_path / "ensemble"
    shutil.copytree(DEMO_ENSEMBLE, folder)
    models = ["--base", str(demo_base()), "--ensemble", str(folder)]
    command = ["generate", *models, *SHORT, *POOL, "--epsilon", "3", "--ledger", str(path)]
    assert main(command) == 0
    assert main(command) == 0
    charges = read_ledger(path).charges
    manifest = json.loads((folder / "ensemble.json").read_text(encoding="utf-8"))
    for name in ("members", "shards"):
        manifest[name].reverse()
    (folder / "ensemble.json").write_text(json.dumps(manifest), encoding="utf-8")
    capsys.readouterr()
    assert main(command) == 2
    output = capsys.readouterr()
    assert "accountant must be charged for what it is bound to" in output.err
    assert "got another ensemble: " in output.err and output.out == ""
    assert read_ledger(path).charges == charges
