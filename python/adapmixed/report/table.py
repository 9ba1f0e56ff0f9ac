"""Format the report's table for a terminal."""

import textwrap
import unicodedata
from collections.abc import Mapping, Sequence

from adapmixed.report.view import (
    INTERVAL_WORDS,
    KEPT_WORDS,
    Method,
    covered,
    format_against,
    format_kept,
    format_perplexity,
    format_promise,
    read_methods,
    show_epsilon,
)

TITLES = ("method", "perplexity", "vs public", "gain kept", "ε", "ε covers", "guarantee")
NUMBERS = (False, True, True, True, True, True, False)
"""Which columns hold numbers, which are aligned on the right."""

_GAP = "  "
_SENTENCE_WIDTH = 100


def table(report: Mapping[str, object]) -> str:
    """Return an aligned table of the methods, followed by the guarantee of each.

    ε is in nats, rounded up to four significant digits. A missing value is shown as "-".
    """
    methods = read_methods(report)
    lines = aligned([TITLES, *map(cells, methods)], NUMBERS)
    if any(method.difference and method.difference["low"] is not None for method in methods):
        lines += ["", *textwrap.wrap(f"{INTERVAL_WORDS} {KEPT_WORDS}", _SENTENCE_WIDTH)]
    for method in methods:
        sentence = f"{printable(method.name)}: {printable(method.guarantee)}"
        lines.append("")
        lines.append(
            textwrap.fill(sentence, _SENTENCE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        )
    return "\n".join(lines)


def cells(method: Method) -> list[str]:
    """Return the cells of a method, in the order of `TITLES`."""
    return [
        method.name,
        format_perplexity(method.perplexity),
        format_against(method.change, method.difference),
        format_kept(method.kept),
        show_epsilon(method.epsilon),
        covered(vars(method)),
        format_promise(method.kind, method.adjacency),
    ]


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
