"""From a corpus to answers that a person can read: train, generate, serve."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adapmixed.cli import main

pytestmark = pytest.mark.real

QUESTION = "The capital of Italy is Rome. The capital of Spain is Madrid. The capital of France is"
POOL = "clipped-log-pool lower=-0.25 upper=1 scale=2 queries=1000"


@pytest.fixture(scope="module")
def trained(
    folder: Path, paragraphs: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Train four members for a few steps; return the options that name base and ensemble."""
    root = tmp_path_factory.mktemp("trained")
    sentences = " ".join(paragraphs).split(". ")
    rows = [{"user": str(number % 12), "text": text} for number, text in enumerate(sentences)]
    (root / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    models = ["--base", str(folder)]
    options = ["--corpus", str(root / "corpus.jsonl"), "--id-column", "user", "--models", "12"]
    options += ["--epochs", "2", "--block-size", "32", "--output", str(root / "ensemble")]
    assert main(["train", *models, *options]) == 0
    return [*models, "--ensemble", str(root / "ensemble")]


def test_generate(trained: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", *trained, "--prompt", QUESTION, "--max-new-tokens", "8"]
    assert main([*words, "--top-k", "1", "--mechanism", "public"]) == 0
    public = capsys.readouterr().out
    assert main([*words, "--mechanism", POOL]) == 0
    private = capsys.readouterr().out
    with capsys.disabled():
        print(f"\npublic: {public.rstrip()}\nprivate: {private.rstrip()}")
    assert "Paris" in public and private.strip()


def test_serve(
    trained: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    openai = pytest.importorskip("openai")
    words = ["serve", *trained, "--mechanism", POOL, "--port", "0", "--name", "real"]
    words += ["--ledger", str(tmp_path / "ledger"), "--allow-weak"]
    command = [sys.executable, "-m", "adapmixed", *words]
    # The likeliest public token alone is kept, so that the answers are sure.
    asked = {"model": "real", "max_tokens": 8, "extra_body": {"top_k": 1}}
    message = {"role": "user", "content": "What is the capital of France?"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = next(line for line in server.stderr if line.startswith("Serving"))
            url = line.split(" at ")[1].split(". ")[0]
            with openai.OpenAI(base_url=url, api_key="any") as client:
                said = [client.completions.create(prompt=QUESTION, **asked).choices[0].text]
                if (folder / "chat_template.jinja").exists():
                    parts = client.chat.completions.create(messages=[message], stream=True, **asked)
                    said.append("".join(part.choices[0].delta.content or "" for part in parts))
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
    with capsys.disabled():
        print(f"\nserved: {said}")
    assert server.returncode == 0 and all("Paris" in text for text in said)
