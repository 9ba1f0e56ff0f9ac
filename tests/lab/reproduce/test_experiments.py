"""The paper's tables and figures: its numbers, our runs, and the content of a result file."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ensemble import FakeEnsemble

from adapmixed.evaluation import evaluate
from adapmixed.mechanisms import AdaPMixED, Unprotected
from adapmixed.privacy.conversions import c_alpha
from adapmixed.rng import SeededRandom
from adapmixed_lab.cli import main
from adapmixed_lab.commands.reproduce import Sources
from adapmixed_lab.dp_sgd import AdapterGuarantee
from adapmixed_lab.reproduce import measure, paper
from adapmixed_lab.reproduce.figure2 import figure2, relative, settings_of, sizes, write_outputs
from adapmixed_lab.reproduce.measure import (
    PER_MODEL,
    PUBLISHED,
    WHOLE,
    WHOLE_NAME,
    Texts,
    compare,
    dp_line,
    merge,
    stretches,
)
from adapmixed_lab.reproduce.published import PaperRule
from adapmixed_lab.reproduce.result import read_experiment, text
from adapmixed_lab.reproduce.tables import SMALLER, parts_of, table1, table2

PRESET = PaperRule(**vars(AdaPMixED.preset("wikitext-103")))


def inputs(models: int = 3, tokens: int = 2000, **sources: Any) -> Texts:
    """Return inputs with a small ensemble in place of the built-in one, and text for its pool."""
    generator = torch.Generator().manual_seed(3)
    stream = torch.randint(0, 7, (tokens,), generator=generator).tolist()
    ensemble: Any = FakeEnsemble(models, spread=0.3, max_positions=32)
    return Texts(Sources(**sources), ensemble, tuple(stream), "random", tuple(stream[:20]))


def rows_of(result: dict[str, Any], method: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["method"] == method]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Run every experiment once, small."""
    texts = inputs(paper=True)
    return {
        "table1": table1(texts, parts_of(texts, 3, 40, 100)),
        "table2": table2(texts, queries=120),
        "figure2": figure2(inputs(20, paper=True), queries=24),
    }


# The paper's numbers.


def test_the_parts_of_table_2_are_its_total() -> None:
    line: Any = paper.TABLE_2[paper.ADAPMIXED]
    parts = sum(line[part] for part in ("mixing", "screening", "conversion"))
    assert parts == pytest.approx(line["total"], abs=1.5e-3)  # printed to 3 digits
    assert line["conversion"] == pytest.approx(c_alpha(18.0, paper.DELTA), abs=5e-4)
    assert line["epsilon"] == line["total"]


# Our runs.


def test_the_first_members_are_an_ensemble_of_their_own() -> None:
    whole, part = FakeEnsemble(5), FakeEnsemble(5)
    part._members, part.num_models = whole._members[:2], 2
    tokens = inputs().tokens[:50]

    def run(ensemble: Any, mechanism: Any) -> Any:
        common: dict[str, Any] = {"delta": 1e-5, "rng": SeededRandom(1)}
        return evaluate(ensemble, tokens, {"m": mechanism}, **common)[0]

    few, expected = run(whole, replace(PRESET, count=2)), run(part, PRESET)
    assert few.perplexity == expected.perplexity
    assert few.guarantee == expected.guarantee
    assert few.guarantee.epsilon != run(whole, PRESET).guarantee.epsilon
    with pytest.raises(ValueError, match="count"):
        run(whole, replace(PRESET, count=6))
    assert sizes(64) == (8, 16, 32, 64) and sizes(5) == (5,) and sizes(100)[-2:] == (80, 100)


def test_settings_of_figure_2() -> None:
    points = settings_of(PRESET, 64)
    labels = {letter: list(settings) for letter, settings in points.items()}
    assert labels["a"] == ["2", "3", "4", "4.5", "∞"]
    assert labels["b"] == ["20", "60", "500", "2000", "3000"]
    assert labels["d"] == ["8", "16", "32", "64"]
    assert labels["f"] == ["16", "17", "18", "19", "20"]
    # The preset is in every panel, and answers once.
    anchors = {"a": "4.5", "b": "60", "c": "0.2", "d": "64", "e": "-4, -2", "f": "18"}
    assert {points[letter][label] for letter, label in anchors.items()} == {PRESET}
    every = [setting for settings in points.values() for setting in settings.values()]
    assert len(set(every)) == len(every) - len(anchors) + 1
    assert points["d"]["16"] == replace(PRESET, count=16)
    changed = PaperRule(18.0, 0.2, screen_weight=1e-2, sigma=1e-1)
    assert points["e"]["-2, -1"] == changed
    # Another data set's preset joins the paper's values.
    other = settings_of(PaperRule(**vars(AdaPMixED.preset("air-dialogue"))), 64).values()
    assert {"15", "0.3"} <= {label for settings in other for label in settings}


