"""The report's page and figures."""

from __future__ import annotations

import math
import re
import warnings

import pytest
from markupsafe import escape
from report_cases import HOSTILE, SAMPLE, Page, build, by_name, evaluation, every_kind

from adapmixed.evaluation import Evaluation
from adapmixed.evaluation.report import Report
from adapmixed_lab.figures.html import draw, render, write_page


def hostile_report() -> Report:
    evaluations = [
        evaluation(HOSTILE, "fixed", epsilon=3.0),
        evaluation("_hidden $\\frac$", "data-dependent, ex-post", epsilon=2.0, perplexity=40.0),
        evaluation("public" + HOSTILE, "public", epsilon=0.0),
    ]
    return build(
        evaluations,
        sample={
            "prompt": HOSTILE, "text": HOSTILE, "guarantee": HOSTILE, "mechanism": HOSTILE,
            HOSTILE: HOSTILE,
        },
    )  # fmt: skip


def test_hostile_text_stays_text() -> None:
    report = hostile_report()
    page = render(report, draw(report))
    assert "<script" not in page.lower()
    parsed = Page(page)
    assert "script" not in {tag for tag, _ in parsed.elements}
    # Name, sentence heading, sample (prompt, text, guarantee, method, key, value), and the public
    # method in two places.
    assert parsed.text.count(HOSTILE) >= 10
    assert page.count(escape(HOSTILE)) >= 10


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    _, path = write_page(build(sample=SAMPLE), tmp_path_factory.mktemp("page"))
    return path.read_text(encoding="utf-8")


def test_page_loads_nothing_and_runs_nothing(page: str) -> None:
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


def test_page_holds_its_sections_and_unique_ids(page: str) -> None:
    parsed = Page(page)
    for title in (
        "Summary", "What each guarantee means", "Figures", "Generated sample",
        "What this does not protect",
    ):  # fmt: skip
        assert title in parsed.text
    for source in every_kind():
        assert str(source.guarantee) in parsed.text
    badges = [str(a.get("class")) for tag, a in parsed.elements if tag == "span"]
    kinds = ["public", "fixed", "ex-post", "published", "none"]
    assert {f"badge {kind}" for kind in kinds} <= set(badges)
    assert SAMPLE["guarantee"] in parsed.text and SAMPLE["text"] in parsed.text
    assert sum(tag == "svg" for tag, _ in parsed.elements) == 2
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    # Glyphs and markers are defined once per figure.
    assert len(ids) == len(set(ids)) > 10
    targets = {str(a["xlink:href"])[1:] for _, a in parsed.elements if "xlink:href" in a}
    assert targets <= set(ids)


def test_the_verdict_comes_first() -> None:
    assert "No share of the gain is stated: that takes 512 scored tokens." in Page(page_of()).text
    page = page_of(
        evaluation("public", "public", epsilon=0.0, perplexity=60.0, points=96),
        evaluation("<m>", "fixed", epsilon=3.0, perplexity=51.96, points=96),
        evaluation("unprotected", "none", perplexity=45.0, points=96),
    )
    # log(60/51.96) of log(60/45)
    assert (
        "&lt;m&gt; keeps 50 % ± 1 of what the unprotected ensemble gains, at ε = 3 for 960" in page
    )
    assert page.index("<h2>Verdict</h2>") < page.index("<h2>Summary</h2>")
    assert '<td class="number">50 % ± 1</td>' in page and "Generated sample" not in page
    assert "Verdict" not in page_of(*every_kind()[2:])


def page_of(*evaluations: Evaluation) -> str:
    return render(build([*evaluations]))


@pytest.mark.slow
def test_figures_are_the_same_bytes_and_leave_matplotlib_alone() -> None:
    import matplotlib

    before, methods = dict(matplotlib.rcParams), every_kind()[2:5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = draw(build(methods, validation=VALIDATION))
    assert dict(matplotlib.rcParams) == before
    names = [drawing.name for drawing in first]
    assert names == ["curves", "tradeoff", "validation"]
    assert "For the operator only" in first[2].caption
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "none", "axes.grid": False}):
        again = draw(build(methods, validation=VALIDATION))
        assert [(d.svg, d.pdf) for d in again] == [(d.svg, d.pdf) for d in first]
    for drawing in first:
        assert drawing.svg.startswith("<svg") and drawing.svg.endswith("</svg>")
        assert drawing.pdf.startswith(b"%PDF") and b"CreationDate" not in drawing.pdf
        assert re.findall(r"https?://[^\"'\s<]*", drawing.svg) == [
            "http://www.w3.org/1999/xlink",
            "http://www.w3.org/2000/svg",
        ]
        assert "nan" not in drawing.svg.lower()
    methods[0] = evaluation("PMixED", "fixed", epsilon=4.0, perplexity=57.0)
    assert draw(build(methods))[0].svg != first[0].svg


def test_figures_appear_only_with_data_and_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(build([evaluation("a", "none"), evaluation("b", "public", epsilon=0.0)])) == ()
        names = [d.name for d in draw(build([evaluation("a", "fixed", epsilon=1.0, points=1)]))]
        assert names == ["tradeoff"]
        lost = [evaluation("a", "fixed", epsilon=1.0, perplexity=math.inf)]
        assert [d.name for d in draw(build(lost))] == ["curves"]
        # Values far apart, and odd names.
        wide = evaluation("n" * 90, "data-dependent, ex-post", epsilon=299.0)
        assert len(draw(build([*every_kind(), wide]))) == 2
        assert len(draw(hostile_report())) == 2
    caption = draw(build())[1].caption
    assert "infinite: lost" in caption


# The utility theorem, and the members' losses.


def with_utility() -> list[Evaluation]:
    names = ("bound", "mean_bound", "loss", "ensemble_loss", "gap")
    some = dict(zip(names, (2.5, 0.75, 4.1, 4.0, 0.1), strict=True))
    edge = dict.fromkeys(names, math.inf) | {"gap": None}
    return [
        evaluation("public", "public", epsilon=0.0),
        evaluation("some", "data-dependent, ex-post", epsilon=1.0, utility=some),
        evaluation("one" + HOSTILE, "data-dependent, ex-post", epsilon=2.0, utility=some),
        evaluation("edge", "fixed", epsilon=3.0, utility=edge),
    ]


VALIDATION = [
    {"member": f"member-{i:03d}", "loss": 4.0 + 0.1 * i, "public_loss": 4.5} for i in range(4)
]


def test_report_holds_what_was_found() -> None:
    report = build(with_utility(), validation=VALIDATION)
    utilities = {name: method["utility"] for name, method in by_name(report).items()}
    assert utilities["some"] == with_utility()[1].utility and utilities["public"] is None
    assert utilities["edge"]["gap"] is None and utilities["edge"]["bound"] == "inf"
    assert report.to_json()["validation"] == VALIDATION
    assert "validation" not in build().to_json()
    text = report.text()
    row = next(line for line in text.splitlines() if re.match(r"some +0\.1 ", line))
    assert row.split() == ["some", "0.1", "0.75", "2.5"]
    assert re.search(r"^edge +- +inf +inf$", text, re.MULTILINE)
    assert "PRIVATE" in text and "PRIVATE" not in build().text()
