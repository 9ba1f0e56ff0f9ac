"""Report several runs of every method, as in the paper's Table 1."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapmixed.report.table import NUMBERS, TITLES, aligned, printable
from adapmixed.report.verdict import kept_entries
from adapmixed.report.view import (
    INTERVAL_WORDS,
    KEPT_WORDS,
    MISSING,
    covered,
    format_against,
    format_kept,
    format_perplexity,
    format_promise,
    show_epsilon,
)

if TYPE_CHECKING:
    from adapmixed.evaluation import Runs


def runs_entry(runs: Sequence["Runs"]) -> list[dict[str, object]]:
    """Return every method's values by run, means and deviations as JSON values."""
    from adapmixed.evaluation.result import paired_difference

    public = next((one for one in runs if one.guarantees[0].kind == "public"), None)
    kept = kept_entries([one.evaluations for one in runs])
    return [
        {
            "name": one.name,
            "queries": one.queries,
            "planned": one.guarantees[0].budget,
            "kind": one.guarantees[0].kind,
            "adjacency": one.guarantees[0].adjacency,
            "method": one.guarantees[0].method,
            "perplexity": [_number(e.perplexity) for e in one.evaluations],
            "perplexity_mean": _number(one.perplexity_mean),
            "perplexity_deviation": _number(one.perplexity_deviation),
            "difference": None
            if public in (None, one)
            else paired_difference(one.evaluations, public.evaluations),
            "kept": share,
            "epsilon": [_number(guarantee.epsilon) for guarantee in one.guarantees],
            "epsilon_mean": _number(one.epsilon_mean),
            "epsilon_deviation": _number(one.epsilon_deviation),
            "guarantees": [str(guarantee) for guarantee in one.guarantees],
        }
        for one, share in zip(runs, kept, strict=True)
    ]


def runs_rows(entries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the titles and the cells of every method."""
    rows = [list(TITLES)]
    for one in entries:
        perplexity, epsilon = _read(one["perplexity_mean"]), _read(one["epsilon_mean"])
        assert perplexity is not None
        rows.append(
            [
                one["name"],
                format_perplexity(perplexity),
                format_against(None, one.get("difference")),
                format_kept(one["kept"]),
                _with(show_epsilon(epsilon), one["epsilon_deviation"]),
                covered(one),
                format_promise(one["kind"], one["adjacency"]),
            ]
        )
    return rows


def runs_words(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the sentences that explain the table's numbers."""
    count, queries = len(entries[0]["perplexity"]), entries[0]["queries"]
    return (
        f"Means of {count} runs of {queries} queries, and ε ± its standard deviation (n − 1). "
        "Every ε covers one run alone; it does not cover all runs together, whose costs add up. "
        f"{INTERVAL_WORDS} {KEPT_WORDS}"
    )


def runs_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return an aligned table of the methods, an explanation and the guarantees.

    Args:
        entries: the result of `runs_entry`.
    """
    lines = aligned(runs_rows(entries), NUMBERS)
    lines += ["", *textwrap.wrap(runs_words(entries), 88)]
    for one in entries:
        lines += ["", printable(f"{one['name']}, run 1: {one['guarantees'][0]}")]
    return "\n".join(lines)


def _with(mean: str, deviation: float | None) -> str:
    return mean if deviation is None or mean == MISSING else f"{mean} ± {deviation:.2g}"


def _number(value: float | None) -> float | str | None:
    return str(value) if value is not None and math.isinf(value) else value


def _read(value: float | str | None) -> float | None:
    return None if value is None else float(value)
