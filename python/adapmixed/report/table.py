"""Format results: numbers, rows of the table, and aligned columns for a terminal."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from adapmixed.evaluation import Evaluation
from adapmixed.privacy.guarantee import format_epsilon

KIND_LABELS = {"published": "published, invalid"}
"""Short names of the kinds of guarantee; "published" alone could be read as "may be published"."""

NEIGHBOUR_LABELS = {
    "zero_out": "zero-out",
    "add_remove": "leave-one-out",
    "replace_one": "replace-one",
}
"""Short names of the adjacencies; an ε for one is not comparable with an ε for another."""

MISSING = "-"
"""Shown for a missing value."""

TITLES = ("method", "perplexity", "vs public", "gain kept", "ε", "ε covers", "guarantee")
NUMBERS = (False, True, True, True, True, True, False)
"""Which columns hold numbers, which are aligned on the right."""
INTERVAL_WORDS = (
    "[…]: 95 % intervals of the change against the public model, by a block bootstrap of paired "
    "differences in log-perplexity, for the same models on other text like this."
)
KEPT_WORDS = (
    "Gain kept: the share of the log-perplexity that the best method without protection gains over "
    "the public model, ± two standard errors by a jackknife over the same blocks."
)


def row(one: Evaluation) -> list[str]:
    """Return the cells of a result, in the order of `TITLES`; means if there are several runs."""
    epsilon, deviation = show_epsilon(one.epsilon_mean), one.epsilon_deviation
    return [
        one.name,
        format_perplexity(one.perplexity_mean),
        format_against(one.change, one.difference),
        format_kept(one.kept),
        epsilon if deviation is None else f"{epsilon} ± {deviation:.2g}",
        covered(one),
        format_promise(one),
    ]


def show_epsilon(epsilon: float | None) -> str:
    """Return ε as the guarantee writes it, or `MISSING`."""
    return MISSING if epsilon is None else format_epsilon(epsilon)


def format_neighbours(adjacency: str | None) -> str:
    """Return the adjacency of ε, or `MISSING` if nothing private was used or protected."""
    return MISSING if adjacency is None else NEIGHBOUR_LABELS.get(adjacency, adjacency)


def format_promise(one: Evaluation) -> str:
    """Return the kind and the adjacency of an ε."""
    kind, adjacency = one.guarantee.kind, one.guarantee.adjacency
    words = KIND_LABELS.get(kind, kind)
    return words if adjacency is None else f"{words}, {format_neighbours(adjacency)}"


def covered(one: Evaluation) -> str:
    """Return the tokens that ε covers in each run, or `MISSING` without an ε."""
    if one.guarantee.kind in ("public", "none"):
        return MISSING
    if one.guarantee.method == "per-shard budget":
        return "any number of tokens"
    return f"{one.guarantee.budget or one.queries:,} tokens"


def format_kept(kept: Mapping[str, Any] | None) -> str:
    """Return the share of the gain that is kept, with twice its standard error, in percent."""
    if kept is None or kept["share"] is None:
        return MISSING
    band = math.ceil(200 * kept["error"])
    return f"{100 * kept['share']:.0f} %" + (f" ± {band}" if band else "")


def format_perplexity(perplexity: float) -> str:
    """Return a perplexity with two decimals, or with four significant digits if it is large."""
    return f"{perplexity:.2f}" if perplexity < 1e4 else f"{perplexity:.4g}"


def format_against(change: float | None, difference: Mapping[str, Any] | None) -> str:
    """Return a relative change of perplexity in percent, with its interval if there is one.

    Args:
        change: None: that of the difference.
        difference: of log-perplexity, from `paired_difference`; or None.
    """
    if change is None:
        if difference is None:
            return MISSING
        change = math.expm1(difference["mean"])
    words = "inf" if math.isinf(change) else f"{100 * change:+.1f}%"
    words = "0.0%" if words in ("+0.0%", "-0.0%") else words
    if difference is None or difference["low"] is None:
        return words
    low, high = (100 * math.expm1(difference[end]) for end in ("low", "high"))
    return f"{words} [{low:+.1f}, {high:+.1f}]"


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
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("─" * width for width in widths))
    return lines


def _width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    wide = sum(unicodedata.east_asian_width(character) in "FW" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def printable(text: str) -> str:
    """Return the text with control characters replaced, since they could steer the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
