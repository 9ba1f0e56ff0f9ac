"""Perplexity and privacy of mechanisms over a corpus, from one forward pass of the models.

Perplexity reveals probabilities of the mixture: it is evaluation for the operator, never a private
release.
"""

from adapmixed.evaluation.loop import evaluate
from adapmixed.evaluation.result import Evaluation
from adapmixed.evaluation.windows import plan

__all__ = ["Evaluation", "evaluate", "plan"]
