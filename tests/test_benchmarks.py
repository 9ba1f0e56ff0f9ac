"""The benchmarks run and write the promised files."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import adapmixed_ext

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # they are not installed, and pytest may be started anywhere

from head_ensembles import write_base  # noqa: E402

from benchmarks import contestants, generation, inputs, operators, serving, synthesis, training  # noqa: E402

MACHINE = {"cpu", "cores", "threads", "instruction_set", "torch", "python", "commit", "dirty"}
TIMING = {"name", "median", "fastest", "slowest", "runs", "ratio", "gb_per_s", "share_of_floor"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return quick(program, options), which runs one of the programs, as (status, printed)."""

    def run(program: Any, *options: object) -> tuple[int | None, str]:
        monkeypatch.setattr(sys, "argv", ["program", "--quick", *map(str, options)])
        capsys.readouterr()
        return program.main(), capsys.readouterr().out

    return run


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quick_run_writes_what_is_promised(device: str, tmp_path: Path, quick: Any) -> None:
    """On a GPU everything but events and graphs, which a dry run does not have."""
    options = ["--device", device, "--dry-run", "--out", tmp_path / device]
    status, printed = quick(operators, *options)
    assert status == 0, printed
    assert (tmp_path / f"{device}.txt").read_text().strip() == printed.strip()
    content = json.loads((tmp_path / f"{device}.json").read_text())
    assert content["quick"] and content["complete"] and not content["left_out"]
    assert content["others"] is None or content["others"] >= 0
    assert set(content["machine"]) >= MACHINE
    assert set(content["tables"]) == set(operators.TABLES)
    for table in operators.TABLES:
        names = [row["name"] for row in content["tables"][table]]
        assert any(name.endswith(operators.GRAPH) for name in names) is (device == "cuda")
        assert not any("sampl" in name and "graph" in name for name in names)
        for row in content["tables"][table]:
            assert set(row) >= TIMING, (table, row)
            assert 0 < row["fastest"] <= row["median"] <= row["slowest"]
    speed = content["tables"]["speed"]
    assert {row["kind"] for row in speed} == set(inputs.KINDS)
    assert {row["batch"] for row in speed} == ({1} if device == "cpu" else {1, 8})
    judged = [row for row in speed if "correct" in row]
    names = {row["name"].removesuffix(operators.GRAPH) for row in judged}
    assert names == {contestants.LOOP, contestants.SMART, contestants.SMART_CONSTANT}
    # Plain float32 sums overflow at order 18, scaled ones do not.
    for row in judged:
        if row["order"] == 18 and row["kind"] == "near":
            assert row["correct"] is row["name"].startswith("smart"), row
    if device == "cpu":
        status, late = quick(operators, *options[:3], "--seconds", 1e-9)
        assert status == 1 and late.count("the time is over") == len(operators.TABLES)


@pytest.mark.slow
def test_private_tokens_are_timed_against_the_public_ones(tmp_path: Path, quick: Any) -> None:
    _, printed = quick(generation, "--out", tmp_path / "generation")
    assert (tmp_path / "generation.txt").read_text().strip() == printed.strip()
    content = json.loads((tmp_path / "generation.json").read_text())
    rows = {(row["name"], row["queries"]): row for row in content["tables"]["token"]}
    expected = {"public model"}
    for *members, mechanism in generation.MEMBERS:
        name = generation.called(*members)
        adaptive = {f"{name}, AdaPMixED", f"{name}, AdaPMixED alone"}
        if members[1] < 1000:
            expected |= {name} if mechanism is generation.POOL else adaptive
    assert {name for name, _ in rows} == expected
    for (_, queries), row in rows.items():
        assert row["ratio"] == row["median"] / rows["public model", queries]["median"]
    ones = {name: row for (name, queries), row in rows.items() if queries == 1}
    held = {name: row["cache_bytes"] for name, row in ones.items() if "alone" not in name}
    least = held.pop("public model")
    assert least == 2 * 2 * 8 * 32 * 4  # of the prompt
    for name, size in held.items():
        assert size == (101 * least if "deep" in name else least * (51 if "last" in name else 1))


