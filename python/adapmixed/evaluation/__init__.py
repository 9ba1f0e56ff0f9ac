"""Measure perplexity and privacy of mechanisms on a text, with one forward pass of the models.

Perplexity reveals probabilities of the mixture, so it is for the operator and never a private
release.
"""

from adapmixed.evaluation.loop import evaluate, plan_windows
from adapmixed.evaluation.report import Evaluation, compared

__all__ = ["Evaluation", "compared", "evaluate", "plan_windows"]
