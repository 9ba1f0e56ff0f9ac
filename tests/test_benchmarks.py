"""The benchmarks run, write the promised files, and raise if a timed result is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import adapmixed_ext

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # they are not installed, and pytest may be started anywhere

from benchmarks import (  # noqa: E402
    contestants,
    cuda_tables,
    generation,
    harness,
    inputs,
    operators,
    training,
)

TABLES = {
    "speed",
    "advantages",
    "compilation",
    "operators",
    "evaluation",
    "dtypes",
    "batches",
    "sizes",
}
MACHINE = {"cpu", "cores", "threads", "caches", "memory", "instruction_set", "torch", "python"}
TIMING = {"name", "median", "fastest", "slowest", "runs", "ratio", "gb_per_s", "share_of_floor"}


@pytest.fixture
def query() -> harness.Query:
    return inputs.make_query(8, 700, kind="far", seed=3)


def run_quick(*options: object, module: str = "operators") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--quick", *map(str, options)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_quick_run_writes_what_is_promised(tmp_path: Path) -> None:
    run = run_quick("--out", tmp_path / "cpu")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "cpu.txt").read_text().strip() == run.stdout.strip()
    content = json.loads((tmp_path / "cpu.json").read_text())
    assert content["quick"] is True
    assert content["others"] is None or content["others"] >= 0
    assert set(content["machine"]) >= MACHINE | {"adapmixed", "commit", "dirty"}
    assert set(content["tables"]) == TABLES
    for table in TABLES - {"advantages", "compilation"}:
        for row in content["tables"][table]:
            assert set(row) >= TIMING, (table, row)
            assert 0 < row["fastest"] <= row["median"] <= row["slowest"]
    speed = content["tables"]["speed"]
    assert {row["kind"] for row in speed} == set(inputs.KINDS)
    judged = [row for row in speed if "correct" in row]
    names = {row["name"] for row in judged}
    assert names == {v for k, v in vars(contestants).items() if k in (
        "LOOP", "EAGER", "RUN_TIME", "CONSTANT", "SMART", "SMART_CONSTANT")}  # fmt: skip
    # Plain float32 sums overflow at order 18, scaled ones do not.
    for row in judged:
        if row["order"] == 18 and row["kind"] == "near":
            assert row["correct"] is (row["name"].startswith("smart")), row


@pytest.mark.slow
def test_private_tokens_are_timed_against_the_public_and_the_loop(tmp_path: Path) -> None:
    run = run_quick("--out", tmp_path / "generation", module="generation")
    assert run.returncode == 0, run.stderr  # it fails if logits differ from peft's
    assert (tmp_path / "generation.txt").read_text().strip() == run.stdout.strip()
    content = json.loads((tmp_path / "generation.json").read_text())
    assert content["quick"] is True and set(content["machine"]) >= MACHINE
    assert set(content["tables"]) == {"token", "loop"}
    rows = {(row["name"], row["queries"]): row for row in content["tables"]["token"]}
    assert {name for name, _ in rows} == {"public model", *generation.KINDS}
    for (_, queries), row in rows.items():
        assert row["ratio"] == row["median"] / rows["public model", queries]["median"]
    held = {name: row["cache_bytes"] for (name, queries), row in rows.items() if queries == 1}
    assert held["head"] == held["public model"] == 2 * 2 * 8 * 32 * 4  # of the prompt
    assert held["deep (c_attn)"] == 5 * held["public model"]  # N = 4 and the public model
    loop, batched = content["tables"]["loop"]
    assert batched["ratio"] == loop["median"] / batched["median"]


@pytest.mark.slow
def test_the_tables_of_a_gpu_run_without_one(tmp_path: Path) -> None:
    """Everything but events and graphs, which a dry run does not have."""
    run = run_quick("--device", "cuda", "--dry-run", "--out", tmp_path / "dry")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "dry.txt").read_text().strip() == run.stdout.strip()
    content = json.loads((tmp_path / "dry.json").read_text())
    assert content["dry"] and content["complete"] and not content["left_out"]
    assert set(content["machine"]) >= MACHINE | {"commit", "gpu"}
    assert {name for name, _ in cuda_tables.TABLES} == {"speed", "pools", *operators.TABLES}
    assert set(content["tables"]) == TABLES - {"advantages"} | {"pools"}
    for table in TABLES - {"advantages", "compilation"} | {"pools"}:
        names = [row["name"] for row in content["tables"][table]]
        assert any(name.endswith(", graph") for name in names)
        assert not any(name.startswith(("sample", "gaussian", "sampling")) and "graph" in name
                       for name in names)  # fmt: skip
        for row in content["tables"][table]:
            assert set(row) >= TIMING, (table, row)
    speed = content["tables"]["speed"]
    for batch in (1, 8):
        assert set(cuda_tables.PEERS) <= {r["name"] for r in speed if r["batch"] == batch}
    assert content["begun"][:2] == ["dtypes", "pools"]  # what needs no program compiled
    batches = content["tables"]["batches"]
    assert {(row["dtype"], row["batch"]) for row in batches} == {
        (dtype, batch) for dtype in ("fp32", "bf16") for batch in (1, 8, 64)
    }
    late = run_quick("--device", "cuda", "--dry-run", "--seconds", 1e-9)
    assert late.returncode == 1 and late.stdout.count("the time is over") == 8
    assert "FAILED: speed: not compared with" in late.stdout


@pytest.mark.parametrize(("order", "radius"), [(18.0, 3.6), (3.0, 0.03), (17.5, 3.6), (3.0, 2.0)])
@pytest.mark.parametrize("kind", ["near", "far", "shared"])
def test_the_smart_program_is_a_fair_peer(kind: str, order: float, radius: float) -> None:
    query = inputs.make_query(8, 700, kind=kind, seed=1)
    projection = adapmixed_ext.project(*query, order=order, radius=radius)
    weight, _ = contestants.Smart()(*query, order, radius)
    assert ((weight - projection.weight[:, 0]) / projection.weight[:, 0]).abs().max() < 1e-3


@pytest.mark.parametrize("factor", [1 + 1e-4, 1 - 1e-4])
def test_a_wrong_weight_is_refused(query: harness.Query, factor: float) -> None:
    right = adapmixed_ext.project(*query, order=3.0, radius=0.03)
    inputs.check_weights(query, right.weight, 3.0, 0.03)
    with pytest.raises(SystemExit, match="infeasible" if factor > 1 else "below the optimum"):
        inputs.check_weights(query, right.weight * factor, 3.0, 0.03)


def test_a_wrong_loss_is_refused(query: harness.Query) -> None:
    projection = adapmixed_ext.project(*query, order=3.0, radius=0.03)
    truth = inputs.true_losses(query, projection, [3.0])
    inputs.check_losses(adapmixed_ext.leave_one_out(*query, projection, orders=3), truth)
    for wrong in (truth * (1 - 2 * adapmixed_ext.loss_error), truth * float("nan")):
        with pytest.raises(SystemExit, match="loss"):
            inputs.check_losses(wrong, truth)


@pytest.mark.slow
def test_the_ledger_is_timed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}
    options = ["--charges", "4", "--runs", "2", "--models", "3", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ledger", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for words in (
        "8 charges", "charges per second: ", "charges per second without a ledger: ",
        "bytes per charge", "opening after 4 charges", "verifying, per charge",
    ):  # fmt: skip
        assert words in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_training_is_timed_to_the_end(tmp_path: Path) -> None:
    texts = training.documents(8_000)
    assert sum(len(text.encode()) for text in texts) <= 8_000 < 2 * training.DOCUMENT * len(texts)
    found = training.timed(texts, 2, "head", tmp_path)
    assert (tmp_path / "head" / "ensemble.json").exists()
    assert 0 < found["first"] <= found["seconds"] and found["processor"] > 1
