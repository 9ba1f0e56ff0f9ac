"""The report: its content as strict JSON, the table, the page and the figures."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import warnings
from decimal import Decimal
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NoReturn

import pytest

from adapmixed.evaluation import Evaluation
from adapmixed.privacy import KINDS, Guarantee
from adapmixed.report import build_report, environment, table, write_report
from adapmixed.report.figures import draw
from adapmixed.report.html import render

HOSTILE = '<script>alert("1")</script> $\\frac$ --> & id="x"'


def evaluation(
    name: str,
    kind: str,
    *,
    epsilon: float | None = None,
    perplexity: float = 50.0,
    points: int = 12,
    **changes: Any,
) -> Evaluation:
    """A method that spends `epsilon` evenly on 10 queries a point."""
    bound = kind not in ("public", "none")
    guarantee = Guarantee(
        epsilon=epsilon,
        delta={"public": 0.0, "none": 1.0}.get(kind, 1e-5),
        kind=kind,
        unit="shard",
        adjacency="zero_out" if bound else None,
        rule="per_model" if bound else None,
        order=18.0 if bound else None,
        orders=(18.0,) if bound else (),
        queries=10 * points,
    )
    curve = tuple(
        (10 * i, None if epsilon is None else epsilon * i / points) for i in range(1, points + 1)
    )
    total = math.inf if epsilon is None else epsilon
    values: dict[str, Any] = {
        "screened": 0.0,
        "seconds": 1.0,
        "tokens_per_second": 1234.5,
        "curve": curve,
        "perplexities": tuple((queries, perplexity) for queries, _ in curve),
        "breakdown": {"mixing": total, "screening": 0.0, "conversion": 0.0, "total": total},
    }
    return Evaluation(name, perplexity, 10 * points, guarantee, **(values | changes))


def every_kind() -> list[Evaluation]:
    parts = {"mixing": 0.9, "screening": 0.002, "conversion": 0.45, "total": 1.35203}
    return [
        evaluation("unprotected", "none", perplexity=45.0),
        evaluation("public", "public", epsilon=0.0, perplexity=60.0),
        evaluation("PMixED", "fixed", epsilon=8.0, perplexity=57.0),
        evaluation("claim", "published", epsilon=8.0, perplexity=56.5),
        evaluation(
            "AdaPMixED",
            "data-dependent, ex-post",
            epsilon=1.35203,
            perplexity=51.0,
            screened=0.0042,
            breakdown=parts,
        ),
        evaluation("lost", "fixed", epsilon=math.inf, perplexity=math.inf),
    ]


SAMPLE = {
    "prompt": "The with statement",
    "text": " wraps <i>&amp;</i>",
    "guarantee": "ε = 1 & no more",
    "method": "AdaPMixED",
    "kind": "data-dependent, ex-post",
}


def build(evaluations: list[Evaluation] | None = None, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "config": {"order": math.inf, "seed": 0},
        "environment": {"torch": "2"},
    }
    return build_report(evaluations or every_kind(), **(arguments | changes))


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {method["name"]: method for method in report["methods"]}


def not_strict(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


class Page(HTMLParser):
    """Elements with their attributes, and all text outside the style sheet."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._styled = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._styled = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._styled = False

    def handle_data(self, data: str) -> None:
        if not self._styled:
            self.text += data


def test_every_kind_is_covered_here() -> None:
    assert {e.guarantee.kind for e in every_kind()} == set(KINDS)


def test_every_method_has_every_field() -> None:
    report = build(sample=SAMPLE)
    assert list(report) == ["format_version", "methods", "sample", "environment", "config"]
    assert report["format_version"] == 1
    assert report["sample"] == SAMPLE
    evaluations = every_kind()
    assert [m["name"] for m in report["methods"]] == [e.name for e in evaluations]
    for method, source in zip(report["methods"], evaluations, strict=True):
        assert set(method) == {
            "name", "perplexity", "change", "queries", "epsilon", "delta", "kind", "guarantee",
            "unit", "adjacency", "rule", "order", "screened", "tokens_per_second", "breakdown",
            "curve", "perplexities",
        }  # fmt: skip
        assert method["guarantee"] == str(source.guarantee) != ""
        assert method["kind"] == source.guarantee.kind
        assert method["curve"][-1][0] == method["queries"] == 120
    unprotected = by_name(report)["unprotected"]
    assert unprotected["epsilon"] is None
    assert "no privacy guarantee" in unprotected["guarantee"]
    assert all(epsilon is None for _, epsilon in unprotected["curve"])
    assert build()["sample"] is None


def test_written_json_is_strict_and_reads_back(tmp_path: Path) -> None:
    report = build(sample=SAMPLE)
    path, _ = write_report(report, tmp_path)
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
    # The kind decides, not the name.
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
        with pytest.raises(ValueError, match="format_version must be 1, got 2"):
            view(build() | {"format_version": 2})


