"""Private next-token prediction for ensembles of fine-tuned language models.

Everything is imported on first use: ``import adapmixed`` costs nothing.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble as Ensemble
    from adapmixed.evaluation import evaluate as evaluate
    from adapmixed.generation import PrivateGenerator as PrivateGenerator
    from adapmixed.mechanisms import AdaPMixED as AdaPMixED
    from adapmixed.mechanisms import ClippedLogPool as ClippedLogPool
    from adapmixed.mechanisms import ClippedMixing as ClippedMixing
    from adapmixed.mechanisms import PMixED as PMixED
    from adapmixed.mechanisms import PublicOnly as PublicOnly
    from adapmixed.mechanisms import Unprotected as Unprotected
    from adapmixed.mechanisms import UnprotectedPool as UnprotectedPool
    from adapmixed.privacy import Accountant as Accountant
    from adapmixed.privacy import Guarantee as Guarantee
    from adapmixed.privacy import read_ledger as read_ledger
    from adapmixed.synthesis import synthesize as synthesize

_NAMES = {
    "ensemble": "Ensemble",
    "evaluation": "evaluate",
    "generation": "PrivateGenerator",
    "mechanisms": "AdaPMixED ClippedLogPool ClippedMixing PMixED PublicOnly Unprotected "
    "UnprotectedPool",
    "privacy": "Accountant Guarantee read_ledger",
    "synthesis": "synthesize",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"adapmixed.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'adapmixed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
