"""What commands share: progress, and --device and --dtype as far as is possible without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_demo import DEMO_ENSEMBLE, copy_trained

from adapmixed.cli import main
from adapmixed.commands import options
from adapmixed.data import demo_base
from adapmixed.ensemble import Ensemble
from adapmixed.ranks import ALONE
from adapmixed_ext import build_info
from adapmixed_lab.cli import main as laboratory

pytestmark = pytest.mark.usefixtures("demo_ensemble")

DEMO = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
SHORT = ["--mechanism", "clipped-log-pool lower=-0.25 upper=0.5", "--seed", "1"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def load(base: str, folder: str, **settings: Any) -> None:
        found.update(settings)
        raise ValueError("loaded")

    monkeypatch.setattr(Ensemble, "from_pretrained", load)
    return found


@pytest.mark.usefixtures("asked")
def test_the_main_process_says_that_the_hub_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "Base 'pubb' is not a folder here; asking the model hub for it.\n"
    arguments = argparse.Namespace(device="cpu", dtype="float32", ensemble=DEMO_ENSEMBLE)
    for base, rank, words in (("pubb", 0, said), ("pubb", 1, ""), (str(demo_base()), 0, "")):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        arguments.base = base
        with pytest.raises(ValueError, match="loaded"):
            options.load_ensemble(arguments, ALONE)
        assert capsys.readouterr().err == words


@pytest.mark.parametrize("command", ["evaluate", "generate", "chat", "reproduce"])
def test_a_gpu_that_is_not_there_is_refused(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"evaluate": ["--text", __file__], "generate": ["--prompt", "a"], "chat": ["--plain"]}
    given, program = [command, "table2"], laboratory
    if command != "reproduce":
        given, program = [command, *DEMO, *SHORT, *text[command]], main
    given += ["--device", "cuda"]
    if not build_info()["cuda"]:
        assert program(given) == 2
        assert "--device cuda needs adapmixed_ext built with CUDA" in capsys.readouterr().err
    monkeypatch.setattr("adapmixed_ext.build_info", lambda: {"cuda": True})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert program(given) == 2
    assert "--device cuda needs GPU 0, but torch finds 0" in capsys.readouterr().err


@pytest.mark.parametrize("local", ["0", "3"])
def test_a_rank_takes_the_gpu_of_its_place(
    asked: dict[str, Any], local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(options, "check_device", lambda arguments: None)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", local)
    given = ["generate", *DEMO, *SHORT, "--prompt", "a", "--device", "cuda", "--dtype", "bfloat16"]
    assert main(given) == 2
    assert asked["device"] == f"cuda:{local}" and taken == [f"cuda:{local}"]
    assert asked["dtype"] == torch.bfloat16


def test_half_precision_answers(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", *DEMO, *SHORT, "--prompt", "The value", "--max-new-tokens", "2"]
    assert main([*given, "--dtype", "bfloat16", "--verbose"]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() and "torch.bfloat16 on cpu" in printed.err


@pytest.mark.slow
def test_reproduce_loads_where_it_is_told(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("adapmixed_lab.commands.reproduce.check_device", lambda arguments: None)
    copy_trained(tmp_path / "out")
    given = ["reproduce", "table2", "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert laboratory([*given, "--device", "cuda"]) == 2
    assert asked == {"dtype": torch.bfloat16, "device": "cuda"}


def test_the_time_left_is_that_of_the_work_since_a_resumption(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0, 100.0, 140.0])
    monkeypatch.setattr(options.time, "monotonic", lambda: next(clock))
    update, close = options.progress_bar(1000, "token")
    update(900, 1000)  # read from a file
    update(920, 1000)
    close()
    assert capsys.readouterr().err == "920 of 1,000 tokens, 02:40 left\n"