def test_undecodable_names_can_be_written(tmp_path: Path) -> None:
    path, _ = write_report(build(config={"file": "caf\udce9"}), tmp_path)
    assert json.loads(path.read_text(encoding="utf-8"))["config"]["file"] == "caf\\udce9"


def test_environment_names_versions_but_no_machine(tmp_path: Path) -> None:
    values = environment()
    assert {"adapmixed", "python", "torch", "transformers", "peft", "numpy"} <= set(values)
    assert {"machine", "processors", "build"} <= set(values)
    assert values["torch"] and values["peft"]
    import platform

    text = json.dumps(build(environment=values)["environment"])
    assert "/" not in text
    if len(platform.node()) > 3:
        assert platform.node() not in text


def test_table_is_aligned() -> None:
    evaluations = [*every_kind(), evaluation("日本 名", "fixed", epsilon=0.5)]
    lines = table(build(evaluations)).splitlines()
    rule = lines[1]
    ends = [m.end() for m in re.finditer("─+", rule)]
    assert len(ends) == 9
    # Wide characters take two columns.
    rows = [line.replace("日本 名", "日本 名...") for line in lines[: 2 + len(evaluations)]]
    for row in [rows[0], *rows[2:]]:
        for end in ends[:-1]:
            assert row[end : end + 2] == "  "
        for number in (1, 2, 3, 4, 7, 8):
            assert row[ends[number] - 1] != " "
    assert len({len(row) for row in [rows[0], *rows[2:]]}) == 1


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(name + "  "))
    return re.split(r" {2,}", line.strip())


def test_table_says_what_is_known_and_what_is_not() -> None:
    text = table(build())
    assert cells(text, "public") == [
        "public", "60.00", "0.0%", "0", "0", "public", "shard", "-", "1,234",
    ]  # fmt: skip
    assert cells(text, "unprotected")[1:8] == ["45.00", "-25.0%", "-", "-", "none", "-", "-"]
    assert cells(text, "PMixED")[3:8] == ["8", "1e-05", "fixed", "shard", "-"]
    assert cells(text, "claim")[5] == "published, invalid"
    assert cells(text, "AdaPMixED")[5:8] == ["data-dependent, ex-post", "shard", "0.4%"]
    assert cells(text, "lost")[1:4] == ["inf", "inf", "inf"]
    words = " ".join(text.split())
    for source in every_kind():
        assert f"{source.name}: {' '.join(str(source.guarantee).split())}" in words


def test_a_method_that_screens_shows_a_share_of_zero() -> None:
    parts = {"mixing": 0.5, "screening": 0.001, "conversion": 0.4, "total": 0.901}
    source = evaluation("m", "data-dependent, ex-post", epsilon=0.901, breakdown=parts)
    assert cells(table(build([source])), "m")[7] == "0.0%"


def test_table_passes_no_control_characters_on() -> None:
    text = table(build([evaluation("a\x1b[2J\nb", "none")]))
    assert "\x1b" not in text
    assert len(text.splitlines()[2].split("  ")[0]) == len("a.[2J.b")


@pytest.mark.parametrize(
    "epsilon", [1.2340001, 0.45005, 8.000000001, 99994.2, 3.0000e-7, 0.99991, math.nextafter(2, 3)]
)
def test_epsilon_is_rounded_up(epsilon: float) -> None:
    source = evaluation("m", "fixed", epsilon=epsilon)
    shown = cells(table(build([source])), "m")[3]
    assert Decimal(shown) >= Decimal(epsilon)
    assert Decimal(shown) <= Decimal(epsilon) * Decimal("1.001")
    # The sentence and the table never disagree.
    assert f"ε = {shown} " in str(source.guarantee)
    assert shown in render(build([source]))


def hostile_report() -> dict[str, Any]:
    evaluations = [
        evaluation(HOSTILE, "fixed", epsilon=3.0),
        evaluation("_hidden $\\frac$", "data-dependent, ex-post", epsilon=2.0, perplexity=40.0),
        evaluation("public" + HOSTILE, "public", epsilon=0.0),
    ]
    return build(
        evaluations,
        config={HOSTILE: [HOSTILE, {"nested": HOSTILE}]},
        environment={"torch": HOSTILE},
        sample={
            "prompt": HOSTILE, "text": HOSTILE, "guarantee": HOSTILE, "method": HOSTILE,
            HOSTILE: HOSTILE,
        },
    )  # fmt: skip


def test_hostile_text_stays_text() -> None:
    page = render(hostile_report())
    assert "<script" not in page.lower()
    parsed = Page(page)
    assert "script" not in {tag for tag, _ in parsed.elements}
    # Name, sentence heading, sample (prompt, text, guarantee, method, key, value), configuration
    # (twice the key, twice the value), environment, and the public method in two places.
    assert parsed.text.count(HOSTILE) >= 14
    assert page.count(escape(HOSTILE)) >= 14


