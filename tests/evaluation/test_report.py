"""The report: its strict JSON, tables, verdict and file, and the comparisons that they show."""

from __future__ import annotations

import json
import math
import platform
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from report_cases import (
    PUBLIC,
    SAMPLE,
    build,
    by_name,
    compared_methods,
    evaluation,
    every_kind,
    lossy,
)

from adapmixed.evaluation import Evaluation
from adapmixed.evaluation.report import NEIGHBOUR_LABELS, environment, gain_kept, paired_difference
from adapmixed_lab.figures.html import draw, render


def test_every_method_has_every_field() -> None:
    report = build(sample=SAMPLE).to_json()
    assert list(report) == ["format_version", "methods", "sample", "environment", "config"]
    assert report["format_version"] == 4
    assert report["sample"] == SAMPLE
    evaluations = every_kind()
    assert [m["name"] for m in report["methods"]] == [e.name for e in evaluations]
    for method, source in zip(report["methods"], evaluations, strict=True):
        assert set(method) == {
            "name", "perplexity", "change", "difference", "kept", "queries", "planned", "epsilon",
            "delta", "kind", "guarantee", "unit", "adjacency", "method", "order", "screened",
            "tokens_per_second", "breakdown", "curve", "perplexities", "utility",
        }  # fmt: skip
        assert method["guarantee"] == str(source.guarantee) != ""
        assert method["kind"] == source.guarantee.kind
        assert method["curve"][-1][0] == method["queries"] == 120
    unprotected = by_name(build())["unprotected"]
    assert unprotected["epsilon"] is None
    assert "no privacy guarantee" in unprotected["guarantee"]
    assert all(epsilon is None for _, epsilon in unprotected["curve"])
    assert build().to_json()["sample"] is None


def test_written_json_is_strict(tmp_path: Path) -> None:
    report = build(sample=SAMPLE)
    path = report.write(tmp_path / "new" / "report.json")
    assert path.stat().st_mode & 0o077 == 0
    read = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert read == report.to_json() and list(read) == list(report.to_json())
    lost = {method["name"]: method for method in read["methods"]}["lost"]
    assert lost["perplexity"] == lost["epsilon"] == lost["curve"][-1][1] == "inf"
    assert read["config"]["order"] == "inf"
    assert build(config={"file": "a\udc80"}).to_json()["config"] == {"file": "a\\udc80"}
    assert "ε" in path.read_text(encoding="utf-8")


def test_change_is_against_the_public_method() -> None:
    methods = by_name(build())
    assert methods["public"]["change"] == 0.0
    assert methods["unprotected"]["change"] == pytest.approx(-0.25, rel=1e-12)
    assert methods["AdaPMixED"]["change"] == pytest.approx(-0.15, rel=1e-12)
    assert methods["lost"]["change"] == "inf"
    # The kind of the guarantee decides, not the name.
    without = build([evaluation("public", "fixed", epsilon=1.0), evaluation("other", "none")])
    assert [m["change"] for m in without.to_json()["methods"]] == [None, None]
    infinite = build([evaluation("public", "public", epsilon=0.0, perplexity=math.inf)])
    assert by_name(infinite)["public"]["change"] is None


def test_what_cannot_be_reported_is_refused() -> None:
    with pytest.raises(ValueError, match="report must not hold NaN"):
        build([evaluation("m", "none", perplexity=math.nan)]).to_json()
    with pytest.raises(ValueError, match="report must hold JSON values alone: .*Path"):
        build(config={"a": [1, Path("x")]}).to_json()


def test_environment_names_versions_but_no_machine(tmp_path: Path) -> None:
    values = environment()
    assert {"adapmixed", "python", "torch", "transformers", "peft", "numpy"} <= set(values)
    assert {"machine", "processor", "processors", "build"} <= set(values)
    assert values["torch"] and values["peft"]
    text = json.dumps(build(environment=values).to_json()["environment"])
    assert "/" not in text
    if len(platform.node()) > 3:
        assert platform.node() not in text


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(name + "  "))
    return re.split(r" {2,}", line.strip())


