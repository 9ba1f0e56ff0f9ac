"""``adapmixed chat``: a conversation, line by line."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import main
from adapmixed.data import demo_base
from adapmixed.ensemble import Manifest, read_manifest, write_manifest

pytestmark = pytest.mark.usefixtures("demo_ensemble")
MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
FIRST = ["--mechanism", "public", "--top-k", "1"]  # the likeliest public token, without a draw


def demo_base_name() -> str:
    """Return the base's name in the demonstration's adapters."""
    config = DEMO_ENSEMBLE / "member-000" / "adapter_config.json"
    return Path(json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]).name


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
    base = tmp_path / demo_base_name()
    shutil.copytree(demo_base(), base)
    settings = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = (
        "{% for m in messages %}{% if m['role'] == 'system' and m['content'] == 'No' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}<assistant>"
    )
    (base / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    member = DEMO_ENSEMBLE / "member-000"
    ensemble = tmp_path / "ensemble"
    ensemble.mkdir()
    shutil.copytree(member, ensemble / "member-000")
    layers = read_manifest(DEMO_ENSEMBLE).adapted
    write_manifest(ensemble, Manifest(str(base), ("member-000",), layers))
    models = ["--base", str(base), "--ensemble", str(ensemble), "--max-new-tokens", "4", *FIRST]
    typed(monkeypatch, "What is it?\nAnd why?\n")
    assert main(["chat", *models, "--system", "Be brief"]) == 0
    conversation = capsys.readouterr().out
    opening = "<system> Be brief\n<user> What is it?\n"
    assert main(["generate", *models, "--prompt", f"{opening}<assistant>"]) == 0
    first = capsys.readouterr().out
    whole = f"{opening}<assistant> {first[:-1]}\n<user> And why?\n<assistant>"
    assert main(["generate", *models, "--prompt", whole]) == 0
    assert conversation == first + capsys.readouterr().out
    assert main(["generate", *models, "--chat", "--prompt", "What is it?"]) == 0
    assert capsys.readouterr().out.strip()
    # An error of the template is one line, since no later line could succeed.
    typed(monkeypatch, "What is it?\n")
    assert main(["chat", *models, "--system", "No"]) == 2
    out = capsys.readouterr()
    assert out.out == "" and len(out.err.splitlines()) == 1
    assert "chat template, which rejects them: System role not supported" in out.err