def test_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    _, path = write_report(build(sample=SAMPLE), tmp_path)
    page = path.read_text(encoding="utf-8")
    parsed = Page(page)
    for tag, attributes in parsed.elements:
        assert tag not in {"script", "link", "iframe", "object", "embed", "img", "base", "form"}
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                assert value is not None and value.startswith("#"), (tag, name, value)
            elif not name.startswith("xmlns"):
                assert "//" not in (value or ""), (tag, name, value)
    assert "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", page))
    policy = [a for tag, a in parsed.elements if tag == "meta" and "http-equiv" in a]
    assert policy and str(policy[0]["content"]).startswith("default-src 'none';")


def test_page_holds_its_sections_and_unique_ids() -> None:
    parsed = Page(render(build(sample=SAMPLE)))
    for title in (
        "Summary", "What each guarantee means", "Figures", "Generated sample",
        "What this does not protect", "Configuration", "Environment",
    ):  # fmt: skip
        assert title in parsed.text
    for source in every_kind():
        assert str(source.guarantee) in parsed.text
    badges = [str(a.get("class")) for tag, a in parsed.elements if tag == "span"]
    kinds = ["public", "fixed", "ex-post", "published", "none"]
    assert {f"badge {kind}" for kind in kinds} <= set(badges)
    assert SAMPLE["guarantee"] in parsed.text and SAMPLE["text"] in parsed.text
    assert sum(tag == "svg" for tag, _ in parsed.elements) == 3
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    # Glyphs and markers are defined once per figure.
    assert len(ids) == len(set(ids)) > 10
    targets = {str(a["xlink:href"])[1:] for _, a in parsed.elements if "xlink:href" in a}
    assert targets <= set(ids)
    assert "Generated sample" not in Page(render(build())).text


def test_figures_are_the_same_bytes_and_leave_matplotlib_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    first = draw(build())
    assert dict(matplotlib.rcParams) == before
    assert [drawing.name for drawing in first] == ["curves", "tradeoff", "breakdown"]
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "none", "axes.grid": False}):
        assert draw(build()) == first
    for drawing in first:
        assert drawing.svg.startswith("<svg") and drawing.svg.endswith("</svg>")
        assert re.findall(r"https?://[^\"'\s<]*", drawing.svg) == [
            "http://www.w3.org/1999/xlink",
            "http://www.w3.org/2000/svg",
        ]
        assert "nan" not in drawing.svg.lower()
    other = every_kind()
    other[2] = evaluation("PMixED", "fixed", epsilon=4.0, perplexity=57.0)
    assert draw(build(other))[0].svg != first[0].svg


def test_figures_appear_only_with_data_and_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(build([evaluation("a", "none"), evaluation("b", "public", epsilon=0.0)])) == ()
        names = [d.name for d in draw(build([evaluation("a", "fixed", epsilon=1.0, points=1)]))]
        assert names == ["curves", "tradeoff"]
        lost = [evaluation("a", "fixed", epsilon=1.0, perplexity=math.inf)]
        assert [d.name for d in draw(build(lost))] == ["curves"]
        # Values far apart, odd names, and parts below 0.
        parts = {"mixing": 300.0, "screening": 0.0, "conversion": -1.0, "total": 299.0}
        wide = evaluation("n" * 90, "data-dependent, ex-post", epsilon=299.0, breakdown=parts)
        assert len(draw(build([*every_kind(), wide]))) == 3
        assert len(draw(hostile_report())) == 3
    caption = draw(build())[1].caption
    assert "infinite: lost" in caption


def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    report = build()
    paths = write_report(report, folder)
    assert paths == (folder / "report.json", folder / "report.html")
    before = [path.read_bytes() for path in paths]
    broken = report | {"config": {"x": math.nan}}
    with pytest.raises(ValueError):
        write_report(broken, folder)
    assert [path.read_bytes() for path in paths] == before
    assert write_report(report, str(folder)) == paths
    assert [path.read_bytes() for path in paths] == before
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "report.json"]


def test_a_failed_write_leaves_no_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("adapmixed.report.html.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(build(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reading_and_tables_need_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, adapmixed.report; "
        "print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_names_of_close_points_do_not_overlap() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from adapmixed.report.labels import draw_references, label_points
    from adapmixed.report.view import read_methods

    epsilons = (1.0, 1.02, 1.5, 9.8)
    evaluations = [evaluation(f"method {e}", "fixed", epsilon=e, perplexity=50) for e in epsilons]
    evaluations.append(evaluation("line", "none", perplexity=50.1))
    methods = read_methods(build(evaluations))
    figure = Figure(figsize=(7, 4))
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlim=(0, 10), ylim=(49, 51))
    label_points(axes, methods[:-1], draw_references(axes, methods[-1:]))
    renderer = canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) == 5
    frame = axes.get_window_extent(renderer)
    for i, box in enumerate(boxes):
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1
        assert not any(box.overlaps(other) for other in boxes[:i])
