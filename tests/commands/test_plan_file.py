"""A saved plan: what it holds, how commands take it, and whose tokens it pays for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import main
from adapmixed.data import demo_base, held_out_text
from adapmixed.ensemble import read_manifest, write_manifest
from adapmixed.privacy import read_ledger

pytestmark = pytest.mark.usefixtures("demo_ensemble")

MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
COMMANDS = {
    "generate": ["--prompt", "The", "--max-new-tokens", "2", "--ledger", "ledger"],
    "chat": ["--plain", "--ledger", "ledger"],
    "serve": ["--port", "0", "--ledger", "ledger"],
    "evaluate": ["--text", "text.txt", "--queries", "4"],
}
Save = Callable[..., dict[str, Any]]


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Save:
    """Save a plan as plan.json in the working folder, which is new, and return its entries."""
    monkeypatch.chdir(tmp_path)

    def saved(*options: str) -> dict[str, Any]:
        asked = ["plan", "--ensemble", str(DEMO_ENSEMBLE), "--epsilon", "3", "--tokens", "4"]
        assert main([*asked, "--save", "plan.json", *options]) == 0
        assert "Wrote plan.json, which is private" in capsys.readouterr().out
        found: dict[str, Any] = json.loads(Path("plan.json").read_text(encoding="utf-8"))
        return found

    return saved


def run(command: str, *options: str, models: list[str] = MODELS) -> int:
    return main([command, *models, "--plan", "plan.json", *COMMANDS[command], *options])


def test_commands_charge_what_was_planned(save: Save, capsys: Any) -> None:
    plan = save("--delta", "1e-6", "--adjacency", "replace_one", "--periods", "2")
    assert (plan["tokens"], plan["delta"], plan["adjacency"]) == (4, 1e-6, "replace_one")
    assert 1.5 < plan["epsilon"] < 2.9 and Path("plan.json").stat().st_mode & 0o777 == 0o600
    for spent in (2, 4):
        assert run("generate") == 0
        reading = read_ledger("ledger")
        assert reading.account.planned == spent
    binding, stated = reading.account.binding, reading.guarantee
    assert binding is not None and binding.ensemble == plan["ensemble"]
    assert stated.epsilon is not None and stated.adjacency == "replace_one"
    assert 0.999 * plan["epsilon"] <= stated.epsilon <= plan["epsilon"] and stated.delta == 1e-6
    Path("text.txt").write_text("\n\n".join(held_out_text()[:2]), encoding="utf-8")
    capsys.readouterr()
    assert run("evaluate") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert str(stated) in shown and "Private members must not choose them" in shown


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_a_spent_plan_says_what_to_do(command: str, save: Save, capsys: Any) -> None:
    save("--tokens", "2")
    assert run("generate") == 0
    before, files = Path("ledger").read_bytes(), sorted(Path().iterdir())
    capsys.readouterr()
    assert run(command) == 2
    error = capsys.readouterr().err
    assert "--plan must have tokens left, but all 2 of plan.json are spent in --ledger" in error
    assert "a new plan needs a new ledger" in error and len(error.splitlines()) == 1
    assert Path("ledger").read_bytes() == before and sorted(Path().iterdir()) == files


@pytest.mark.parametrize("command", COMMANDS)
def test_a_plan_of_another_ensemble_is_refused(command: str, save: Save, capsys: Any) -> None:
    """A member that left makes another ensemble, as for a ledger."""
    save()
    other, manifest = Path("other"), read_manifest(DEMO_ENSEMBLE)
    other.mkdir()
    first, *rest = (name for name in manifest.members if name is not None)
    for name in rest:
        (other / name).symlink_to(DEMO_ENSEMBLE / name)
    members = tuple(None if name == first else name for name in manifest.members)
    write_manifest(other, replace(manifest, members=members))
    files = sorted(Path().iterdir())
    assert run(command, models=["--base", str(demo_base()), "--ensemble", "other"]) == 2
    error = capsys.readouterr().err
    assert "--plan must be of --ensemble other with its present members" in error
    assert "'adapmixed plan --ensemble other' plans" in error and len(error.splitlines()) == 1
    assert sorted(Path().iterdir()) == files


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("generate", ["--mechanism", "public"]),
        ("chat", ["--epsilon", "3"]),
        ("serve", ["--delta", "1e-5"]),
        ("evaluate", ["--adjacency", "zero_out"]),
    ],
)
def test_what_the_plan_has_is_not_given_again(
    command: str, given: list[str], save: Save, capsys: Any
) -> None:
    save()
    assert run(command, *given) == 2
    assert f"{given[0]} must not be given with --plan" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "report"}, "it has format_version 1 and kind 'report'"),
        ({"tokens": 5}, "tokens must be queries= of mechanism, got 5"),
        ({"mechanism": "clipped-mixing lower=2 upper=3 queries=4"}, "lower"),
        ({"delta": 0.5}, "delta must be <= 0.1, got 0.5"),
    ],
)
def test_a_changed_plan_is_refused(
    changes: dict[str, Any], why: str, save: Save, capsys: Any
) -> None:
    plan = save("--mechanism", "clipped-log-pool")
    assert plan["mechanism"].startswith("clipped-log-pool scale=2 lower=0 upper=")
    Path("plan.json").write_text(json.dumps(plan | changes), encoding="utf-8")
    assert run("generate") == 2
    error = capsys.readouterr().err
    assert "--plan must name a file that 'adapmixed plan --save' wrote, got plan.json" in error
    assert why in error and not Path("ledger").exists()
