"""The fields of every privacy event, as they are written.

A new event needs one line in `FIELDS`, in the order of its dataclass; its name and fields then
belong to the formats of ledgers and states. A new field of an old event needs a default, with which
the event means what it did, and the `VERSION` that has it in `_SINCE`.
"""

from __future__ import annotations

from adapmixed.privacy.events import (
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
)
from adapmixed.privacy.fields import ARRAY, COUNT, FLAG, REAL, REALS, WORD, Kind, optional
from adapmixed.privacy.released_count import ReleasedCount

FIELDS: dict[type, dict[str, Kind]] = {
    GaussianScreening: {"num_models": COUNT, "queries": COUNT, "weight": REAL, "sigma": REAL},
    LeaveOneOutLoss: {"orders": REALS, "loss": ARRAY, "adjacency": WORD, "loss_error": REAL},
    RenyiBound: {
        "order": REAL,
        "epsilon": REAL,
        "num_models": COUNT,
        "queries": COUNT,
        "adjacency": WORD,
        "published": FLAG,
        "budget": optional(COUNT),
    },
    ClippedAnswer: {
        "lower": REAL,
        "upper": REAL,
        "num_models": COUNT,
        "queries": COUNT,
        "budget": optional(COUNT),
    },
    BoundedRangeAnswer: {
        "scale": REAL,
        "lower": REAL,
        "upper": REAL,
        "num_models": COUNT,
        "queries": COUNT,
        "budget": optional(COUNT),
        "constant_models": FLAG,
    },
    IndividualCharge: {"measure": WORD, "order": optional(REAL), "charge": ARRAY},
    ReleasedCount: {"num_models": COUNT, "threshold": REAL, "sigma": REAL, "noisy_count": COUNT},
    PublicAnswer: {"queries": COUNT},
    UnprotectedAnswer: {"queries": COUNT},
    Caveat: {"name": WORD},
}

VERSION = 3
"""Of these fields, and so of ledgers and of accountants' states, which hold events."""

_SINCE: dict[type, dict[str, int]] = {BoundedRangeAnswer: {"constant_models": 2}}


def fields_of(kind: type, version: int) -> dict[str, Kind]:
    """The fields that an event of this class has in a version; what it lacks has its default."""
    since = _SINCE.get(kind, {})
    return {name: field for name, field in FIELDS[kind].items() if since.get(name, 1) <= version}
