"""Measure perplexity and privacy of mechanisms on a text, with one forward pass of the models.

Perplexity reveals probabilities of the mixture, so it is for the operator and never a private
release. Results can be read without torch, which `evaluate` imports on its first use.
"""

from typing import TYPE_CHECKING

from adapmixed.evaluation.diagnostics import Weights
from adapmixed.evaluation.result import Evaluation, compared, read_result
from adapmixed.evaluation.windows import plan_runs

if TYPE_CHECKING:
    from adapmixed.evaluation.loop import evaluate

__all__ = [
    "Evaluation",
    "Weights",
    "compared",
    "evaluate",
    "plan_runs",
    "read_result",
]


def __getattr__(name: str) -> object:
    if name == "evaluate":
        from adapmixed.evaluation.loop import evaluate

        return evaluate
    raise AttributeError(f"module 'adapmixed.evaluation' has no attribute {name!r}")
