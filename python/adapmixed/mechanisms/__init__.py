"""Mechanisms, which turn logits into a proposal that is charged and then released."""

from adapmixed.mechanisms.adapmixed import AdaPMixED
from adapmixed.mechanisms.baselines import PublicOnly, Unprotected, UnprotectedPool
from adapmixed.mechanisms.clipped_log_pool import ClippedLogPool
from adapmixed.mechanisms.clipped_mixing import ClippedMixing
from adapmixed.mechanisms.planned import planned
from adapmixed.mechanisms.pmixed import PMixED
from adapmixed.mechanisms.proposal import Answer, Mechanism, Origin, Proposal
from adapmixed.mechanisms.rows import Rows, shaped

__all__ = [
    "AdaPMixED",
    "Answer",
    "ClippedLogPool",
    "ClippedMixing",
    "Mechanism",
    "Origin",
    "PMixED",
    "Proposal",
    "PublicOnly",
    "Rows",
    "Unprotected",
    "UnprotectedPool",
    "planned",
    "shaped",
]