@pytest.mark.slow
def test_more_steps_are_better_for_small_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: Any
) -> None:
    monkeypatch.setattr(training, "documents", training.paragraphs)  # of any machine
    quick(training, "--out", tmp_path / "training")
    rows = json.loads((tmp_path / "training.json").read_text())["tables"]["rows"]
    assert [row["setting"] for row in rows] == 2 * ["2 epochs alone", "8 steps"]
    for few, more in (rows[:2], rows[2:]):
        assert more["mean"] < few["mean"] < few["public"] == more["public"]


@pytest.mark.parametrize(
    ("weight", "loss", "message"),
    [
        (1 + 3e-4, 1.0, "infeasible"), (1 - 3e-4, 1.0, "below the optimum"),
        (1.0, 1 - 2e-5, "loss"), (1.0, math.nan, "loss"),
    ],
)  # fmt: skip
def test_wrong_results_are_not_timed(
    weight: float, loss: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, calls = inputs.make_query(8, 700, kind="far", seed=1), inputs.two_calls
    inputs.check_ours(query, 3.0, 0.03)

    def wrong(*given: Any) -> Any:
        projection, losses = calls(*given)
        return replace(projection, weight=projection.weight * weight), losses * loss

    monkeypatch.setattr(inputs, "two_calls", wrong)
    with pytest.raises(SystemExit, match=message):
        inputs.check_ours(query, 3.0, 0.03)


@pytest.mark.parametrize(("order", "radius"), [(18.0, 3.6), (3.0, 0.03), (17.5, 3.6), (3.0, 2.0)])
@pytest.mark.parametrize("kind", ["near", "far", "shared"])
def test_the_smart_program_is_a_fair_peer(kind: str, order: float, radius: float) -> None:
    query = inputs.make_query(8, 700, kind=kind, seed=1)
    projection = adapmixed_ext.project(*query, order=order, radius=radius)
    weight, _ = contestants.Smart()(*query, order, radius)
    assert ((weight - projection.weight[:, 0]) / projection.weight[:, 0]).abs().max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--speed"]])
def test_texts_are_drawn_compared_and_timed(
    option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"Entry {number} says that a module was {'x' * 140}." for number in range(40)]
    monkeypatch.setattr(synthesis, "documents", lambda: words)
    for name, few in (("TOKENS", 6), ("RESAMPLES", 2), ("RUNS", 3), ("SEEDS", 2)):
        monkeypatch.setattr(synthesis, name, few)
    base = write_base(tmp_path / "base")
    given = ["--base", base, "--keep", tmp_path, "--batch", 8, "--texts", 3, *option]
    monkeypatch.setattr(sys, "argv", ["program", *map(str, [*given, "--out", tmp_path / "out"])])
    synthesis.main()
    tables = json.loads((tmp_path / "out.json").read_text())["tables"]
    if option:
        names = ["ours", "its mechanism", "plain pass of 9 rows", "public model alone"]
        assert [row["name"] for row in tables["token"]] == names
        assert all(row["median"] > 0 < row["ratio"] for row in tables["token"])
        return
    rules = ["ours, {}", "symmetric clip, {}", "AdaPMixED, {}"]
    names = ["public", *(rule.format(epsilon) for epsilon in (3, 10) for rule in rules)]
    assert [row["name"] for row in tables["mauve"]] == names
    first = (tmp_path / "8.jsonl").read_text().splitlines()[0]
    (tmp_path / "8.jsonl").write_text(first + "\n")  # a run that was stopped goes on
    synthesis.main()
    kept = (tmp_path / "8.jsonl").read_text().splitlines()
    assert kept[0] == first and len(kept) == 3
    assert all(0 < len(text) <= 6 for texts in json.loads(first).values() for text in texts)


@pytest.mark.slow
def test_a_server_is_timed(
    tmp_path: Path, demo_ensemble: Path, monkeypatch: pytest.MonkeyPatch, quick: Any
) -> None:
    monkeypatch.setattr(serving, "train_demo", lambda to: shutil.copytree(demo_ensemble, to))
    monkeypatch.setattr(serving, "STREAMS", (1, 8))
    monkeypatch.setattr(serving, "TOKENS", 16)
    quick(serving, "--out", tmp_path / "served", "--folder", tmp_path)
    streams = json.loads((tmp_path / "served.json").read_text())["tables"]["streams"]
    assert [row["streams"] for row in streams] == [1, 8]
    assert all(row["tokens_per_second"] > 0 and row["p50"] <= row["p99"] for row in streams)
