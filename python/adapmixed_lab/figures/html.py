"""The report as one self-contained HTML page, from the template ``report.html``."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from adapmixed.evaluation import Evaluation
from adapmixed.evaluation.report import (
    INTERVAL_WORDS,
    KEPT_WORDS,
    KIND_LABELS,
    MISSING,
    TITLES,
    UTILITY_TITLES,
    UTILITY_WORDS,
    Report,
    format_neighbours,
    row,
)
from adapmixed.files import write_file
from adapmixed_lab.figures.figures import draw
from adapmixed_lab.figures.style import DrawnFigure


def write_page(report: Report, folder: Path | str, *, figures: bool = False) -> tuple[Path, ...]:
    """Write report.json and report.html, each replaced as a whole or not at all.

    Args:
        report: the results.
        folder: created if it is missing.
        figures: also write every figure as NAME.svg and NAME.pdf.

    Returns:
        the paths of report.json (UTF-8, strict JSON), report.html (no scripts, no network) and of
        the figures.

    Raises:
        ValueError: the report has a value that strict JSON cannot hold.
    """
    drawings = draw(report)
    files = {"report.html": render(report, drawings).encode()}
    for one in drawings if figures else ():
        files |= {f"{one.name}.svg": f"{one.svg}\n".encode(), f"{one.name}.pdf": one.pdf}
    paths = [report.write(Path(folder) / "report.json")]
    for name, content in files.items():
        paths.append(Path(folder) / name)
        write_file(paths[-1], content)
    return tuple(paths)


def render(report: Report, drawings: tuple[DrawnFigure, ...] = ()) -> str:
    """Return the page with these drawings, in which all text of the report is escaped."""
    page: str = template("report.html").render(
        report=report,
        summary=[_SUMMARY, *map(_summary, report.methods)],
        words=f"{INTERVAL_WORDS} {KEPT_WORDS}",
        runs=[TITLES, *map(row, report.runs)],
        utility=[UTILITY_TITLES, *report.utility_rows()],
        utility_words=UTILITY_WORDS,
        drawings=drawings,
    )
    return page


def template(name: str) -> Any:
    """Return a template, which escapes all that it is given."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"badge": _badge}
    return environment.get_template(name)


_SUMMARY = (*TITLES[:-1], "δ", "guarantee", "neighbours", "unit", "screened", "tokens/s")


def _summary(one: Evaluation) -> list[str]:
    """Return the cells of a method, in the order of `_SUMMARY`."""
    guarantee, rate = one.guarantee, one.tokens_per_second
    promised = guarantee.epsilon is not None
    screens = one.screened > 0 or one.breakdown.get("screening", 0.0) > 0
    return [
        *row(one)[:-1],
        repr(guarantee.delta).removesuffix(".0") if promised else MISSING,  # not rounded
        _badge(guarantee.kind),
        format_neighbours(guarantee.adjacency),
        guarantee.unit if promised else MISSING,
        f"{100 * one.screened:.1f}%" if screens else MISSING,
        MISSING if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
    ]


def _badge(kind: str) -> Markup:
    """Return the label of a kind of guarantee as markup."""
    label = KIND_LABELS.get(kind, kind)
    return Markup('<span class="badge {}">{}</span>').format(kind.rpartition(", ")[2], label)
