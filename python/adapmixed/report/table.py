"""Format the report's table for a terminal."""

import textwrap
import unicodedata
from collections.abc import Mapping, Sequence

from adapmixed.report.view import (
    INTERVAL_WORDS,
    KIND_LABELS,
    format_against,
    format_delta,
    format_neighbours,
    format_perplexity,
    format_rate,
    format_screened,
    format_unit,
    read_methods,
    show_epsilon,
)

# Title, and whether the column holds numbers, which are aligned on the right.
_COLUMNS = (
    ("method", False),
    ("perplexity", True),
    ("vs public", True),
    ("ε", True),
    ("δ", True),
    ("guarantee", False),
    ("neighbours", False),
    ("unit", False),
    ("screened", True),
    ("tokens/s", True),
)
_GAP = "  "
_SENTENCE_WIDTH = 100


def table(report: Mapping[str, object]) -> str:
    """Return an aligned table of the methods, followed by the guarantee of each.

    ε is in nats, rounded up to four significant digits. A missing value is shown as "-".
    """
    methods = read_methods(report)
    rows = [[title for title, _ in _COLUMNS]]
    for method in methods:
        rows.append(
            [
                method.name,
                format_perplexity(method.perplexity),
                format_against(method.change, method.difference),
                show_epsilon(method.epsilon),
                format_delta(method),
                KIND_LABELS.get(method.kind, method.kind),
                format_neighbours(method.adjacency),
                format_unit(method),
                format_screened(method),
                format_rate(method.tokens_per_second),
            ]
        )
    lines = aligned(rows, [number for _, number in _COLUMNS])
    if any(method.difference and method.difference["low"] is not None for method in methods):
        lines += ["", *textwrap.wrap(INTERVAL_WORDS, _SENTENCE_WIDTH)]
    for method in methods:
        sentence = f"{printable(method.name)}: {printable(method.guarantee)}"
        lines.append("")
        lines.append(
            textwrap.fill(sentence, _SENTENCE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        )
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> list[str]:
    """Return the lines of a table, with a rule below the first row.

    Args:
        rows: the cells; the first row holds the titles.
        numbers: for each column, whether it holds numbers, which are aligned on the right.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(_width(row[i]) for row in rows) for i in range(len(numbers))]
    lines = []
    for row in rows:
        cells = []
        for text, width, number in zip(row, widths, numbers, strict=True):
            space = " " * (width - _width(text))
            cells.append(space + text if number else text + space)
        lines.append(_GAP.join(cells).rstrip())
    lines.insert(1, _GAP.join("─" * width for width in widths))
    return lines


def _width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    columns = 0
    for character in text:
        if not unicodedata.combining(character):
            columns += 2 if unicodedata.east_asian_width(character) in "FW" else 1
    return columns


def printable(text: str) -> str:
    """Return the text with control characters replaced, since they could steer the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
