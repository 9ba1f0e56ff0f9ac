"""The commands with --device cuda, against the CPU and on the built-in models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import main
from adapmixed.data import demo_base

pytestmark = pytest.mark.usefixtures("demo_ensemble")

DEMO = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]


@pytest.mark.slow
def test_evaluate(gpu: torch.device, tmp_path: Path) -> None:
    """The windows are the same; forward passes differ by the rounding of single precision."""
    text = tmp_path / "text.txt"
    text.write_text("The value of an expression is the value of its parts. " * 20, "utf-8")

    def methods(device: str) -> list[dict[str, Any]]:
        path = tmp_path / f"{device}.json"
        command = ["evaluate", *DEMO, "--text", str(text), "--queries", "60", "--seed", "3"]
        assert main([*command, "--device", device, "--json", str(path)]) == 0
        found: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["methods"]
        return found

    for ours, theirs in zip(methods("cpu"), methods("cuda"), strict=True):
        assert theirs["name"] == ours["name"] and theirs["queries"] == ours["queries"]
        assert theirs["perplexity"] == pytest.approx(ours["perplexity"], rel=1e-3)
        assert theirs["kind"] == ours["kind"]
        if ours["epsilon"] is not None:
            assert theirs["epsilon"] == pytest.approx(ours["epsilon"], rel=1e-2)


def test_generate(gpu: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", *DEMO, "--prompt", "The value", "--seed", "2", "--max-new-tokens", "8"]
    command += ["--mechanism", "clipped-log-pool lower=-0.25 upper=0.5"]
    answers = []
    for device in ("cpu", "cuda"):
        assert main([*command, "--device", device]) == 0
        printed = capsys.readouterr()
        answers.append((printed.out, printed.err))
    assert answers[0] == answers[1]  # the same key draws the same tokens