def test_table_1(results: dict[str, dict[str, Any]]) -> None:
    result = results["table1"]
    short, long = "3 runs of 40 queries", "one run of 100 queries"
    names = [
        paper.PUBLIC, "unprotected ensemble", "best non-private pool", PUBLISHED, paper.PMIXED,
        paper.ADAPMIXED, PER_MODEL, SMALLER,
    ]  # fmt: skip
    assert [(r["group"], r["method"]) for r in result["rows"]] == [
        (group, name) for group in (short, long) for name in names
    ]
    adaptive, per_model = rows_of(result, paper.ADAPMIXED), rows_of(result, PER_MODEL)
    for row, other in zip(adaptive, per_model, strict=True):
        assert row["ours"]["adjacency"] == other["ours"]["adjacency"] == "add_remove"  # the paper's
        assert other["ours"]["epsilon"] < row["ours"]["epsilon"]
        # One run of noise: the two lines differ by accounting alone.
        assert other["ours"]["perplexities"] == row["ours"]["perplexities"]
        assert other["ours"]["screened"] == row["ours"]["screened"]
        assert other["ours"]["kind"] == row["ours"]["kind"] == "data-dependent, ex-post"
    assert adaptive[0]["paper"]["epsilon"] == 0.494 and adaptive[1]["paper"]["epsilon"] == 5.248
    ours = adaptive[0]["ours"]
    assert len(ours["perplexities"]) == 3 and ours["queries"] == 40
    assert ours["perplexity"] == pytest.approx(sum(ours["perplexities"]) / 3)
    assert ours["perplexity_deviation"] > 0 and adaptive[1]["ours"]["perplexity_deviation"] is None
    gap = ours["difference"]["mean"]
    public = rows_of(result, paper.PUBLIC)[0]["ours"]
    logs = [sum(map(math.log, entry["perplexities"])) / 3 for entry in (ours, public)]
    assert gap == pytest.approx(logs[0] - logs[1], abs=1e-9) and public["difference"] is None
    # PMixED's two analyses: the paper's numbers are those of the published one.
    (published, _), (sound, _) = rows_of(result, PUBLISHED), rows_of(result, paper.PMIXED)
    assert (published["ours"]["kind"], sound["ours"]["kind"]) == ("published", "fixed")
    assert published["paper"]["epsilon"] == 8.0 and sound["paper"] is None


def test_every_part_of_table_1_is_checked_before_the_first_answer() -> None:
    texts = inputs(tokens=300)
    with pytest.raises(ValueError, match="queries"):
        parts_of(texts, 2, 20, 1000)
    assert "pool" not in vars(texts)  # it would have answered to choose its scale


def test_one_adapter_on_all_text_is_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEnsemble(1, spread=0.3, max_positions=32)
    monkeypatch.setattr(Sources, "load", lambda self, adapters: fake)
    texts = replace(inputs(), references={WHOLE: (Path("one"), {})})
    result = table1(texts, parts_of(texts, 2, 40, 0))
    (line,) = rows_of(result, WHOLE)
    evaluations = [
        evaluate(fake, tokens, {"m": Unprotected()}, queries=40, delta=1e-5, rng=SeededRandom(0))[0]
        for tokens in (texts.tokens[:64], texts.tokens[64:128])  # two blocks each
    ]
    assert line["ours"]["perplexities"] == [e.perplexity for e in evaluations]
    assert line["ours"]["kind"] == "none" and line["ours"]["difference"] is not None


