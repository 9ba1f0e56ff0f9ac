"""Several runs of every method: mean ± deviation as in the paper's Table 1."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from adapmixed.report.view import KIND_LABELS, MISSING, format_perplexity, show_epsilon

if TYPE_CHECKING:
    from adapmixed.evaluation import Runs


def runs_entry(runs: Sequence["Runs"]) -> list[dict[str, object]]:
    """Every method's values by run, their means and deviations: JSON values, inf as "inf"."""
    return [
        {
            "name": one.name,
            "queries": one.queries,
            "kind": one.guarantees[0].kind,
            "perplexity": [_number(e.perplexity) for e in one.evaluations],
            "perplexity_mean": _number(one.perplexity_mean),
            "perplexity_deviation": _number(one.perplexity_deviation),
            "epsilon": [_number(guarantee.epsilon) for guarantee in one.guarantees],
            "epsilon_mean": _number(one.epsilon_mean),
            "epsilon_deviation": _number(one.epsilon_deviation),
            "guarantees": [str(guarantee) for guarantee in one.guarantees],
        }
        for one in runs
    ]


def runs_table(runs: Sequence["Runs"]) -> str:
    """An aligned table of the methods, what its numbers are, and every method's guarantee."""
    rows = [["method", "perplexity", "ε of a run", "kind"]]
    for one in runs:
        perplexity = format_perplexity(one.perplexity_mean)
        kind = one.guarantees[0].kind
        rows.append(
            [
                one.name,
                _with(perplexity, one.perplexity_deviation, ".2f"),
                _with(show_epsilon(one.epsilon_mean), one.epsilon_deviation, ".2g"),
                KIND_LABELS.get(kind, kind),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    count, queries = len(runs[0].evaluations), runs[0].queries
    lines += [
        "",
        f"Mean ± standard deviation (n − 1) of {count} runs of {queries} queries. Every ε is that",
        "of one run, one service life; it does not cover all runs together, whose costs add.",
    ]
    for one in runs:
        lines += ["", f"{one.name}, run 1: {one.guarantees[0]}"]
    return "\n".join(lines)


def _with(mean: str, deviation: float | None, how: str) -> str:
    return mean if deviation is None or mean == MISSING else f"{mean} ± {deviation:{how}}"


def _number(value: float | None) -> float | str | None:
    return str(value) if value is not None and math.isinf(value) else value
