"""The report as one self-contained HTML page."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from adapmixed.files import write_file
from adapmixed.report.diagnostics import (
    UTILITY_TITLES,
    UTILITY_WORDS,
    utility_cells,
    utility_of,
)
from adapmixed.report.runs import runs_rows, runs_words
from adapmixed.report.table import TITLES, cells
from adapmixed.report.verdict import verdict
from adapmixed.report.view import (
    INTERVAL_WORDS,
    KEPT_WORDS,
    KIND_LABELS,
    MISSING,
    Method,
    format_neighbours,
    read_methods,
    run_words,
)
from adapmixed.report.write import write_report
from adapmixed_lab.figures.figures import draw
from adapmixed_lab.figures.page import PAGE, STYLE, UNPROTECTED_NOTES
from adapmixed_lab.figures.style import Drawing

_BADGES = {
    "public": "public",
    "fixed": "fixed",
    "data-dependent, ex-post": "ex-post",
    "published": "published",
    "none": "none",
}


def write_page(
    report: Mapping[str, object], folder: Path | str, *, figures: bool = False
) -> tuple[Path, ...]:
    """Write report.json and report.html, each replaced as a whole or not at all.

    Args:
        report: from `build_report`, or the same read back from JSON.
        folder: created if it is missing.
        figures: also write every figure as NAME.svg and NAME.pdf.

    Returns:
        the paths of report.json (UTF-8, strict JSON), report.html (no scripts, no network) and of
        the figures.

    Raises:
        ValueError: the report has another format version, or a value that strict JSON cannot hold.
    """
    drawings = draw(report)
    files = {"report.html": _page(report, drawings).encode()}
    for one in drawings if figures else ():
        files |= {f"{one.name}.svg": f"{one.svg}\n".encode(), f"{one.name}.pdf": one.pdf}
    paths = [write_report(report, folder)]
    for name, content in files.items():
        paths.append(Path(folder) / name)
        write_file(paths[-1], content)
    return tuple(paths)


def render(report: Mapping[str, object]) -> str:
    """Return the page, in which all text of the report is escaped."""
    return _page(report, draw(report))


def _page(report: Mapping[str, object], drawings: Iterable[Drawing]) -> str:
    methods, runs = read_methods(report), report.get("runs")
    figures = "".join(
        f"<figure>{drawing.svg}<figcaption>{escape(drawing.caption)}</figcaption></figure>\n"
        for drawing in drawings
    )
    sections = [
        _section("Verdict", _verdict(report)),
        _section("Summary", _summary(methods)),
        _section("Runs", _runs(runs) if isinstance(runs, list) else ""),
        _section("What each guarantee means", _guarantees(methods)),
        _section("Utility and the theorem’s bound", _utility(methods)),
        _section("Figures", figures),
        _section("Generated sample", _sample(report.get("sample"))),
        _section("What this does not protect", _notes()),
        _section("Configuration", _settings(report.get("config"))),
        _section("Environment", _settings(report.get("environment"))),
    ]
    config: Any = report["config"]
    run = escape(run_words(config, methods))
    return PAGE.format(style=STYLE, run=run, sections="\n".join(filter(None, sections)))


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}</section>" if body else ""


def _verdict(report: Mapping[str, Any]) -> str:
    sentences = verdict(report.get("runs") or report["methods"])
    return "".join(f'<p class="lead">{escape(one)}</p>\n' for one in sentences)


def _summary(methods: Sequence[Method]) -> str:
    titles = (*TITLES[:-1], "δ", "guarantee", "neighbours", "unit", "screened", "tokens/s")
    rows: list[tuple[str, ...]] = []
    for method in methods:
        more = (
            _delta(method),
            _badge(method.kind),
            escape(format_neighbours(method.adjacency)),
            escape(_unit(method)),
            _screened(method),
            _rate(method.tokens_per_second),
        )
        rows.append(tuple(map(_typeset, (*map(escape, cells(method)[:-1]), *more))))
    return _table(
        [titles, *rows],
        {1, 2, 3, 4, 5, 6, 10, 11},
        "ε is in nats and rounded up. Compare values of ε only if the kind of guarantee, the "
        "neighbours and the unit are the same. Perplexity and a data-dependent ε come from private "
        f"data and are for the operator only. {INTERVAL_WORDS} {KEPT_WORDS}",
    )


def _delta(method: Method) -> str:
    """Return δ without rounding, or `MISSING` without a guarantee."""
    return MISSING if method.epsilon is None else repr(method.delta).removesuffix(".0")


def _unit(method: Method) -> str:
    """Return the unit that is protected, or `MISSING` if nothing is."""
    return MISSING if method.epsilon is None else method.unit


def _screened(method: Method) -> str:
    """Return the share of screened queries in percent, or `MISSING` without screening."""
    screens = method.screened > 0 or method.breakdown.get("screening", 0.0) > 0
    return f"{100 * method.screened:.1f}%" if screens else MISSING


def _rate(rate: float | None) -> str:
    """Return tokens per second, or `MISSING` if speed was not reported."""
    if rate is None:
        return MISSING
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _runs(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = [[escape(cell) for cell in row] for row in runs_rows(entries)]
    words = f"{runs_words(entries)} The sections below and the figures show run 1."
    return _table(rows, set(), words)


def _utility(methods: Sequence[Method]) -> str:
    found = [utility_cells(method) for method in methods if utility_of(method) is not None]
    rows = [[escape(cell).replace("-", "−") for cell in row[1:]] for row in found]
    named = [[escape(row[0]), *rest] for row, rest in zip(found, rows, strict=True)]
    return _table([UTILITY_TITLES, *named], {1, 2, 3}, UTILITY_WORDS) if named else ""


def _table(rows: Sequence[Iterable[str]], numbers: set[int], words: str) -> str:
    """Return the markup of a table, its head first, with a note below; cells are markup."""
    body = "".join(_row("td", row, numbers) for row in rows[1:])
    return (
        f'<div class="scroll"><table>\n<thead>{_row("th", rows[0], numbers)}</thead>\n'
        f"<tbody>\n{body}</tbody>\n</table></div>\n"
        f'<p class="small">{words}</p>\n'
    )


def _row(tag: str, cells: Iterable[str], numbers: set[int]) -> str:
    parts = []
    for i, cell in enumerate(cells):
        name = ' class="number"' if i in numbers else ""
        parts.append(f"<{tag}{name}>{cell}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>\n"


def _typeset(cell: str) -> str:
    """Return the text with a typographic minus sign or dash."""
    if cell == MISSING:
        return "–"
    return cell.replace("-", "−") if re.fullmatch(r"[-+±0-9.,%\[\] ]+", cell) else cell


def _badge(kind: str) -> str:
    style = _BADGES.get(kind, "none")
    return f'<span class="badge {style}">{escape(KIND_LABELS.get(kind, kind))}</span>'


def _guarantees(methods: Sequence[Method]) -> str:
    entries = [
        f"<dt>{escape(m.name)} {_badge(m.kind)}</dt>\n<dd>{escape(m.guarantee)}</dd>\n"
        for m in methods
    ]
    return f'<dl class="guarantees">\n{"".join(entries)}</dl>\n'


def _sample(sample: object) -> str:
    if not isinstance(sample, Mapping):
        return ""
    prompt = sample.get("prompt")
    start = f'<span class="prompt">{escape(prompt)}</span>' if prompt else ""
    head = [escape(sample["method"])] if "method" in sample else []
    head += [_badge(sample["kind"])] if "kind" in sample else []
    known = ("text", "guarantee", "prompt", "method", "kind")
    rest = {key: value for key, value in sample.items() if key not in known}
    return (
        (f"<p>{' '.join(head)}</p>\n" if head else "")
        + f'<blockquote class="sample">{start}{escape(sample["text"])}</blockquote>\n'
        + ('<p class="small">Grey: the prompt. Black: the generated text.</p>\n' if prompt else "")
        + f"<p>{escape(sample['guarantee'])}</p>\n"
        + _settings(rest)
    )


def _notes() -> str:
    return f"<ul>\n{''.join(f'<li>{note}</li>{chr(10)}' for note in UNPROTECTED_NOTES)}</ul>\n"


def _settings(values: object) -> str:
    """Return a table of names and values; nested names are joined by dots."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>\n"
        for name, value in _flatten(values, "")
    )
    return f'<div class="scroll"><table class="settings">\n{rows}</table></div>\n' if rows else ""


def _flatten(value: object, name: str) -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from _flatten(item, f"{name}[{i}]")
    elif isinstance(value, list | tuple):
        yield name, ", ".join(_word(item) for item in value) or "–"
    elif name:
        yield name, _word(value)


def _word(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
