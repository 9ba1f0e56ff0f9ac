"""``adapmixed plan``: settings that keep the budget, and saved plans that other commands take."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_demo import DEMO_ENSEMBLE, MODELS

from adapmixed.cli import main
from adapmixed.data import demo_base, held_out_text
from adapmixed.ensemble import read_manifest, write_manifest
from adapmixed.mechanisms import PMixED
from adapmixed.privacy import Accountant, Guarantee, planner, read_ledger
from adapmixed.privacy.planner import epsilon_of
from adapmixed.rng import SecureRandom

pytestmark = pytest.mark.usefixtures("demo_ensemble")
DELTA = 1e-5


def test_neither_epsilon_nor_delta_is_shown_smaller_than_it_is(capsys, monkeypatch):
    monkeypatch.setattr(planner, "plan", partial(planner.plan, shapes=(4.0,), scales=(4.0,)))
    asked = ["--epsilon=1.0000001", "--delta=1.00000449e-05", "--tokens=9", "--models=64"]
    assert main(["plan", *asked]) == 0
    printed = capsys.readouterr().out
    assert "Within ε = 1.001 at δ = 1.00000449e-05" in printed and "Warning" not in printed


def test_a_weak_answer_warns_as_its_guarantee_will(capsys):
    asked = ["--epsilon=20", "--tokens=2000", "--models=64", "--mechanism=clipped-log-pool"]
    assert main(["plan", *asked]) == 0
    (warning,) = Guarantee(20.0, DELTA, "fixed").warnings
    assert warning in capsys.readouterr().out


@pytest.mark.slow
def test_planning_loads_no_torch():
    code = (
        "import sys\nfrom adapmixed.cli import main\n"
        "main(['plan', '--epsilon', '1', '--models', '2', '--tokens', '1'])\n"
        "assert 'torch' not in sys.modules and 'dp_accounting' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.slow
def test_the_command(capsys):
    start = time.process_time()
    arguments = ["plan", "--epsilon=2", "--models=100", "--tokens=1000", "--adjacency=replace_one"]
    assert main([*arguments, "--all"]) == 0
    assert time.process_time() - start < 30
    output = capsys.readouterr().out
    assert "any change of the records in one shard" in output and "adapmixed" not in output
    (box,) = re.findall('Recommended: --mechanism "clipped-mixing (.+) queries=1000"', output)
    assert f"clipped-mixing    {box} " in output  # the box of shape 16, as the table has it
    assert "for 1000 tokens, about 10 replies of 100 tokens." in output
    kept = "With 100 shards such settings kept about 31%"
    assert kept in output and "on other text" in output and "were never" not in output
    assert "The rule: the widest box of shape log upper = 16 |log lower|" in output
    assert "Private members must not choose them" in output
    # Settings copied from the table, with four digits, keep the budget.
    rows = [line for line in output.splitlines() if line.startswith("clipped-")]
    assert len(rows) == 9
    for row in rows:
        given = dict(word.split("=") for word in row.split() if "=" in word)
        settings = {name: float(value) for name, value in given.items()}
        assert 1.98 < epsilon_of(DELTA, 100, 1000, "replace_one", **settings) <= 2.0, row
    (order,) = re.findall(r"(?m)^pmixed +order=(\S+) epsilon=2 ", output)
    ball = PMixED(2.0, DELTA, 1000, float(order), adjacency="replace_one")
    accountant = Accountant(DELTA, adjacency="replace_one")
    logits = torch.zeros(100, 1, 4)
    accountant.charge(ball.propose(logits, logits[0], rng=SecureRandom()))
    assert 1.98 < accountant.guarantee().epsilon <= 2.0
    assert all(1.98 < float(row.split()[-1]) <= 2.0 for row in rows)


def test_without_models_it_shows_what_shards_allow(capsys, monkeypatch):
    monkeypatch.setattr(planner, "SHARDS", (100, 300))
    assert main(["plan", "--epsilon=3", "--tokens=20000"]) == 0
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines() if line.startswith("clipped-mixing")]
    for row, models in zip(rows, (100, 300), strict=True):
        settings = {key: float(value) for key, value in (word.split("=") for word in row[1:3])}
        assert 2.98 < epsilon_of(DELTA, models, 20_000, "zero_out", **settings) <= 3.0
    assert [row[3:] for row in rows] == [["100", "21%"], ["300", "33%"]]


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
    plan = save("--delta", "1e-6", "--adjacency", "replace_one")
    assert (plan["delta"], plan["adjacency"]) == (1e-6, "replace_one")
    assert plan["mechanism"].endswith(" queries=4")
    assert 2.9 < plan["epsilon"] <= 3.0 and Path("plan.json").stat().st_mode & 0o777 == 0o600
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


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("generate", ["--mechanism", "public"]),
        ("chat", ["--epsilon", "3"]),
        ("serve", ["--delta", "1e-5"]),
        ("evaluate", ["--adjacency", "zero_out"]),
    ],
)
def test_what_a_plan_does_not_pay_for(
    command: str, option: list[str], save: Save, capsys: Any
) -> None:
    """Another ensemble, which one without a member is, too; options again; a spent ledger."""
    save("--tokens", "2")
    other, manifest = Path("other"), read_manifest(DEMO_ENSEMBLE)
    other.mkdir()
    first, *rest = (name for name in manifest.members if name is not None)
    for name in rest:
        (other / name).symlink_to(DEMO_ENSEMBLE / name)
    members = tuple(None if name == first else name for name in manifest.members)
    write_manifest(other, replace(manifest, members=members))

    def files() -> dict[Path, bytes | bool]:
        found = {path: path.is_file() and path.read_bytes() for path in Path().iterdir()}
        return {path: held for path, held in found.items() if "ledger-" not in path.name}

    def refused(*options: str, models: list[str] = MODELS) -> str:
        before = files()
        capsys.readouterr()
        assert run(command, *options, models=models) == 2
        assert files() == before
        (error,) = capsys.readouterr().err.splitlines()
        return str(error)

    assert f"{option[0]} must not be given with --plan" in refused(*option)
    error = refused(models=["--base", str(demo_base()), "--ensemble", "other"])
    assert "--plan must be of --ensemble other with its present members" in error
    assert "'adapmixed plan --ensemble other' plans" in error
    if command == "generate":
        assert [run(command), run(command)] == [0, 2]
        assert "queries must stay within the 2 that" in capsys.readouterr().err
        assert read_ledger("ledger").account.planned == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format_version": 1}, "format_version must be 2, got 1"),
        ({"mechanism": 5}, "mechanism must be a string, got 5"),
        ({"mechanism": "clipped-log-pool lower=0 upper=1"}, "queries of mechanism must be an int"),
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
