"""Measure perplexity and privacy of mechanisms on a text, with one forward pass of the models.

Perplexity reveals probabilities of the mixture, so it is for the operator and never a private
release. Names are imported on first use, so that results can be read without torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapmixed.evaluation.diagnosis import Diagnosis, Utility, Weights
    from adapmixed.evaluation.loop import evaluate, evaluate_runs
    from adapmixed.evaluation.result import Evaluation, Runs
    from adapmixed.evaluation.result_file import StoredResult, read_result
    from adapmixed.evaluation.windows import plan_runs

_HOMES = {
    "Diagnosis": "diagnosis",
    "Evaluation": "result",
    "Runs": "result",
    "StoredResult": "result_file",
    "Utility": "diagnosis",
    "Weights": "diagnosis",
    "evaluate": "loop",
    "evaluate_runs": "loop",
    "plan_runs": "windows",
    "read_result": "result_file",
}

__all__ = [
    "Diagnosis",
    "Evaluation",
    "Runs",
    "StoredResult",
    "Utility",
    "Weights",
    "evaluate",
    "evaluate_runs",
    "plan_runs",
    "read_result",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"adapmixed.evaluation.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'adapmixed.evaluation' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