def test_table_says_what_is_known_and_what_is_not() -> None:
    text = build().text()
    assert cells(text, "public") == ["public", "60.00", "0.0%", "-", "0", "-", "public"]
    assert cells(text, "unprotected")[1:] == ["45.00", "-25.0%", "-", "-", "-", "none"]
    assert cells(text, "PMixED")[4:] == ["8", "120 tokens", "fixed, zero-out"]
    assert cells(text, "claim")[6] == "published, invalid, zero-out"
    assert cells(text, "AdaPMixED")[4] == "1.353"  # rounded up
    assert cells(text, "AdaPMixED")[6] == "data-dependent, ex-post, zero-out"
    assert cells(text, "lost")[1:5] == ["inf", "inf", "-", "inf"]
    words = " ".join(text.split())
    for source in every_kind():
        assert f"{source.name}: {' '.join(str(source.guarantee).split())}" in words


@pytest.mark.slow
def test_every_epsilon_is_shown_with_its_neighbours() -> None:
    """Table, page and figures name the adjacency, since other ε are not comparable."""
    seen = []
    for way, words in NEIGHBOUR_LABELS.items():
        source = evaluation("m", "fixed", epsilon=1.0)
        other = replace(source, guarantee=replace(source.guarantee, adjacency=way))
        report = build([other])
        assert cells(report.text(), "m")[6] == f"fixed, {words}"
        assert f"<td>{words}</td>" in render(report)
        seen.append([drawing.svg for drawing in draw(report)])
    assert list(NEIGHBOUR_LABELS) == ["zero_out", "add_remove", "replace_one"]
    # Legends of both figures, and marks of the second.
    assert all(len(set(drawn)) == 3 for drawn in zip(*seen, strict=True)) and len(seen[0]) == 2


def test_a_method_that_screens_shows_a_share_of_zero() -> None:
    parts = {"mixing": 0.5, "screening": 0.001, "conversion": 0.4, "total": 0.901}
    source = evaluation("m", "data-dependent, ex-post", epsilon=0.901, breakdown=parts)
    assert '<td class="number">0.0%</td>' in render(build([source]))


def test_table_passes_no_control_characters_on() -> None:
    text = build([evaluation("a\x1b[2J\nb", "none")]).text()
    assert "\x1b" not in text and len(text.splitlines()[4].split("  ")[0]) == len("a.[2J.b")


@pytest.mark.parametrize("delta", [1.00000449e-5, 1e-5, 0.001])
def test_delta_is_not_rounded(delta: float) -> None:
    source = evaluation("m", "fixed", epsilon=3.0)
    source = replace(source, guarantee=replace(source.guarantee, delta=delta))
    assert f"at δ = {delta!r}, a guarantee" in " ".join(build([source]).text().split())
    assert f'<td class="number">{delta}</td>' in render(build([source]))


def last_line(evaluations: list[Evaluation]) -> str:
    return build(evaluations).text().splitlines()[-1]


def test_the_verdict_names_the_tokens_of_epsilon_and_not_those_scored() -> None:
    random = np.random.default_rng(3)
    gain = (0.3 + 0.05 * random.standard_normal(16)).tolist()
    evaluations = compared_methods(gain, [0.3 * value + 0.01 for value in gain])
    kept = gain_kept(evaluations[2], evaluations[0], evaluations[1])
    assert kept is not None
    band = math.ceil(200 * kept[1])
    assert last_line(evaluations) == (
        f"pool keeps {100 * kept[0]:.0f} % ± {band} of what the unprotected ensemble gains, at "
        "ε = 3 for 20,000 tokens."
    )
    table = build(evaluations).text().split("\n\n")[1].splitlines()
    assert all(len(line.split("  ")) >= 7 for line in table[:1]) and len(table[1].split()) == 7
    assert "20,000 tokens" in table[-1] and "1,024" not in table[-1]
    budgeted = replace(evaluations[2].guarantee, method="per-shard budget", budget=None)
    spent = replace(evaluations[2], guarantee=budgeted)
    assert last_line([*evaluations[:2], spent]).endswith("at ε = 3 for any number of tokens.")


