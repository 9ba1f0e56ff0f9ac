"""Mechanisms: logits in, a token and its privacy events out. They never account."""

from adapmixed.mechanisms.adapmixed import PRESETS, AdaPMixED
from adapmixed.mechanisms.base import Answer, Mechanism, Proposal
from adapmixed.mechanisms.baselines import PublicOnly, Unprotected
from adapmixed.mechanisms.clipped import ClippedMixing
from adapmixed.mechanisms.law import Law
from adapmixed.mechanisms.log_pool import ClippedLogPool
from adapmixed.mechanisms.pmixed import PMixED
from adapmixed.mechanisms.shaped import Shaped

__all__ = [
    "PRESETS",
    "AdaPMixED",
    "Answer",
    "ClippedLogPool",
    "ClippedMixing",
    "Law",
    "Mechanism",
    "PMixED",
    "Proposal",
    "PublicOnly",
    "Shaped",
    "Unprotected",
]
