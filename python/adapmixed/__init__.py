"""Private next-token prediction for ensembles of fine-tuned language models.

Everything is imported on first use: ``import adapmixed`` costs nothing.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble
    from adapmixed.evaluation import evaluate
    from adapmixed.generation import PrivateGenerator
    from adapmixed.mechanisms import (
        AdaPMixED,
        ClippedLogPool,
        ClippedMixing,
        PMixED,
        PublicOnly,
        Unprotected,
        UnprotectedPool,
    )
    from adapmixed.privacy import Accountant, Guarantee, read_ledger
    from adapmixed.synthesis import synthesize

_HOMES = {
    "Accountant": "adapmixed.privacy",
    "AdaPMixED": "adapmixed.mechanisms",
    "ClippedLogPool": "adapmixed.mechanisms",
    "ClippedMixing": "adapmixed.mechanisms",
    "Ensemble": "adapmixed.ensemble",
    "Guarantee": "adapmixed.privacy",
    "PMixED": "adapmixed.mechanisms",
    "PrivateGenerator": "adapmixed.generation",
    "PublicOnly": "adapmixed.mechanisms",
    "Unprotected": "adapmixed.mechanisms",
    "UnprotectedPool": "adapmixed.mechanisms",
    "evaluate": "adapmixed.evaluation",
    "read_ledger": "adapmixed.privacy",
    "synthesize": "adapmixed.synthesis",
}

__all__ = [
    "Accountant",
    "AdaPMixED",
    "ClippedLogPool",
    "ClippedMixing",
    "Ensemble",
    "Guarantee",
    "PMixED",
    "PrivateGenerator",
    "PublicOnly",
    "Unprotected",
    "UnprotectedPool",
    "evaluate",
    "read_ledger",
    "synthesize",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'adapmixed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
