"""The report: its strict JSON, its table and its files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import NoReturn

import pytest
from report_cases import SAMPLE, build, by_name, evaluation, every_kind

from adapmixed.report import build_report, environment, table, write_report
from adapmixed.report.view import NEIGHBOUR_LABELS
from adapmixed_lab.figures.figures import draw
from adapmixed_lab.figures.html import render


def not_strict(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def test_every_method_has_every_field() -> None:
    report = build(sample=SAMPLE)
    assert list(report) == ["format_version", "methods", "sample", "environment", "config"]
    assert report["format_version"] == 2
    assert report["sample"] == SAMPLE
    evaluations = every_kind()
    assert [m["name"] for m in report["methods"]] == [e.name for e in evaluations]
    for method, source in zip(report["methods"], evaluations, strict=True):
        assert set(method) == {
            "name", "perplexity", "change", "difference", "kept", "queries", "planned", "epsilon",
            "delta", "kind", "guarantee", "unit", "adjacency", "method", "order", "screened",
            "tokens_per_second", "breakdown", "curve", "perplexities",
        }  # fmt: skip
        assert method["guarantee"] == str(source.guarantee) != ""
        assert method["kind"] == source.guarantee.kind
        assert method["curve"][-1][0] == method["queries"] == 120
    unprotected = by_name(report)["unprotected"]
    assert unprotected["epsilon"] is None
    assert "no privacy guarantee" in unprotected["guarantee"]
    assert all(epsilon is None for _, epsilon in unprotected["curve"])
    assert build()["sample"] is None


@pytest.mark.slow
def test_written_json_is_strict_and_reads_back(tmp_path: Path) -> None:
    report = build(sample=SAMPLE)
    path = write_report(report, tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    read = json.loads(path.read_text(encoding="utf-8"), parse_constant=not_strict)
    assert read == report
    assert list(read) == list(report)
    lost = by_name(read)["lost"]
    assert lost["perplexity"] == lost["epsilon"] == lost["curve"][-1][1] == "inf"
    assert read["config"]["order"] == "inf"
    assert "ε" in path.read_text(encoding="utf-8")
    assert table(read) == table(report)
    assert render(read) == render(report)


def test_change_is_against_the_public_method() -> None:
    methods = by_name(build())
    assert methods["public"]["change"] == 0.0
    assert methods["unprotected"]["change"] == pytest.approx(-0.25, rel=1e-12)
    assert methods["AdaPMixED"]["change"] == pytest.approx(-0.15, rel=1e-12)
    assert methods["lost"]["change"] == "inf"
    # The kind of the guarantee decides, not the name.
    without = build([evaluation("public", "fixed", epsilon=1.0), evaluation("other", "none")])
    assert [m["change"] for m in without["methods"]] == [None, None]
    infinite = build([evaluation("public", "public", epsilon=0.0, perplexity=math.inf)])
    assert infinite["methods"][0]["change"] is None


@pytest.mark.parametrize("points", [1, 2, 199, 200, 201, 400, 5003])
def test_long_curves_are_thinned_but_keep_their_end(points: int) -> None:
    source = evaluation("m", "fixed", epsilon=2.0, points=points)
    curve = build([source])["methods"][0]["curve"]
    assert len(curve) == min(points, 200)
    assert curve[0] == list(source.curve[0]) and curve[-1] == list(source.curve[-1])
    assert all(a[0] < b[0] for a, b in zip(curve, curve[1:], strict=False))
    assert {tuple(point) for point in curve} <= set(source.curve)


def test_what_cannot_be_reported_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        build_report([], config={}, environment={})
    with pytest.raises(ValueError, match="distinct names"):
        build([evaluation("a", "none"), evaluation("a", "none")])
    with pytest.raises(ValueError, match="m.perplexity must not be NaN"):
        build([evaluation("m", "none", perplexity=math.nan)])
    with pytest.raises(ValueError, match=r"config\.a\[1\] must be a JSON value, got \w*Path"):
        build(config={"a": [1, Path("x")]})
    with pytest.raises(ValueError, match="'guarantee'"):
        build(sample={"text": "x"})
    with pytest.raises(ValueError, match="'guarantee'"):
        build(sample={"text": "x", "guarantee": " "})
    with pytest.raises(ValueError, match="'kind'"):
        build(sample={"text": "x", "guarantee": "y", "kind": "good"})
    for view in (table, render):
        for version in (1, 3):  # an older version, and a newer one
            with pytest.raises(ValueError, match=f"format_version must be 2, got {version}"):
                view(build() | {"format_version": version})


def test_environment_names_versions_but_no_machine(tmp_path: Path) -> None:
    values = environment()
    assert {"adapmixed", "python", "torch", "transformers", "peft", "numpy"} <= set(values)
    assert {"machine", "processor", "processors", "build"} <= set(values)
    assert values["torch"] and values["peft"]
    import platform

    text = json.dumps(build(environment=values)["environment"])
    assert "/" not in text
    if len(platform.node()) > 3:
        assert platform.node() not in text


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(name + "  "))
    return re.split(r" {2,}", line.strip())


def test_table_says_what_is_known_and_what_is_not() -> None:
    text = table(build())
    assert cells(text, "public") == ["public", "60.00", "0.0%", "-", "0", "-", "public"]
    assert cells(text, "unprotected")[1:] == ["45.00", "-25.0%", "-", "-", "-", "none"]
    assert cells(text, "PMixED")[4:] == ["8", "120 tokens", "fixed, zero-out"]
    assert cells(text, "claim")[6] == "published, invalid, zero-out"
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
        assert cells(table(report), "m")[6] == f"fixed, {words}"
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
    text = table(build([evaluation("a\x1b[2J\nb", "none")]))
    assert "\x1b" not in text
    assert len(text.splitlines()[2].split("  ")[0]) == len("a.[2J.b")


@pytest.mark.parametrize(
    "epsilon", [1.2340001, 0.45005, 8.000000001, 99994.2, 3.0000e-7, 0.99991, math.nextafter(2, 3)]
)
@pytest.mark.slow
def test_epsilon_is_rounded_up(epsilon: float) -> None:
    source = evaluation("m", "fixed", epsilon=epsilon)
    shown = cells(table(build([source])), "m")[4]
    assert Decimal(shown) >= Decimal(epsilon)
    assert Decimal(shown) <= Decimal(epsilon) * Decimal("1.001")
    # The sentence and the table never disagree.
    assert f"ε = {shown} " in str(source.guarantee)
    assert shown in render(build([source]))


@pytest.mark.parametrize("delta", [1.00000449e-5, 1e-5, 0.001])
def test_delta_is_not_rounded(delta: float) -> None:
    source = evaluation("m", "fixed", epsilon=3.0)
    source = replace(source, guarantee=replace(source.guarantee, delta=delta))
    assert f"at δ = {delta!r}, a guarantee" in " ".join(table(build([source])).split())
    assert f'<td class="number">{delta}</td>' in render(build([source]))


def test_a_failed_write_leaves_no_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("adapmixed.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(build(), tmp_path)
    assert list(tmp_path.iterdir()) == []
