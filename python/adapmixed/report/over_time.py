"""Show perplexity by part of the text, which rises as shards spend their budgets."""

import math
from collections.abc import Sequence

from adapmixed.report.table import aligned
from adapmixed.report.view import Method

_ROWS = 8


def over_time(methods: Sequence[Method]) -> list[str]:
    """Return the lines of a table with at most `_ROWS` parts of the text."""
    stretches = [_stretches(method.perplexities) for method in methods]
    lines = [["perplexity of queries", *(method.name for method in methods)]]
    for row in zip(*stretches, strict=True):
        first, last, _ = row[0]
        lines.append([f"{first} to {last}", *(f"{value:.2f}" for _, _, value in row)])
    return aligned(lines, [True] * (len(methods) + 1))


def _stretches(perplexities: Sequence[tuple[int, float]]) -> list[tuple[int, int, float]]:
    """Return (first query, last query, perplexity between them) of each part."""
    count = min(_ROWS, len(perplexities))
    chosen = [perplexities[(row + 1) * len(perplexities) // count - 1] for row in range(count)]
    found, before, loss_before = [], 0, 0.0
    for queries, perplexity in chosen:
        loss = queries * math.log(perplexity)
        mean = (loss - loss_before) / (queries - before) if math.isfinite(loss) else math.inf
        found.append((before + 1, queries, math.exp(mean) if mean < 700.0 else math.inf))
        before, loss_before = queries, loss
    return found
