"""``adapmixed generate``, ``chat`` and ``compare``: prompts, conversations, budgets, ledgers."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from trained_demo import MODELS

from adapmixed.cli import main
from adapmixed.data import demo_base
from adapmixed.generation import PrivateGenerator

pytestmark = pytest.mark.usefixtures("demo_ensemble")
FIRST = ["--mechanism", "public", "--top-k", "1"]  # the likeliest public token, without a draw
POOL = ["--mechanism", "clipped-log-pool lower=-0.5 upper=0.5"]


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


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
    alone = capsys.readouterr().out
    assert alone == answers[2]["text"] + "\n"
    for cold in ([*POOL, "--top-k", "1"], [*FIRST[:2], "--temperature", "0.01"]):
        given = ["--max-new-tokens", "5", "--prompt", "If the name"]
        assert main(["generate", *MODELS, *cold, *given]) == 0
        assert capsys.readouterr().out == alone
    assert main([*arguments, "--prompt", "If the name", "--stop", alone.strip()[:6]]) == 0
    assert alone.startswith(capsys.readouterr().out.rstrip("\n"))
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
    given = [*command, *MODELS, "--mechanism", f"{POOL[1]} {plan[0]}", *plan[1:]]
    given += ["--ledger", str(ledger), "--max-new-tokens"]
    for more, words in ((["3"], " is new."), (["2", "--no-create", "--operator"], ": ")):
        typed(monkeypatch, "The\n")
        assert main([*given, *more]) == 0
        said = capsys.readouterr().err
        assert f"Ledger {ledger}{words}" in said
        shown = [line for line in said.splitlines() if line.startswith("  ")]
        told = "PRIVATE, for the operator: spent of a budget of" in said
        assert told == bool(shown) == ("--operator" in more and "--epsilon" in plan)
    if "--epsilon" in plan:
        assert len(shown) == 64 and "a budget of every shard" in said
        for other in ("--epsilon=4", "--delta=2e-6"):
            assert main([*given, "2", other]) == 2
            words = f"{other.partition('=')[0]} must be what the ledger was created with"
            assert words in capsys.readouterr().err


def test_chat_line_by_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["chat", *MODELS, *FIRST, "--max-new-tokens", "4"]
    typed(monkeypatch, "The value\n\n/new\nIf the name\n/quit\nThe value\n")
    assert main([*arguments, "--plain"]) == 0
    out = capsys.readouterr()
    answers = []
    for prompt in ("The value", "If the name"):
        assert main(["generate", *MODELS, *FIRST, "--max-new-tokens", "4", "--prompt", prompt]) == 0
        answers.append(capsys.readouterr().out)
    assert out.out == "".join(answers)
    typed(monkeypatch, "The value\nThe value\n")
    assert main([*arguments, "--plain", "--turns", "1"]) == 0
    assert capsys.readouterr().out == answers[0]
    typed(monkeypatch, "The value\n")
    assert main(arguments) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert "must have a chat template, but has none: use adapmixed chat --plain" in out.err


def test_chat_remembers_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Path(shutil.copytree(demo_base(), tmp_path / "base"))
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"
    (base / "chat_template.jinja").write_text(template)
    models = ["--base", str(base), *MODELS[2:], "--max-new-tokens", "4", *FIRST]
    typed(monkeypatch, "What is it?\nAnd why?\n")
    assert main(["chat", *models]) == 0
    conversation = capsys.readouterr().out
    opening = "<user> What is it?\n"
    assert main(["generate", *models, "--prompt", f"{opening}<assistant>"]) == 0
    first = capsys.readouterr().out
    whole = f"{opening}<assistant> {first[:-1]}\n<user> And why?\n<assistant>"
    assert main(["generate", *models, "--prompt", whole]) == 0
    assert conversation == first + capsys.readouterr().out


# compare: continuations of the same random numbers, marked as uncharged.


def columns(capsys: pytest.CaptureFixture[str], mechanism: str, *prompts: str) -> list[list[str]]:
    """Return each prompt's columns, without the lines' spaces."""
    short = ["--max-new-tokens", "12", "--seed", "3"]
    given = [part for prompt in prompts for part in ("--prompt", prompt)]
    assert main(["compare", *MODELS, *short, "--mechanism", mechanism, *given]) == 0
    output = capsys.readouterr().out
    marked, *parts = re.split(r"^'(.*)'\n\n", output, flags=re.MULTILINE)
    assert "no guarantee covers them. Do not publish them" in " ".join(marked.split())
    found = []
    for prompt, table in zip(parts[::2], parts[1::2], strict=True):
        assert prompt in prompts
        titles, rule, *lines = table.rstrip("\n").split("\n")
        ends = [match.span() for match in re.finditer("─+", rule)]
        assert titles.split() == ["public", mechanism.split()[0], "unprotected"]
        found.append([" ".join(line[a:b].strip() for line in lines).strip() for a, b in ends])
    return found


def test_continuations_share_their_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = ("The try statement", "A class")
    near = columns(capsys, "clipped-mixing lower=0.9999 upper=1.0001", *prompts)
    assert len(near) == 2 and all(len(one) == 3 for one in near)
    for public, private, unprotected in near:
        assert public == private != unprotected
    far = columns(capsys, "clipped-log-pool lower=-8 upper=8 scale=4", *prompts)
    assert [one[::2] for one in far] == [one[::2] for one in near]
    assert [one[1] for one in far] != [one[1] for one in near]
    # A prompt's numbers do not depend on the others.
    assert columns(capsys, "clipped-mixing lower=0.9999 upper=1.0001", prompts[1]) == near[1:]
    with pytest.raises(SystemExit):
        main(["compare", *MODELS, *FIRST[:2], "--prompt", "A class", "--ledger", "x"])
    assert list(tmp_path.iterdir()) == []  # nothing is charged or written
