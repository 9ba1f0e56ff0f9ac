"""What the privacy of a report costs: perplexity at each ε that was fixed in advance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adapmixed.report.view import (
    Method,
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
        summary: two sentences, on the unprotected ensemble and on the ε that reaches it.
        rows: the cells of each fixed guarantee, in the order of `TITLES`, smallest ε first.
    """

    summary: str
    rows: tuple[tuple[str, ...], ...]


def cost_of(methods: Sequence[Method]) -> Cost | None:
    """Return what privacy costs, or None without a fixed guarantee to compare.

    The gain kept is (log public - log p) / (log public - log unprotected) of the perplexities.
    """
    public, unprotected = _perplexity(methods, "public"), _perplexity(methods, "none")
    fixed = [
        (m.epsilon, m.perplexity, m)
        for m in methods
        if m.kind == "fixed" and m.epsilon is not None and math.isfinite(m.perplexity)
    ]
    fixed.sort(key=lambda one: one[:2])
    if public is None or unprotected is None or not unprotected < public or not fixed:
        return None
    whole = math.log(public / unprotected)
    rows = tuple(
        (
            show_epsilon(epsilon),
            format_delta(method),
            f"{method.queries:,}",
            format_neighbours(method.adjacency),
            format_perplexity(perplexity),
            format_change(method.change),
            f"{100 * math.log(public / perplexity) / whole:.0f}%",
            method.name,
        )
        for epsilon, perplexity, method in fixed
    )
    reached = next((epsilon for epsilon, perplexity, _ in fixed if perplexity <= unprotected), None)
    end = (
        "No fixed guarantee of this report reaches it."
        if reached is None
        else f"It is reached at ε = {show_epsilon(reached)}."
    )
    change = format_change(unprotected / public - 1)
    words = f"Without protection the perplexity is {change} against the public model's."
    return Cost(f"{words} {end}", rows)


def _perplexity(methods: Sequence[Method], kind: str) -> float | None:
    values = (m.perplexity for m in methods if m.kind == kind)
    return next(filter(math.isfinite, values), None)
