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
from adapmixed.privacy import Accountant, read_ledger

pytestmark = pytest.mark.usefixtures("demo_ensemble")
FIRST = ["--mechanism", "public", "--top-k", "1"]  # the likeliest public token, without a draw
POOL = ["--mechanism", "clipped-log-pool lower=-0.5 upper=0.5"]


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_several_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffThe\fvalue\nIf the name\n\n", encoding="utf-8")
    arguments = ["generate", *MODELS, *FIRST, "--max-new-tokens", "5"]
    assert main([*arguments, "--prompt", "The try", "--prompts", str(file)]) == 0
    out = capsys.readouterr()
    answers = [json.loads(line) for line in out.out.splitlines()]
    assert [a["prompt"] for a in answers] == ["The try", "The\fvalue", "If the name"]
    assert main([*arguments, "--prompt", "If the name"]) == 0
    alone = capsys.readouterr().out
    assert alone == answers[2]["text"] + "\n"
    assert main([*arguments, "--prompt", "If the name", "--stop", alone.strip()[:6]]) == 0
    assert alone.startswith(capsys.readouterr().out.rstrip("\n"))
    assert main(arguments) == 2
    assert "--prompt or --prompts must give at least one prompt" in capsys.readouterr().err


@pytest.mark.slow
def test_many_prompts_are_answered_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """300 prompts fit 64 MB, and the answers of a batch are written before the next one."""
    file = tmp_path / "prompts.txt"
    file.write_text("The value of x is\n" * 300, encoding="utf-8")
    arguments = ["generate", *MODELS, *FIRST, "--max-new-tokens", "1", "--prompts", str(file)]
    arguments += ["--memory", "64M"]
    sizes, answered = [], PrivateGenerator.generate

    def counted(self: Any, batch: Any, **options: Any) -> Any:
        written = len(capsys.readouterr().out.splitlines())
        assert written == (sizes[-1] if sizes else 0)
        sizes.append(len(batch))
        return answered(self, batch, **options)

    monkeypatch.setattr(PrivateGenerator, "generate", counted)
    assert main(arguments) == 0
    assert sum(sizes) == 300 and len(sizes) > 1 and len(set(sizes[:-1])) == 1
    assert len(capsys.readouterr().out.splitlines()) == sizes[-1]


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
    for more, words in ((["3"], " is new."), (["2", "--no-create"], ": ")):
        typed(monkeypatch, "The\n")
        assert main([*given, *more]) == 0
        assert f"Ledger {ledger}{words}" in capsys.readouterr().err


def test_a_cold_answer_does_not_depend_on_the_randomness(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["generate", *MODELS, "--prompt", "The", *POOL, "--max-new-tokens", "6"]
    said = []
    for given in (["--temperature", "0.01"], ["--temperature", "0.01"], ["--top-k", "1"]):
        assert main([*arguments, *given]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""
    assert main([*arguments[:-4], *FIRST, "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out == said[2]  # one token is left: the likeliest of q


@pytest.mark.slow
def test_budgets_of_shards_go_on_from_their_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, mechanism = tmp_path / "ledger.db", "clipped-log-pool lower=-0.5 upper=1 scale=2"
    arguments = ["--prompt", "The try statement", "--max-new-tokens", "4", "--epsilon", "3"]
    arguments += ["--mechanism", mechanism, "--ledger", str(path)]
    spent = []
    for operator in (False, True):
        assert main(["generate", *MODELS, *arguments, *(["--operator"] * operator)]) == 0
        error = capsys.readouterr().err
        assert "ε = 3" in error and "a budget of every shard" in error
        assert "may be published" in error
        shown = [line for line in error.splitlines() if line.startswith("  ")]
        assert len(shown) == 64 * operator
        assert ("PRIVATE, for the operator: spent of a budget of" in error) == operator
        with Accountant(1e-5, epsilon=3.0, path=path, create=False) as accountant:
            spent.append(accountant.spent)
            assert spent[-1].max() <= accountant.limit
    assert (spent[0] > 0).all() and (spent[1] > spent[0]).all()
    charges = read_ledger(path).charges
    for other in (["--epsilon", "4"], ["--delta", "2e-6"]):
        assert main(["generate", *MODELS, *arguments, *other]) == 2
        error = capsys.readouterr().err
        assert f"{other[0]} must be what the ledger was created with" in error
    assert read_ledger(path).charges == charges


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
    assert main(["generate", *models, "--chat", "--prompt", "What is it?"]) == 0
    assert capsys.readouterr().out.strip()


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
    assert list(tmp_path.iterdir()) == []  # nothing is charged or written