def test_the_best_reference_is_named_and_a_loss_is_no_gain() -> None:
    gain = [0.2] * 16
    evaluations = compared_methods(gain, [-0.02] * 16)
    better = lossy("pool, κ = 2", "none", [PUBLIC - 0.4] * 16)
    unsure = lossy("pool, κ = 4", "none", [PUBLIC - 1.5, PUBLIC + 0.6] * 8)  # 0.45, or nothing
    ada = lossy("ada", "data-dependent, ex-post", [PUBLIC - 0.1] * 16, epsilon=4.0)
    lines = build([*evaluations, unsure, better, ada]).text().splitlines()
    assert lines[-2:] == [
        "pool keeps nothing (-5 % ± 1) of what 'pool, κ = 2' gains, at ε = 3 for 20,000 tokens.",
        "ada keeps 25 % ± 1 of what 'pool, κ = 2' gains, at ε = 4 (a private number) for 1,024 "
        "tokens.",
    ]


NO_GAIN = "on this text no gain of the unprotected ensemble over the public model is certain "


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ([0.3] * 7, "that takes 512 scored tokens."),
        ([-0.1] * 16, NO_GAIN + "(+10.5% [+10.5, +10.5])."),
        ([0.5, -0.45] * 8, NO_GAIN + "(-2.5% "),
    ],
)
def test_without_a_gain_there_is_no_share(gain: list[float], words: str) -> None:
    evaluations = compared_methods(gain, [0.01] * len(gain))
    assert last_line(evaluations).startswith(f"No share of the gain is stated: {words}")
    kept = [method["kept"] for method in build(evaluations).to_json()["methods"]]
    assert kept == [None, *[{"of": "unprotected", "share": None, "error": None}] * 2]
    for left_out in range(3):  # no reference, or no ε
        assert "gain is" not in last_line(evaluations[:left_out] + evaluations[left_out + 1 :])


# Intervals of paired differences, and the share of a gain that is kept.


blocks_of = partial(lossy, "m", "fixed", epsilon=1.0)


def test_paired_differences_have_the_interval_of_a_block_bootstrap() -> None:
    """The text's own spread, which both share, leaves the interval."""
    text = np.random.default_rng(1).normal(4.0, 1.0, 40)
    gaps = np.random.default_rng(2).normal(-0.1, 0.02, 40)
    public, method = blocks_of(list(text)), blocks_of(list(text + gaps))
    difference = paired_difference([method], [public])
    assert difference is not None and difference["blocks"] == 40
    low, mean, high = (float(difference[name] or 0.0) for name in ("low", "mean", "high"))
    assert mean == pytest.approx(float(gaps.mean()), abs=1e-9)
    error = float(gaps.std()) / math.sqrt(40)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)
    assert paired_difference([method], [public]) == difference  # seeded
    # Texts count by their blocks; few blocks, or an infinite loss, have no interval.
    parts = (slice(20), slice(20, 40))
    whole, other = ([blocks_of(list(losses[s])) for s in parts] for losses in (text + gaps, text))
    both = paired_difference(whole, other)
    assert both is not None and both["mean"] == pytest.approx(mean, abs=1e-9)
    assert both["blocks"] == 40
    few = paired_difference([blocks_of([4.0] * 7)], [blocks_of([4.5] * 7)])
    assert few == {"mean": pytest.approx(-0.5), "low": None, "high": None, "blocks": 7}
    assert paired_difference([blocks_of([math.inf])], [blocks_of([4.0])]) is None
    # A long text has no more than 64 blocks.
    long = paired_difference([blocks_of([4.0] * 500)], [blocks_of([4.5] * 500)])
    assert long is not None and long["blocks"] == 64


def test_the_share_and_its_band_are_those_of_the_definition() -> None:
    random = np.random.default_rng(1)
    gain = 0.3 + 0.1 * random.standard_normal(20)
    kept = 0.4 * gain + 0.05 * random.standard_normal(20)
    public, unprotected, pool = compared_methods(gain.tolist(), kept.tolist())
    stated = gain_kept(pool, public, unprotected)
    assert stated is not None
    share = math.log(public.perplexity / pool.perplexity)
    share /= math.log(public.perplexity / unprotected.perplexity)
    assert stated[0] == pytest.approx(share) == pytest.approx(kept.sum() / gain.sum())
    left = [np.delete(kept, i).sum() / np.delete(gain, i).sum() for i in range(20)]
    error = math.sqrt(19 / 20 * sum((value - np.mean(left)) ** 2 for value in left))
    assert stated[1] == pytest.approx(error) and 0.01 < error < 0.1
