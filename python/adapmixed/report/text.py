"""Format all tables of a report for a terminal, from the content of report.json.

Perplexity by part of the text rises as shards spend their budgets.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adapmixed.report.diagnostics import utility_table
from adapmixed.report.runs import runs_table
from adapmixed.report.table import aligned, printable, table
from adapmixed.report.verdict import verdict
from adapmixed.report.view import Method, read_methods, run_words


def report_text(report: Mapping[str, Any]) -> str:
    """Return what was run, the tables and, at the end, the verdict on every mechanism."""
    methods, runs = read_methods(report), report.get("runs")
    lines = [printable(run_words(report["config"], methods)), ""]
    lines.append(runs_table(runs) if runs else table(report))
    if not runs and any(method.method == "per-shard budget" for method in methods):
        lines += ["", *over_time(methods)]
    utility = utility_table(methods)
    if utility:
        lines += ["", *utility]
    sentences = [printable(one) for one in verdict(runs or report["methods"])]
    lines += ["", *sentences] if sentences else []
    return "\n".join(lines)


_PARTS = 6


def over_time(methods: Sequence[Method]) -> list[str]:
    """Return the lines of a table with at most `_PARTS` parts of the text."""
    stretches = [_stretches(method.perplexities) for method in methods]
    parts = [f"{first} to {last}" for first, last, _ in stretches[0]]
    lines = [["perplexity of queries", *parts]]
    for method, found in zip(methods, stretches, strict=True):
        lines.append([method.name, *(f"{value:.2f}" for _, _, value in found)])
    return aligned(lines, [False] + [True] * len(parts))


def _stretches(perplexities: Sequence[tuple[int, float]]) -> list[tuple[int, int, float]]:
    """Return (first query, last query, perplexity between them) of each part."""
    count = min(_PARTS, len(perplexities))
    chosen = [perplexities[(part + 1) * len(perplexities) // count - 1] for part in range(count)]
    found, before, loss_before = [], 0, 0.0
    for queries, perplexity in chosen:
        loss = queries * math.log(perplexity)
        mean = (loss - loss_before) / (queries - before) if math.isfinite(loss) else math.inf
        found.append((before + 1, queries, math.exp(mean) if mean < 700.0 else math.inf))
        before, loss_before = queries, loss
    return found
