"""Mechanisms, which turn logits into a ticket that is charged and then released."""

from adapmixed.mechanisms.adapmixed import AdaPMixED
from adapmixed.mechanisms.baselines import PublicOnly, Unprotected, UnprotectedPool
from adapmixed.mechanisms.clipped_log_pool import ClippedLogPool
from adapmixed.mechanisms.clipped_mixing import ClippedMixing
from adapmixed.mechanisms.mechanism import Allowance, Answer, Mechanism, NextToken, Ticket
from adapmixed.mechanisms.planned import planned
from adapmixed.mechanisms.pmixed import PMixED
from adapmixed.mechanisms.rows import Rows, shaped
from adapmixed.privacy.events import Origin

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
    "Rows",
    "Ticket",
    "Unprotected",
    "UnprotectedPool",
    "planned",
    "shaped",
]
