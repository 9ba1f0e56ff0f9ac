"""Two ranks compared with one process, on models from folders, and evaluations that are killed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from processes import status_of, until
from rank_cases import commands, free_port, in_ranks, result, started, texts, write_models
from result_cases import DELTA, EPSILONS, MECHANISMS, numbers
from safetensors.torch import load_file, save_file

from adapmixed.cli import main
from adapmixed.ensemble import Ensemble
from adapmixed.evaluation import evaluate, loop
from adapmixed.privacy import read_ledger
from adapmixed.ranks import SINGLE, Ranks
from adapmixed.rng import SeededRandom

TEXT = "The value of an expression is the value of its parts. " * 3
POOL = ["--mechanism", "clipped-log-pool lower=-0.5 upper=1 scale=2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a base and an ensemble of three, one with an empty shard."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def options(models: Path) -> list[str]:
    return ["--base", str(models / "base"), "--ensemble", str(models / "ensemble")]


def test_ranks_with_different_files_are_refused(models: Path, tmp_path: Path) -> None:
    """The second rank's base has other weights under the same name."""
    other = tmp_path / "other" / "base"
    shutil.copytree(models / "base", other)
    weights = load_file(other / "model.safetensors")
    halved = {name: value / 2 for name, value in weights.items()}
    save_file(halved, other / "model.safetensors", metadata={"format": "pt"})

    def work(ranks: Ranks) -> None:
        base = models / "base" if ranks.is_main else other
        Ensemble.from_pretrained(base, models / "ensemble", ranks=ranks)

    for error in in_ranks(2, work, tmp_path):
        assert isinstance(error, ValueError)
        assert "ranks must agree on all files, but rank 1 differs from rank 0" in str(error)


def test_evaluate_in_two_ranks(models: Path, tmp_path: Path) -> None:
    """Two processes print and write once, with one process's numbers up to the forward pass."""
    arguments = ["evaluate", *options(models), "--text", str(models / "text.txt"), "--seed", "4"]
    arguments += ["--queries", "40", "--block", "16", "--json"]
    assert main([*arguments, str(tmp_path / "1.json")]) == 0
    children = commands(2, [*arguments, str(tmp_path / "2.json")], tmp_path)
    assert [status_of(child) for child in children] == [0, 0], texts(tmp_path, 0)
    assert "\nbase on text.txt" in texts(tmp_path, 0)[0] and texts(tmp_path, 1)[0] == ""
    spread = json.loads((tmp_path / "2.json").read_text("utf-8"))
    single = json.loads((tmp_path / "1.json").read_text("utf-8"))
    assert spread["config"]["ranks"] == 2 and single["config"]["ranks"] == 1
    for mine, theirs in zip(single["methods"], spread["methods"], strict=True):
        assert mine["name"] == theirs["name"] and mine["queries"] == theirs["queries"] == 40
        ours, others = math.log(mine["perplexity"]), math.log(theirs["perplexity"])
        assert abs(ours - others) < 1e-6
        epsilons = [method["epsilon"] or 0.0 for method in (mine, theirs)]  # unprotected: None
        assert epsilons[0] == pytest.approx(epsilons[1], rel=1e-4, abs=1e-9)


AS_A_MODULE = """
import pathlib, runpy
try:
    runpy.run_module("adapmixed", run_name="__main__", alter_sys=True)
finally:
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if "gloo" in name], names
"""


