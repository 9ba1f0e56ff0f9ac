"""Mechanisms, which turn logits into a ticket that is charged and then released."""

from typing import Any

from adapmixed.mechanisms.clipped import ClippedLogPool, ClippedMixing
from adapmixed.mechanisms.mechanism import (
    Allowance,
    Answer,
    Mechanism,
    NextToken,
    PublicOnly,
    Ticket,
    Unprotected,
    UnprotectedPool,
)
from adapmixed.mechanisms.paper import AdaPMixED, PMixED
from adapmixed.mechanisms.rows import ShapedLogits, shaped
from adapmixed.privacy.events import Origin
from adapmixed.privacy.planner import Plan

__all__ = [
    "AdaPMixED",
    "Allowance",
    "Answer",
    "ClippedLogPool",
    "ClippedMixing",
    "Mechanism",
    "NextToken",
    "Origin",
    "PMixED",
    "PublicOnly",
    "ShapedLogits",
    "Ticket",
    "Unprotected",
    "UnprotectedPool",
    "planned",
    "shaped",
]


def planned(one: Plan) -> Mechanism:
    """Return the mechanism with a plan's settings, for exactly the plan's number of queries.

    Args:
        one: a plan from :func:`adapmixed.privacy.plan`.
    """
    settings: dict[str, Any] = dict(one.settings)
    if one.mechanism == PMixED.name:
        epsilon, order = settings["epsilon"], settings["order"]
        return PMixED(epsilon, one.delta, one.queries, order, adjacency=one.adjacency)
    kind = ClippedMixing if one.mechanism == ClippedMixing.name else ClippedLogPool
    return kind(**settings, queries=one.queries)
