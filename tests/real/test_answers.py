"""From a corpus to answers that a person can read: train, generate, serve."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PARAGRAPHS

from adapmixed.cli import main

QUESTION = "The capital of France is"
USERS = 12
POOL = "clipped-log-pool lower=-0.25 upper=1 scale=2 queries=1000"


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Train four members for a few steps; return the options that name base and ensemble."""
    root = tmp_path_factory.mktemp("trained")
    sentences = " ".join(PARAGRAPHS).split(". ")
    rows = [{"user": str(number % USERS), "text": one} for number, one in enumerate(sentences)]
    (root / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    models = ["--base", str(folder)]
    options = ["--corpus", str(root / "corpus.jsonl"), "--id-column", "user", "--models", "4"]
    options += ["--epochs", "2", "--block-size", "32", "--output", str(root / "ensemble")]
    assert main(["train", *models, *options]) == 0
    return [*models, "--ensemble", str(root / "ensemble")]


def test_generate(trained: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", *trained, "--prompt", QUESTION, "--max-new-tokens", "12"]
    assert main([*words, "--temperature", "0.1", "--mechanism", "public"]) == 0
    public = capsys.readouterr().out
    assert main([*words, "--mechanism", POOL]) == 0
    private = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{QUESTION}{public.rstrip()}\n{QUESTION}{private.rstrip()}")
    assert "Paris" in public and private.strip()


@pytest.fixture
def url(trained: list[str], tmp_path: Path) -> Iterator[str]:
    words = [sys.executable, "-m", "adapmixed", "serve", *trained, "--mechanism", POOL]
    words += ["--ledger", str(tmp_path / "ledger"), "--port", "0", "--name", "real"]
    words += ["--allow-weak"]  # of four members
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        said = ""
        while (found := re.search(r" at (http\S+/v1)\.", said)) is None:
            line = server.stderr.readline()
            assert line, said
            said += line
        yield found[1]
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


def test_serve(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    openai = pytest.importorskip("openai")
    asked = {"model": "real", "max_tokens": 12, "temperature": 0.1}
    with openai.OpenAI(base_url=url, api_key="any") as client:
        text = client.completions.create(prompt=QUESTION, **asked).choices[0].text
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        if (folder / "chat_template.jinja").exists():
            parts = client.chat.completions.create(messages=messages, stream=True, **asked)
            said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        else:
            with pytest.raises(openai.BadRequestError, match="template"):
                client.chat.completions.create(messages=messages, **asked)
            said = ""
    with capsys.disabled():
        print(f"\n{QUESTION}{text}\n{said}")
    assert "Paris" in text and (not said or "Paris" in said)
