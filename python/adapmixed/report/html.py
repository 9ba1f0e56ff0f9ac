"""The report as one self-contained page, and both files written."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from adapmixed.report.page import PAGE, STYLE, UNPROTECTED_NOTES
from adapmixed.report.view import (
    KIND_LABELS,
    MISSING,
    Method,
    format_change,
    format_delta,
    format_perplexity,
    format_rate,
    format_screened,
    format_unit,
    read_methods,
    show_epsilon,
)

_BADGES = {
    "public": "public",
    "fixed": "fixed",
    "data-dependent, ex-post": "ex-post",
    "published": "published",
    "none": "none",
}


def write_report(report: Mapping[str, object], folder: Path | str) -> tuple[Path, Path]:
    """Writes report.json and report.html, each replaced as a whole or not at all.

    Args:
        report: from :func:`build_report`, or the same read back from JSON.
        folder: created where missing.

    Returns:
        the paths of report.json (UTF-8, strict JSON) and report.html (no scripts, no network).

    Raises:
        ValueError: another format version, or a value that strict JSON cannot hold.
    """
    data = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    page = render(report)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "report.json", folder / "report.html"
    for path, text in zip(paths, (data, page), strict=True):
        _replace(path, text)
    return paths


def render(report: Mapping[str, object]) -> str:
    """The page as a string; everything that is not markup of its own is escaped."""
    from adapmixed.report.figures import draw  # imports matplotlib

    methods = read_methods(report)
    figures = "".join(
        f"<figure>{drawing.svg}<figcaption>{escape(drawing.caption)}</figcaption></figure>\n"
        for drawing in draw(report)
    )
    sections = [
        _section("Summary", _summary(methods)),
        _section("What each guarantee means", _guarantees(methods)),
        _section("Figures", figures),
        _section("Generated sample", _sample(report.get("sample"))),
        _section("What this does not protect", _notes()),
        _section("Configuration", _settings(report.get("config"))),
        _section("Environment", _settings(report.get("environment"))),
    ]
    return PAGE.format(style=STYLE, sections="\n".join(filter(None, sections)))


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}</section>" if body else ""


def _summary(methods: Sequence[Method]) -> str:
    titles = (
        "method", "perplexity", "against public", "queries", "ε", "δ", "guarantee", "unit",
        "screened", "tokens/s",
    )  # fmt: skip
    numbers = {1, 2, 3, 4, 5, 8, 9}
    rows = []
    for method in methods:
        cells = (
            escape(method.name),
            format_perplexity(method.perplexity),
            format_change(method.change),
            f"{method.queries:,}",
            show_epsilon(method.epsilon),
            format_delta(method),
            _badge(method.kind),
            escape(format_unit(method)),
            format_screened(method),
            format_rate(method.tokens_per_second),
        )
        rows.append(_row("td", (_typeset(cell) for cell in cells), numbers))
    return (
        f'<div class="scroll"><table>\n<thead>{_row("th", titles, numbers)}</thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n</table></div>\n"
        '<p class="small">ε in nats, rounded up. Perplexity and a data-dependent ε come from '
        "private data: for the operator only.</p>\n"
    )


def _row(tag: str, cells: Iterable[str], numbers: set[int]) -> str:
    parts = []
    for i, cell in enumerate(cells):
        name = ' class="number"' if i in numbers else ""
        parts.append(f"<{tag}{name}>{cell}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>\n"


def _typeset(cell: str) -> str:
    """Typographic minus and dash."""
    if cell == MISSING:
        return "–"
    return f"−{cell[1:]}" if cell.startswith("-") and cell.endswith("%") else cell


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
        + ('<p class="small">Grey: the prompt. Black: generated.</p>\n' if prompt else "")
        + f"<p>{escape(sample['guarantee'])}</p>\n"
        + _settings(rest)
    )


def _notes() -> str:
    return f"<ul>\n{''.join(f'<li>{note}</li>{chr(10)}' for note in UNPROTECTED_NOTES)}</ul>\n"


def _settings(values: object) -> str:
    """A table of names and values; nested names are joined by dots."""
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


def _replace(path: Path, text: str) -> None:
    """Written beside the target, then moved over it: a reader sees the old or the new file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
