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


def planned(plan: Plan) -> Mechanism:
    """Return the mechanism with a plan's settings, for exactly the plan's number of queries.

    Args:
        plan: a plan from :func:`adapmixed.privacy.plan`.
    """
    settings: dict[str, Any] = dict(plan.settings)
    if plan.mechanism == PMixED.name:
        epsilon, order = settings["epsilon"], settings["order"]
        return PMixED(epsilon, plan.delta, plan.queries, order, adjacency=plan.adjacency)
    kind = ClippedMixing if plan.mechanism == ClippedMixing.name else ClippedLogPool
    return kind(**settings, queries=plan.queries)
