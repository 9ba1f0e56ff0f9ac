"""What the privacy of a report costs: perplexity at each ε that was fixed in advance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adapmixed.report.view import (
    Method,
    format_against,
    format_change,
    format_delta,
    format_neighbours,
    format_perplexity,
    show_epsilon,
)

TITLES = ("ε", "δ", "queries", "neighbours", "perplexity", "against public", "gain kept", "method")


@dataclass(frozen=True)
class Cost:
    """The first section of a report.

    Attributes:
        summary: two sentences, on the best unprotected method and on the ε that reaches it.
        rows: the cells of each fixed guarantee, in the order of `TITLES`, smallest ε first.
    """

    summary: str
    rows: tuple[tuple[str, ...], ...]


def cost_of(methods: Sequence[Method]) -> Cost | None:
    """Return what privacy costs, or None without a fixed guarantee to compare.

    The gain kept is (log public - log p) / (log public - log reference) of the perplexities. The
    reference is the best method without protection, which a private one may surpass.
    """
    public = next((m.perplexity for m in methods if m.kind == "public"), math.inf)
    free = [(m.perplexity, m.name) for m in methods if m.kind == "none"]
    reference, name = min(free, default=(math.inf, ""))
    fixed = [
        (m.epsilon, m.perplexity, m)
        for m in methods
        if m.kind == "fixed" and m.epsilon is not None and math.isfinite(m.perplexity)
    ]
    fixed.sort(key=lambda one: one[:2])
    if not reference < public < math.inf or not fixed:
        return None
    whole = math.log(public / reference)
    rows = tuple(
        (
            show_epsilon(epsilon),
            format_delta(method),
            f"{method.queries:,}",
            format_neighbours(method.adjacency),
            format_perplexity(perplexity),
            format_against(method.change, method.difference),
            f"{100 * math.log(public / perplexity) / whole:.0f}%",
            method.name,
        )
        for epsilon, perplexity, method in fixed
    )
    reached = next((epsilon for epsilon, perplexity, _ in fixed if perplexity <= reference), None)
    end = (
        "No fixed guarantee of this report reaches it."
        if reached is None
        else f"It is reached at ε = {show_epsilon(reached)}."
    )
    change = format_change(reference / public - 1)
    words = f"Without protection the perplexity is {change} against the public model's ({name})."
    return Cost(f"{words} {end}", rows)
