"""The report as text for a terminal."""

import textwrap
import unicodedata
from collections.abc import Mapping, Sequence

from adapmixed.report.view import (
    KIND_LABELS,
    format_change,
    format_delta,
    format_perplexity,
    format_rate,
    format_screened,
    format_unit,
    read_methods,
    show_epsilon,
)

# Title and whether the column holds numbers, which stand on the right.
_COLUMNS = (
    ("method", False),
    ("perplexity", True),
    ("vs public", True),
    ("ε", True),
    ("δ", True),
    ("guarantee", False),
    ("unit", False),
    ("screened", True),
    ("tokens/s", True),
)
_GAP = "  "
_SENTENCE_WIDTH = 100


def table(report: Mapping[str, object]) -> str:
    """An aligned table of the methods, then one sentence of guarantee for each.

    ε in nats, rounded up to four significant digits; "-" where a value does not exist.
    """
    methods = read_methods(report)
    rows = [[title for title, _ in _COLUMNS]]
    for method in methods:
        rows.append(
            [
                _printable(method.name),
                format_perplexity(method.perplexity),
                format_change(method.change),
                show_epsilon(method.epsilon),
                format_delta(method),
                KIND_LABELS.get(method.kind, method.kind),
                format_unit(method),
                format_screened(method),
                format_rate(method.tokens_per_second),
            ]
        )
    widths = [max(_width(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, _GAP.join("─" * width for width in widths))
    for method in methods:
        sentence = f"{_printable(method.name)}: {_printable(method.guarantee)}"
        lines.append("")
        lines.append(
            textwrap.fill(sentence, _SENTENCE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        )
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = []
    for text, width, (_, number) in zip(row, widths, _COLUMNS, strict=True):
        space = " " * (width - _width(text))
        cells.append(space + text if number else text + space)
    return _GAP.join(cells).rstrip()


def _width(text: str) -> int:
    """Columns of a terminal that the text takes."""
    columns = 0
    for character in text:
        if not unicodedata.combining(character):
            columns += 2 if unicodedata.east_asian_width(character) in "FW" else 1
    return columns


def _printable(text: str) -> str:
    """Control characters would break the table or steer the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
