"""From a plan to the mechanism that it describes."""

from __future__ import annotations

from typing import Any

from adapmixed.mechanisms.clipped_log_pool import ClippedLogPool
from adapmixed.mechanisms.clipped_mixing import ClippedMixing
from adapmixed.mechanisms.pmixed import PMixED
from adapmixed.mechanisms.proposal import Mechanism
from adapmixed.privacy.planner import Plan


def planned(one: Plan, epsilon: float) -> Mechanism:
    """Return the mechanism with a plan's settings, for exactly the queries that it is for.

    Args:
        one: of :func:`adapmixed.privacy.plan`.
        epsilon: the target that was planned for.
    """
    settings: dict[str, Any] = dict(one.settings)
    if one.mechanism == PMixED.name:
        return PMixED(epsilon, one.delta, one.queries, settings["order"])
    kind = ClippedMixing if one.mechanism == ClippedMixing.name else ClippedLogPool
    return kind(**settings, queries=one.queries)
