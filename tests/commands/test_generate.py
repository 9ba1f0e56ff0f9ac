"""``adapmixed generate``: prompts, budgets, ledgers, and what is for the operator."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from trained_demo import MODELS

from adapmixed.cli import main
from adapmixed.generation import PrivateGenerator

pytestmark = pytest.mark.usefixtures("demo_ensemble")
FIRST = ["--mechanism", "public", "--top-k", "1"]  # the likeliest public token, without a draw
POOL = ["--mechanism", "clipped-log-pool lower=-0.5 upper=0.5"]


def test_several_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of a batch are written before the next one."""
    file, answered, lines = tmp_path / "prompts.txt", PrivateGenerator.generate, list[str]()

    def watched(self: Any, batch: Any, **options: Any) -> Any:
        lines.extend([*capsys.readouterr().out.splitlines(), f"{len(batch)} prompts"])
        return answered(self, batch, **options)

    file.write_text("\ufeffThe\fvalue\nIf the name\n\n", encoding="utf-8")
    arguments = ["generate", *MODELS, *FIRST, "--max-new-tokens", "5"]
    with monkeypatch.context() as patched:
        patched.setattr(PrivateGenerator, "generate", watched)
        several = ["--prompt", "The try", "--prompts", str(file), "--batch", "2"]
        assert main([*arguments, *several]) == 0
    lines += capsys.readouterr().out.splitlines()
    assert [lines.pop(at) for at in (3, 0)] == ["1 prompts", "2 prompts"]
    answers = [json.loads(line) for line in lines]
    assert [a["prompt"] for a in answers] == ["The try", "The\fvalue", "If the name"]
    assert main([*arguments, "--prompt", "If the name"]) == 0
    answer = capsys.readouterr().out
    assert answer == answers[2]["text"] + "\n"
    for cold in ([*POOL, "--top-k", "1"], [*FIRST[:2], "--temperature", "0.01"]):
        given = ["--max-new-tokens", "5", "--prompt", "If the name"]
        assert main(["generate", *MODELS, *cold, *given]) == 0
        assert capsys.readouterr().out == answer
    assert main([*arguments, "--prompt", "If the name", "--stop", answer.strip()[:6]]) == 0
    assert answer.startswith(capsys.readouterr().out.rstrip("\n"))
    assert main(arguments) == 2
    assert "--prompt or --prompts must give at least one prompt" in capsys.readouterr().err


def test_what_depends_on_private_data_is_for_the_operator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["generate", *MODELS, "--prompt", "The", "--max-new-tokens", "2", "--seed", "1"]
    arguments += ["--mechanism", "adapmixed"]
    assert main(arguments) == 0
    plain = capsys.readouterr()
    assert "ε" not in plain.err and "2 answered queries" in plain.err
    assert "The randomness was seeded" in plain.err
    assert main([*arguments, "--operator"]) == 0
    shown = capsys.readouterr()
    assert "ε = " in shown.err and "must not be published" in shown.err
    assert shown.out == plain.out and plain.out.strip()
    assert main([*arguments, *POOL]) == 0
    assert "ε = " in capsys.readouterr().err  # fixed in advance, so public


@pytest.mark.parametrize("command", [["generate", "--prompt", "The"], ["chat", "--plain"]])
@pytest.mark.parametrize("plan", [["queries=8"], ["queries=none"], ["", "--epsilon", "2"]])
def test_a_command_goes_on_with_its_ledger(
    plan: list[str],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = tmp_path / "ledger.db"
    arguments = [*command, *MODELS, "--mechanism", f"{POOL[1]} {plan[0]}", *plan[1:]]
    arguments += ["--ledger", str(ledger), "--max-new-tokens"]
    for more, words in ((["3"], " is new."), (["2", "--no-create", "--operator"], ": ")):
        monkeypatch.setattr("sys.stdin", io.StringIO("The\n"))
        assert main([*arguments, *more]) == 0
        said = capsys.readouterr().err
        assert f"Ledger {ledger}{words}" in said
        shown = [line for line in said.splitlines() if line.startswith("  ")]
        told = "PRIVATE, for the operator: spent of a budget of" in said
        assert told == bool(shown) == ("--operator" in more and "--epsilon" in plan)
    if "--epsilon" in plan:
        assert len(shown) == 64 and "a budget of every shard" in said
        for other in ("--epsilon=4", "--delta=2e-6"):
            assert main([*arguments, "2", other]) == 2
            words = f"{other.partition('=')[0]} must be what the ledger was created with"
            assert words in capsys.readouterr().err
