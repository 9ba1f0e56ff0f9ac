"""``adapmixed chat``: line by line, and with the conversation that it remembers."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from trained_demo import MODELS

from adapmixed.cli import main
from adapmixed.data import demo_base

pytestmark = pytest.mark.usefixtures("demo_ensemble")
FIRST = ["--mechanism", "public", "--top-k", "1"]  # the likeliest public token, without a draw


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


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
