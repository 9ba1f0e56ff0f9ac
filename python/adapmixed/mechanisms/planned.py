"""Makes the mechanism that a plan describes."""

from __future__ import annotations

from typing import Any

from adapmixed.mechanisms.clipped_log_pool import ClippedLogPool
from adapmixed.mechanisms.clipped_mixing import ClippedMixing
from adapmixed.mechanisms.mechanism import Mechanism
from adapmixed.mechanisms.pmixed import PMixED
from adapmixed.privacy.planner import Plan


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
