"""Studies that the paper does not have: what they run, and ensembles over divided text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiment_cases import check_redrawn, drawn, inputs
from fake_ensemble import FakeEnsemble

from adapmixed.data import demo_base, private_documents
from adapmixed.mechanisms import AdaPMixED
from adapmixed.training.config import FinetuneConfig
from adapmixed_lab.reproduce.divided import builtin_divided
from adapmixed_lab.reproduce.measure import Run
from adapmixed_lab.reproduce.outputs import write_outputs
from adapmixed_lab.reproduce.studies import frontiers, models, screening, studies
from adapmixed_lab.reproduce.tables import text


def test_screening_study(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = AdaPMixED(3.0, 0.2, sigma=0.05, threshold=0.3, screen_top_k=4)
    monkeypatch.setattr(AdaPMixED, "preset", classmethod(lambda cls, name: strict))
    far: Any = FakeEnsemble(4, spread=2.0, max_positions=32)
    given = replace(inputs(), ensemble=far)
    rows = screening.rows(given, Run(), 300)
    found = {one["label"]: one["ours"] for one in rows}
    weights = ["λ = 0.0001", "λ = 0.001", "λ = 0.01", "λ = 0.1", "λ = 1"]
    noises = ["σ = 0.005", "σ = 0.025", "σ = 0.1", "σ = 0.5"]
    assert list(found)[:13] == [*weights, *noises, "T = 0.15", "T = 0.6", "k = 2", "k = 7"]
    together = list(found)[13:]
    assert together[0] == "λ = 1, σ = 0.005, T = 0.15" and len(together) == 3
    # If the private models alone decide, near a threshold, the bit is theirs.
    assert found[together[0]]["equal_bits"] < found["λ = 1"]["equal_bits"]
    assert found["T = 0.15"]["screened"] > found["λ = 0.0001"]["screened"]
    assert found["T = 0.6"]["screened"] < found["λ = 0.0001"]["screened"]
    assert found["σ = 0.5"]["screened"] > found["λ = 0.0001"]["screened"]
    assert found["σ = 0.5"]["epsilon"] < found["λ = 0.0001"]["epsilon"]
    # The less weight the private models have, the less the bit has to do with them, and it costs.
    assert found["λ = 0.0001"]["equal_bits"] > 0.99 > found["λ = 1"]["equal_bits"]
    assert 0 < found["λ = 0.0001"]["screened"] < 300
    costs = [found[label]["epsilon"] for label in weights]
    assert costs == sorted(costs) and costs[0] < costs[-1]
    assert sum(found["λ = 1"]["queries_by_top_probability"]) == 300


@pytest.mark.slow
def test_all_lines_of_the_screening_figure_are_told_apart() -> None:
    figure = drawn("reproduce-studies.json", "studies-screening")
    left, right = figure.axes
    lines = right.get_lines()
    assert len(lines) == 8
    for look in ("get_color", "get_marker"):
        assert len({getattr(line, look)() for line in lines}) == len(lines), look
    # A legend's marks among a panel's would be read as data.
    renderer = figure.canvas.get_renderer()
    legend = left.get_legend().get_window_extent(renderer)
    assert not any(legend.overlaps(axes.get_window_extent(renderer)) for axes in figure.axes)


@pytest.mark.slow
def test_studies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(frontiers, "BUDGETS", (4.0,))
    monkeypatch.setattr(frontiers, "LEAKAGES", (0.1,))
    result = studies(inputs(10), Run(), queries=30)
    assert {one["group"] for one in result["rows"]} == {"models", "screening", "frontiers"}
    frontier = [one for one in result["rows"] if one["group"] == "frontiers"]
    fixed = [one["ours"] for one in frontier if one["ours"]["kind"] == "fixed"]
    assert len(fixed) == 3 and all(0 < ours["epsilon"] <= 4.0 for ours in fixed)
    (adaptive,) = (one["ours"] for one in frontier if one["method"] == "AdaPMixED")
    assert adaptive["kind"] == "data-dependent, ex-post" and adaptive["rule"] == "per_model"
    assert {ours["adjacency"] for ours in (*fixed, adaptive)} == {"zero_out"}
    models = [
        one
        for one in result["rows"]
        if one["method"] == "ClippedLogPool" and one["group"] == "models"
    ]
    assert [one["label"] for one in models] == ["N = 8", "N = 10"]
    assert models[0]["ours"]["epsilon"] > models[1]["ours"]["epsilon"]
    names = {path.name for path in write_outputs(result, tmp_path)}
    assert {
        f"studies-wikitext-103-{name}.svg" for name in ("models", "screening", "frontiers")
    } <= names
    assert "same bit" in text(result)


@pytest.mark.slow
def test_shards_of_other_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are trained once over the same text, and put into a table and a figure."""
    few = FinetuneConfig(rank=2, learning_rate=3e-3, epochs=1, batch_size=64, block_size=256)
    base = str(demo_base())
    given: dict[str, Any] = {"documents": private_documents()[:60], "config": few, "workers": 1}
    folders = builtin_divided(tmp_path, base, (2, 5), **given)
    made = [path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")]
    assert builtin_divided(tmp_path, base, (2, 5), **given) == folders
    assert [path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*")] == made
    with pytest.raises(ValueError, match="was begun with"):
        builtin_divided(tmp_path, base, (2,), **given | {"config": replace(few, rank=3)})
    tokens = [models.shard_tokens(folder) for folder in folders]
    assert 2 * tokens[0] == 5 * tokens[1] > 1000
    monkeypatch.setattr(frontiers, "BUDGETS", (4.0,))
    result = studies(inputs(8), Run(), divided=folders, queries=4)
    rows = [one for one in result["rows"] if one["group"] == "shards"]
    boxes = [one for one in rows if one["method"] == "ClippedMixing"]
    assert [one["ours"]["num_models"] for one in boxes] == [2, 5]
    assert boxes[0]["label"] == f"N = 2, {tokens[0]:,.0f} tokens"
    assert boxes[0]["ours"]["epsilon"] > boxes[1]["ours"]["epsilon"]
    # The number of models is studied on the largest ensemble, here on that of the inputs.
    of_models = [one for one in result["rows"] if one["group"] == "models" and one["label"]]
    assert {one["label"] for one in of_models} == {"N = 8"}
    more = models.rows(inputs(3), Run(), 4, folders)
    assert {one["label"] for one in more[1:]} == {f"N = 5, {tokens[1]:,.0f} tokens"}
    (tmp_path / "out").mkdir()
    written = write_outputs(result, tmp_path / "out")
    assert [path.name.split("-")[-1] for path in written[2::2]] == [
        "models.svg", "shards.svg", "screening.svg", "frontiers.svg",
    ]  # fmt: skip
    check_redrawn(written, tmp_path)


def test_another_text_is_not_taken_for_the_one_that_was_divided(tmp_path: Path) -> None:
    """Another text or key raises, no member is trained, and the files stay as they are."""
    documents = private_documents()[:3]
    with pytest.raises(ValueError, match="documents must hold at least one document, got none"):
        builtin_divided(tmp_path, str(demo_base()), (2,), documents=[])
    kept, key = tmp_path / "divided-text.jsonl", tmp_path / "divided.key"
    content = "".join(
        json.dumps({"id": f"paragraph {number}", "text": one.text}) + "\n"
        for number, one in enumerate(documents)
    )
    kept.write_text(content)
    for other in (documents[:2], documents[::-1], None):
        with pytest.raises(ValueError) as refused:
            builtin_divided(tmp_path, str(demo_base()), (2,), documents=other)
        wanted = f"{len(private_documents() if other is None else other)} lines"
        assert f"{kept} must hold the requested text, {wanted}" in str(refused.value)
        assert f"got 3 lines, {len(content.encode()):,} bytes" in str(refused.value)
    assert not key.exists()
    key.write_text(f"{1:064x}\n")
    key.chmod(0o600)
    with pytest.raises(ValueError, match=f"{key} must hold the key of this text, it holds another"):
        builtin_divided(tmp_path, str(demo_base()), (2,), documents=documents)
    assert kept.read_text() == content and not list(tmp_path.glob("divided-2*"))
