"""The decoding loop and the command line with a ledger: on the device, then released."""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding_cases import MECHANISMS, PROMPT, Spy
from fake_ensemble import FakeEnsemble
from trained_demo import DEMO_ENSEMBLE

from adapmixed.charging import BudgetSpentError
from adapmixed.cli import main
from adapmixed.data.demo import demo_base
from adapmixed.decoding import generate, stream
from adapmixed.mechanisms import (
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Shaped,
)
from adapmixed.privacy import Accountant, FilterBudget, Ledger, PerModelFilter
from adapmixed.privacy.ledger import LedgerWriteError
from adapmixed.privacy.ledger import head as heads
from adapmixed.rng import SecureRandom, SeededRandom

pytestmark = pytest.mark.usefixtures("demo_ensemble")

MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
SETTINGS: dict[str, Any] = dict(delta=1e-5, configuration="test")
SHORT = ["--prompt", "The try statement", "--max-new-tokens", "3"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.mark.parametrize("name", list(MECHANISMS))
def test_every_token_is_on_the_device_before_it_is_drawn(path: Path, name: str) -> None:
    spy, accountant = Spy(MECHANISMS[name]), Accountant(1e-5)
    with Ledger.open(path, **SETTINGS) as ledger:
        write = ledger._head.write

        def logged(head: Any) -> None:
            write(head)
            spy.log.append(("durable", head.count))

        ledger._head.write = logged  # type: ignore[method-assign]
        steps = stream(
            FakeEnsemble(),  # type: ignore[arg-type]
            spy,
            PROMPT,
            max_new_tokens=3,
            rng=SecureRandom(),
            accountant=accountant,
            ledger=ledger,
        )
        for number, _ in enumerate(steps, start=1):
            phases = [phase for phase, _ in spy.log]
            assert phases == ["propose", "events", "durable", "release"] * number
            assert Ledger.verify(path).charges == number
        assert ledger.totals == accountant.epsilon()
        assert ledger.totals.queries == 3 * len(PROMPT)


def test_a_charge_that_fails_releases_nothing(path: Path, monkeypatch: Any) -> None:
    spy = Spy(MECHANISMS["adapmixed"])
    with Ledger.open(path, **SETTINGS) as ledger:
        settings: Any = dict(max_new_tokens=3, rng=SecureRandom(), accountant=Accountant(1e-5))
        steps = stream(FakeEnsemble(), spy, PROMPT, ledger=ledger, **settings)  # type: ignore[arg-type]
        next(steps)

        def fail(*arguments: object) -> None:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(heads, "flush", fail)
        with pytest.raises(LedgerWriteError):
            next(steps)
        assert [phase for phase, _ in spy.log].count("release") == 1
        assert next(steps, None) is None


@pytest.mark.parametrize("rng", [SeededRandom(3), SimpleNamespace(reserve=SeededRandom(3).reserve)])
def test_a_seeded_source_is_never_charged_for(path: Path, rng: Any) -> None:
    with Ledger.open(path, **SETTINGS) as ledger:
        settings: Any = dict(max_new_tokens=3, rng=rng, accountant=Accountant(1e-5), ledger=ledger)
        with pytest.raises(ValueError, match=r"rng must be SecureRandom\(\) where a ledger"):
            generate(FakeEnsemble(), PublicOnly(), PROMPT, **settings)  # type: ignore[arg-type]
        assert ledger.charges == 0


def test_generate_charges_one_ledger_across_runs(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", *MODELS, *SHORT, "--ledger", str(path), "--order", "6"]
    assert main(arguments) == 0
    first = capsys.readouterr()
    assert f"Ledger {path}: 0 charges so far." in first.err
    charges = Ledger.verify(path).charges
    assert 1 <= charges <= 3 and f"Ledger {path}: {charges} charges." in first.err
    assert "ε" not in first.err and "for the operator alone" in first.err
    assert main([*arguments[:-2], "--operator", *arguments[-2:]]) == 0
    second = capsys.readouterr().err
    assert f"{charges} charges so far" in second and "charges: ε = " in second
    assert Ledger.verify(path).charges > charges
    assert main([*arguments[:-1], "7"]) == 2
    error = capsys.readouterr().err
    assert "configuration must be what the ledger was created with" in error
    assert len(error.strip().splitlines()) == 1


def test_generate_refuses_a_seed_with_a_ledger(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", *MODELS, *SHORT, "--ledger", str(path), "--seed", "4"]
    assert main(arguments) == 2
    assert "--seed cannot be used with --ledger, got 4" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    "mechanism",
    [
        PMixED(8.0, 1e-5, 7, 6.0),
        ClippedLogPool(-0.25, 0.5, queries=7),
        ClippedMixing(0.5, 2.0, queries=7),
        Shaped(ClippedLogPool(-0.25, 0.5, queries=7), temperature=0.5),
    ],
)
def test_what_exceeds_the_rest_of_a_budget_is_refused_at_the_call(
    path: Path, mechanism: Mechanism
) -> None:
    """Whether accountant or ledger knows what is spent; before anything is read or charged."""
    words = "budget of 7 that .* was planned for, 6 of which are spent, got up to 2 more .*early"
    ensemble, spent = FakeEnsemble(), Accountant(1e-5)
    with Ledger.open(path, **SETTINGS) as ledger:
        settings: Any = dict(max_new_tokens=2, rng=SecureRandom(), ledger=ledger)
        generate(ensemble, mechanism, PROMPT, accountant=spent, **settings)  # type: ignore[arg-type]
        read = len(ensemble.decoders)
        for accountant, charged in ((spent, None), (Accountant(1e-5), ledger)):
            settings |= {"accountant": accountant, "ledger": charged}
            with pytest.raises(BudgetSpentError, match=words):
                stream(ensemble, mechanism, PROMPT[:1], **settings)  # type: ignore[arg-type]
        assert (ledger.charges, ledger.totals.queries) == (2, 6)
        assert len(ensemble.decoders) == read
        generate(ensemble, mechanism, PROMPT[:1], **(settings | {"max_new_tokens": 1}))  # type: ignore[arg-type]
        assert ledger.totals.queries == 7


def test_generate_and_chat_refuse_what_a_budget_has_no_room_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, with status 2; what chat released before is on its output.

    An answer may end after one token, so that ten are asked for: 8 are spent before that.
    """
    pool = ["--mechanism", "clipped-log-pool", "--lower=-0.5", "--upper=0.5"]
    common = [*MODELS, *pool, "--budget-queries", "8", "--ledger", str(path)]
    monkeypatch.setattr("sys.stdin", io.StringIO("The value\nIf the name\n" * 5))
    assert main(["chat", *common, "--plain", "--max-new-tokens", "3"]) == 2
    out = capsys.readouterr()
    spent = Ledger.verify(path).totals.queries
    assert 6 <= spent <= 8 and len(out.out.splitlines()) >= 2  # 3 more would be too many
    assert f"budget of 8 that clipped-log-pool was planned for, {spent} of which" in out.err
    assert (
        main(["generate", *common, "--prompt", "a", "--prompt", "b", "--max-new-tokens", "4"]) == 2
    )
    out = capsys.readouterr()
    assert out.out == "" and f"{spent} of which are spent, got up to 8 more" in out.err
    assert Ledger.verify(path).totals.queries == spent


@pytest.fixture
def charged(path: Path) -> Path:
    with Ledger.open(path, **SETTINGS) as ledger:
        settings: Any = dict(rng=SecureRandom(), accountant=Accountant(1e-5), ledger=ledger)
        mechanism = MECHANISMS["adapmixed"]
        generate(FakeEnsemble(), mechanism, PROMPT, max_new_tokens=4, **settings)  # type: ignore[arg-type]
    return path


def test_show_and_verify(charged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reading = Ledger.verify(charged)
    assert main(["ledger", "show", str(charged)]) == 0
    shown = capsys.readouterr().out
    assert f"guarantee: {reading.totals}" in shown and "charges: 4\n" in shown
    assert main(["ledger", "show", str(charged), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["epsilon"] == reading.totals.epsilon and facts["queries"] == 12
    assert facts["configuration"] == "test" and facts["guarantee"] == str(reading.totals)
    assert main(["ledger", "verify", str(charged)]) == 0
    shown = capsys.readouterr().out
    assert "intact: yes" in shown and reading.hash.hex() in shown and "guarantee" not in shown
    assert main(["ledger", "verify", str(charged), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["charges"], facts["warning"]) == (4, None) and "warning" not in shown


def test_verify_and_show_tell_of_a_slot_that_is_not_whole(
    charged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = charged.with_name("ledger.db-head")
    content = bytearray(head.read_bytes())
    content[30] ^= 1  # charge 4 is in the first slot
    head.write_bytes(content)
    for action in ("verify", "show"):
        assert main(["ledger", action, str(charged)]) == 0
        shown = capsys.readouterr().out
        assert f"warning: {Ledger.verify(charged).warning}\n" in shown
        assert main(["ledger", action, str(charged), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["warning"] == Ledger.verify(charged).warning


def test_export(charged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "export", str(charged)]) == 0
    first, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["ledger"]["configuration"] == "test" and first["ledger"]["delta"] == 1e-5
    assert [line["sequence"] for line in lines] == [1, 2, 3, 4]
    kinds = [event["event"] for event in lines[0]["events"]]
    assert kinds == ["GaussianScreening", "LeaveOneOutLoss", "PublicAnswer"]
    assert torch.tensor(lines[0]["events"][1]["loss"]).shape[0] == 3
    assert lines[-1]["totals"]["epsilon"] == Ledger.verify(charged).totals.epsilon
    assert lines[-1]["hash"] == Ledger.verify(charged).hash.hex()


def test_an_empty_ledger_is_shown_and_exported(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger.open(path, **SETTINGS).close()
    for action, words in (("show", "ε = 0, δ = 0"), ("export", '"configuration":"test"')):
        assert main(["ledger", action, str(path)]) == 0
        assert words in capsys.readouterr().out


@pytest.mark.parametrize("action", ["show", "verify", "export"])
def test_what_is_not_intact_has_status_2(
    charged: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    head = charged.with_name("ledger.db-head")
    content = head.read_bytes()
    head.unlink()
    assert main(["ledger", action, str(charged)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("adapmixed ledger: ") and len(error.strip().splitlines()) == 1
    assert "must lie beside its database" in error
    head.write_bytes(content)
    assert main(["ledger", action, str(charged.with_name("none.db"))]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_a_filter_beside_a_ledger(path: Path) -> None:
    budget = FilterBudget("zcdp", 0.1, 1e-5)
    arguments: dict[str, Any] = dict(max_new_tokens=40, rng=SecureRandom())
    ensemble: Any = FakeEnsemble()
    models = ensemble.num_models

    def answer(
        mechanism: Any, ledger: Ledger, budget: FilterBudget = budget, **options: Any
    ) -> PerModelFilter:
        model_filter = PerModelFilter(models, budget, **options)
        accountant = Accountant(1e-5, filter_budget=budget)
        tokens = generate(
            ensemble, mechanism, PROMPT, accountant=accountant, ledger=ledger,
            model_filter=model_filter, **arguments,
        )  # fmt: skip
        assert tokens.shape == (len(PROMPT), 40) and bool((tokens >= 0).all())
        return model_filter

    pool = ClippedLogPool(-0.5, 0.5)
    with Ledger.open(path, **SETTINGS, filter_budget=budget) as ledger:
        with pytest.raises(ValueError, match="must have the accountant's budget"):
            answer(pool, ledger, replace(budget, releases=1, sigma=100.0))
        with pytest.raises(ValueError, match="model_filter needs one charge of each model"):
            answer(PublicOnly(), ledger)
        assert ledger.charges == 0
        spent = answer(pool, ledger).spent
        # Every slot stops within its budget, and all answers went on.
        assert bool((spent <= budget.amount).all()) and spent.min() > 0.08
        assert np.array_equal(ledger.accountant.individual_spent, spent)
    with Ledger.open(path, **SETTINGS, filter_budget=budget) as ledger:
        again = ledger.accountant.individual_spent
        assert again is not None and np.array_equal(again, spent)
        assert bool((answer(pool, ledger, spent=again).spent >= spent).all())


def test_a_ledger_belongs_to_the_members_in_their_order(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Charges are those of slots: in another order one shard would pay for another."""
    folder = tmp_path / "ensemble"
    shutil.copytree(DEMO_ENSEMBLE, folder)
    models = ["--base", str(demo_base()), "--ensemble", str(folder)]
    command = ["generate", *models, *SHORT, "--ledger", str(path)]
    assert main(command) == 0
    assert main(command) == 0
    charges = Ledger.verify(path).charges
    manifest = json.loads((folder / "ensemble.json").read_text(encoding="utf-8"))
    for name in ("members", "shards"):
        manifest[name].reverse()
    (folder / "ensemble.json").write_text(json.dumps(manifest), encoding="utf-8")
    capsys.readouterr()
    assert main(command) == 2
    assert "configuration" in capsys.readouterr().err
    assert Ledger.verify(path).charges == charges


def test_a_filter_beside_a_ledger_holds_what_is_in_it(path: Path) -> None:
    budget = FilterBudget.for_epsilon(3.0, 1e-5)
    mechanism = ClippedLogPool(-0.5, 0.5)

    def serve(ledger: Ledger, model_filter: PerModelFilter) -> None:
        accountant = Accountant(1e-5, filter_budget=budget)
        settings = dict(rng=SecureRandom(), accountant=accountant, ledger=ledger)
        generate(
            FakeEnsemble(),  # type: ignore[arg-type]
            mechanism,
            PROMPT,
            max_new_tokens=2,
            model_filter=model_filter,
            **settings,
        )

    with Ledger.open(path, filter_budget=budget, **SETTINGS) as ledger:
        first = PerModelFilter(3, budget)
        serve(ledger, first)
        serve(ledger, first)
        with pytest.raises(ValueError, match="what its models have spent before"):
            serve(ledger, PerModelFilter(3, budget))
        serve(ledger, PerModelFilter(3, budget, spent=ledger.accountant.individual_spent))
        assert ledger.charges == 6