def test_runs_have_texts_accountants_and_randomness_of_their_own() -> None:
    texts, noisy = inputs(), replace(PRESET, sigma=0.05, screen_weight=0.5, threshold=1.0)
    result = compare(texts, {"noisy": noisy}, 40, state="", runs=2)["noisy"]
    sources = SeededRandom(0), SeededRandom(0).child("run 1")
    for run, (tokens, rng) in enumerate(zip(stretches(texts, 2, 40), sources, strict=True)):
        assert tokens == texts.tokens[64 * run : 64 * run + 64]
        settings: Any = {"queries": 40, "delta": 1e-5, "active": None, "rng": rng}
        (expected,) = evaluate(texts.ensemble, tokens, {"noisy": noisy}, **settings)
        assert 0 < expected.screened < 1 and expected.perplexity == result["perplexities"][run]
        assert expected.guarantee.epsilon == result["epsilons"][run]


def test_several_trainings_are_one_result() -> None:
    """The interval is Student's over the trainings, from hand-made numbers."""
    made = [table2(inputs(models, tokens=600), queries=100) for models in (3, 4, 5)]
    merged = merge(made)
    assert merged["settings"]["trainings"] == 3 and merge(made[:1])["rows"] == made[0]["rows"]
    for number, row in enumerate(merged["rows"]):
        several = [result["rows"][number]["ours"] for result in made]
        assert row["ours"]["perplexity"] == pytest.approx(sum(s["perplexity"] for s in several) / 3)
        epsilons = [s["epsilon"] for s in several]
        assert row["ours"]["epsilons"] == epsilons
        if None not in epsilons:
            assert row["ours"]["epsilon_deviation"] == pytest.approx(statistics.stdev(epsilons))
            worst = several[epsilons.index(max(epsilons))]
            assert row["ours"]["guarantee"] == worst["guarantee"]
        gaps = [s["difference"]["mean"] for s in several if s["difference"]]
        if row["method"] != paper.PUBLIC:
            quantile = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # of two degrees of freedom
            interval, reach = row["ours"]["difference"], quantile * statistics.stdev(gaps) / 3**0.5
            assert interval["mean"] == pytest.approx(statistics.mean(gaps), abs=1e-12)
            assert interval["high"] - interval["low"] == pytest.approx(2 * reach, rel=1e-9)
    assert "3 trainings of 3 models" in text(merged)


def test_the_lines_of_dp_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    said = AdapterGuarantee(7.5, 1e-5, 1.0, 0.1, 10, 1.0, 16, "shard", None, "prv")
    whole = replace(said, epsilon=7.25, blocks_per_identifier=9)
    guarantees = iter([(said, None), (whole, None)])
    monkeypatch.setattr(measure, "read_dp_adapter", lambda folder: next(guarantees))
    lines = dict(dp_line(Path("dp")) for _ in range(2))
    texts = replace(inputs(paper=True), references=lines)
    worse = FakeEnsemble(1, spread=3.0, max_positions=32)
    monkeypatch.setattr(Sources, "load", lambda self, adapters: worse)
    result = table1(texts, parts_of(texts, 2, 40, 0))
    (line,) = rows_of(result, WHOLE_NAME)
    assert (line["ours"]["epsilon"], line["ours"]["unit"], line["paper"]) == (7.25, "shard", None)
    (line,) = rows_of(result, paper.DP_SGD)
    stated = {"epsilon": 7.5, "kind": "fixed", "unit": "block of 16 tokens", "mixing": None}
    assert {name: line["ours"][name] for name in stated} == stated
    assert line["ours"]["guarantee"] == str(said)
    notes = " ".join(result["notes"])
    assert "DP-SGD protects one block of 16 tokens" in notes
    # This adapter is worse than the public model: the paper's order does not appear.
    assert "The paper's order of perplexities does not appear in 2 runs of 40 queries" in notes
    assert "DP-SGD is not below public model" in notes
    printed = text(result)
    assert "block of 16 tokens" in printed
    # Its neighbours are its own, whatever the unit.
    assert re.search(rf"^{paper.DP_SGD} .* add/remove +block of 16 tokens", printed, re.MULTILINE)
    assert re.search(rf"^{WHOLE_NAME} .* add/remove +shard", printed, re.MULTILINE)
    # An adapter that is the public model has its perplexities: on the same windows and labels.
    worse._members.zero_()
    again = table1(texts, parts_of(texts, 2, 40, 70))
    public = [row["ours"]["perplexities"] for row in rows_of(again, paper.PUBLIC)]
    for line, expected in zip(rows_of(again, paper.DP_SGD), public, strict=True):
        assert line["ours"]["perplexities"] == pytest.approx(expected, rel=1e-9)


