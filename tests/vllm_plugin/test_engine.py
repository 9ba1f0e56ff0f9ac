"""Inside vLLM: rows equal our own engine's, and every drawn token was charged before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed: `make test-vllm` has it")

HERE = Path(__file__).parent
CLOSE = 2e-5  # of logits of size 10, fp32


def scenario(name: str, folder: Path) -> dict[str, Any]:
    """Run a scenario in a process of its own."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(HERE / "engine_scenario.py"), name, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    print(name, found)
    return found


def check_rows(found: dict[str, Any]) -> None:
    rows = found["rows"]
    assert rows["public"] <= CLOSE and rows["private"] <= CLOSE
    assert rows["ours"] == rows["tokens"] > 0
    assert found["twice"] == 0
    assert found["released"] == found["drawn"] <= found["charged"]


def test_rows_and_prefix_caching(tmp_path: Path) -> None:
    found = scenario("plain", tmp_path)
    check_rows(found)
    assert found["warm"] == 0 and found["cached"] > 0 and found["within_top_5"]


def test_a_prompt_in_chunks_draws_no_token_before_its_end(tmp_path: Path) -> None:
    found = scenario("chunked", tmp_path)
    check_rows(found)
    assert found["partial"] > 0


def test_a_preempted_request_draws_no_token_twice(tmp_path: Path) -> None:
    found = scenario("preempted", tmp_path)
    check_rows(found)
    assert found["preempted"] > 0


def test_a_spent_plan_draws_no_more(tmp_path: Path) -> None:
    found = scenario("spent", tmp_path)
    first = found["first"]
    assert first["released"] == first["drawn"] <= first["charged"] <= 40
    drawn = first["drawn"] + sum(tokens for _, tokens, _ in found["end"])
    assert found["drawn"] == drawn <= found["charged"] <= 40
    ends = found["end"]
    assert ends[0][1] == ends[1][1] == 0 and ends[-1][1] == 0
    assert all(tokens in (0, 5) for _, tokens, _ in ends[2:])


def test_refused_parameters_charge_nothing(tmp_path: Path) -> None:
    found = scenario("refused", tmp_path)
    assert [name for name, told in found["found"].items() if told == "ACCEPTED"] == []
    assert found["charged"] == found["drawn"] == 0


def test_two_tensor_parallel_processes(tmp_path: Path) -> None:
    """The first process draws; its rows from both processes' logits passed the self-test."""
    found = scenario("parallel", tmp_path)
    assert found["released"] == 160 <= found["charged"] and found["finish"] == ["length"]


def test_other_rows_than_our_own_are_not_served(tmp_path: Path) -> None:
    """The message says that they differ, and not by how much."""
    error = scenario("differing", tmp_path)["error"]
    assert "vLLM must compute the rows of adapmixed's own engine, but they differ" in error
    assert not any(character.isdigit() for character in error)


@pytest.mark.real
def test_a_pretrained_model_answers(tmp_path: Path) -> None:
    found = scenario("real", tmp_path)
    assert "Paris" in found["text"] and found["charged"] >= 8
