"""Perplexity and privacy of mechanisms over a corpus, from one forward pass of the models.

Perplexity reveals probabilities of the mixture: it is evaluation for the operator, never a private
release.
"""

from adapmixed.evaluation.diagnosis import Diagnosis, Utility, Weights
from adapmixed.evaluation.loop import evaluate, evaluate_runs
from adapmixed.evaluation.result import Evaluation, Runs
from adapmixed.evaluation.stored import StoredResult, read_result
from adapmixed.evaluation.windows import Window, plan, plan_runs

__all__ = [
    "Diagnosis",
    "Evaluation",
    "Runs",
    "StoredResult",
    "Utility",
    "Weights",
    "Window",
    "evaluate",
    "evaluate_runs",
    "plan",
    "plan_runs",
    "read_result",
]