@pytest.mark.slow
def test_under_torchrun(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m adapmixed` under torchrun leaves no thread that could abort its end.

    The same seed gives the same text, written once.
    """
    script = tmp_path / "as_a_module.py"
    script.write_text(AS_A_MODULE, encoding="utf-8")
    arguments = ["generate", *options(models), *POOL, "--prompt", "The value", "--prompt", "If"]
    arguments += ["--max-new-tokens", "4", "--seed", "5", "--top-k", "40"]
    assert main(arguments) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    ended = subprocess.run(
        [*command, str(script), *arguments],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == capsys.readouterr().out


def test_refused_in_ranks(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arguments = ["generate", *options(models), *POOL, "--prompt", "The"]
    children = commands(4, arguments, tmp_path)
    assert [status_of(child) for child in children] == [2] * 4
    for rank in range(4):
        assert (
            "at most as many as members, got 4 processes for 3 members" in texts(tmp_path, rank)[1]
        )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["chat", *options(models), "--plain", *POOL]) == 2
    assert "chat must run in one process" in capsys.readouterr().err


@pytest.mark.usefixtures("endless")
def test_a_killed_rank_ends_the_command(models: Path, tmp_path: Path) -> None:
    """Without torchrun's own watch, the remaining rank says why it ends and what was charged.

    The next command goes on with the ledger.
    """
    ledger = tmp_path / "ledger.db"
    planned = ["--mechanism", f"{POOL[1]} queries=100000", "--ledger", str(ledger)]
    arguments = ["generate", *options(models), *planned, "--batch", "1", "--prompt", "The"]
    prompts = ["--prompt", "The"] * 999
    children = commands(2, [*arguments, *prompts, "--max-new-tokens", "30"], tmp_path)
    output = tmp_path / "out-0"
    until(lambda: output.exists() and output.stat().st_size >= 20, seconds=45)  # in the middle
    os.kill(children[1], signal.SIGKILL)
    assert [status_of(child) for child in children] == [2, -signal.SIGKILL]
    text = texts(tmp_path, 0)[1]
    assert (
        "adapmixed generate: another rank has ended, or not answered for 300 s, while rank 0 of"
        in text
    )
    reading = read_ledger(ledger)
    assert f"holds {reading.charges} records" in text
    assert 1 < reading.guarantee.queries < 30_000
    children = commands(2, [*arguments, "--max-new-tokens", "8"], tmp_path)
    assert [status_of(child) for child in children] == [0, 0], texts(tmp_path, 0)
    again = read_ledger(ledger)
    assert again.guarantee.queries == reading.guarantee.queries + 8
    assert f"holds {again.charges} records" in texts(tmp_path, 0)[1]
    assert texts(tmp_path, 1) == ("", "")


# An evaluation that is killed continues from its result file, on any number of ranks.


QUERIES, BLOCK = 60, 11  # six windows
TOKENS = torch.randint(3, 60, (80,), generator=torch.Generator().manual_seed(5)).tolist()


def answer(
    models: Path,
    path: Path | None,
    ranks: Ranks,
    progress: Callable[[int, int], None] | None = None,
) -> list[Any]:
    ensemble = Ensemble.from_pretrained(models / "base", models / "ensemble", ranks=ranks)
    with patch.object(loop, "SAVE_SECONDS", 0.0):
        results = evaluate(
            ensemble, TOKENS, MECHANISMS, queries=QUERIES, delta=DELTA,
            rng=SeededRandom(3), block=BLOCK, epsilon=EPSILONS, result=path, progress=progress,
        )  # fmt: skip
    return numbers(results)


def killed(models: Path, path: Path, folder: Path, after: int, victims: tuple[int, ...]) -> None:
    """Kill ranks after some queries; a remaining rank raises."""
    reached, go = folder / "reached", folder / "go"

    def wait(done: int, total: int) -> None:
        if done > after:
            reached.touch()
            while not go.exists():
                time.sleep(0.01)

    children = started(2, lambda ranks: answer(models, path, ranks, wait), folder)
    until(reached.exists, seconds=45)
    for rank in victims:
        os.kill(children[rank], signal.SIGKILL)
    go.touch()
    expected = [-signal.SIGKILL if rank in victims else 0 for rank in range(2)]
    assert [status_of(child) for child in children] == expected
    for rank in {0, 1} - set(victims):
        assert "another rank has ended" in str(result(folder, rank))
    assert json.loads(path.read_bytes())["state"]["place"] < 6
    reached.unlink()
    go.unlink()


@pytest.mark.slow
def test_killed_and_resumed(models: Path, tmp_path: Path) -> None:
    def whole(ranks: Ranks) -> list[Any]:
        return answer(models, tmp_path / "whole.json", ranks)

    reference, nothing = in_ranks(2, whole, tmp_path)
    assert len(reference) == len(MECHANISMS) and nothing == []
    path = tmp_path / "killed.json"
    # In the first window and later.
    for after, victims in ((4, (0, 1)), (16, (0,)), (36, (1,)), (45, (0, 1))):
        killed(models, path, tmp_path, after, victims)
    copy = shutil.copy(path, tmp_path / "copy.json")
    for _ in range(2):
        resumed, _ = in_ranks(2, lambda ranks: answer(models, path, ranks), tmp_path)
        assert resumed == reference
    # Another number of processes goes on, too; its batches are others, which round differently.
    for mine, theirs in zip(answer(models, copy, SINGLE), reference, strict=True):
        assert mine[0] == theirs[0] and mine[2] == theirs[2] == QUERIES
        assert mine[1] == pytest.approx(theirs[1], rel=1e-6)