def test_table_2(results: dict[str, dict[str, Any]]) -> None:
    rows = {row["method"]: row for row in results["table2"]["rows"]}
    plain, screened = rows[paper.PMIXED]["ours"], rows[paper.PMIXED_SCREENED]["ours"]
    assert plain["kind"] == screened["kind"] == "fixed"
    assert plain["screening"] == 0 < screened["screening"]
    assert screened["epsilon"] > plain["epsilon"]  # every query is charged, and the screenings
    assert "target_leakage=0.01" in plain["mechanism"] and "order=6.0" in plain["mechanism"]
    assert rows["PMixED, published analysis"]["ours"]["kind"] == "published"
    as_published = rows[f"{paper.PMIXED_SCREENED}, as published"]
    assert as_published["ours"] is None and as_published["paper"]["epsilon"] == 4.139
    rules = {name for name, row in rows.items() if "PaperRule" in str(row["ours"])}
    assert rules == {paper.UNSCREENED, paper.ADAPMIXED}
    adaptive = rows[paper.ADAPMIXED]
    assert adaptive["paper"]["mixing"] == 0.472 and adaptive["paper"]["screened"] == 1026
    for line in rows.values():
        if line["ours"] is not None and line["ours"]["kind"] != "none":
            parts = [line["ours"][part] for part in ("mixing", "screening", "conversion")]
            assert math.fsum(parts) == pytest.approx(line["ours"]["total"], rel=1e-9)
    printed = text(results["table2"])
    assert "published, invalid" in printed and "AdaPMixED (paper)" in printed
    other = table2(inputs(paper=True, dataset="pubmed"), queries=24)
    assert "The paper's Table 2 covers wikitext-103 alone." in other["notes"]
    assert all(row["paper"] is None for row in other["rows"])
    assert "threshold=4.5" in other["rows"][-1]["ours"]["mechanism"]


def test_figure_2(results: dict[str, dict[str, Any]]) -> None:
    result = results["figure2"]
    panels = result["settings"]["panels"]
    ours = [row["ours"] for row in result["rows"] if row["ours"] and row["group"] != "references"]
    assert {(entry["mechanism"][:9], entry["adjacency"]) for entry in ours} == {
        ("PaperRule", "add_remove")
    }
    assert panels["d"] == {"title": "models N", "anchor": "20", "paper_anchor": "100"}
    for letter, panel in panels.items():
        rows = [row for row in result["rows"] if row["group"] == letter]
        for side, anchor in (("ours", panel["anchor"]), ("paper", panel["paper_anchor"])):
            points = {label: (x, y) for label, x, y in relative(rows, side, anchor)}
            assert points[anchor] == (1.0, 0.0)
            assert set(points) == {row["label"] for row in rows if row[side] is not None}
    # Fewer models cost more.
    models = {
        r["label"]: r["ours"]["epsilon"] for r in result["rows"] if r["group"] == "d" and r["ours"]
    }
    assert models["8"] > models["16"] > models["20"]
    # The paper's β = 0.05 spent about a quarter of what the reference did, without conversion.
    rows = [row for row in result["rows"] if row["group"] == "c"]
    spent = {label: x for label, x, _ in relative(rows, "paper", "0.2")}
    assert spent["0.05"] == pytest.approx((0.460 - 0.45005) / (0.489 - 0.45005), rel=1e-3)


@pytest.mark.parametrize("experiment", ["table1", "figure2"])
@pytest.mark.slow
def test_a_result_is_enough_to_redraw(
    results: dict[str, dict[str, Any]], experiment: str, tmp_path: Path
) -> None:
    """`adapmixed-lab reproduce` on an experiment's JSON writes the same bytes again."""
    first, again = write_outputs(results[experiment], tmp_path), tmp_path / "again"
    assert main(["reproduce", str(first[0]), "--out", str(again)]) == 0
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in first
    }
    assert text(read_experiment(first[0])) == text(results[experiment])
    assert first[0].name == f"{experiment}-wikitext-103.json"
    assert [p.suffix for p in first[1:]] == [".svg", ".pdf"] * (experiment == "figure2")
    assert all(p.read_bytes().startswith(b"%PDF") for p in first[2::2])
    json.loads(first[0].read_text(encoding="utf-8"), parse_constant=pytest.fail)
