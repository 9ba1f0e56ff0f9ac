"""The answer of a mechanism that computes its probabilities itself, without an operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adapmixed.mechanisms import Mechanism, NextToken, Rows
from adapmixed.privacy import Event
from adapmixed_ext import Projection
from adapmixed_ext.inputs import Inputs, prepare


@dataclass(frozen=True)
class GivenToken(NextToken):
    """The answers of B positions by their probabilities.

    Attributes:
        projection: members as they are; nothing is drawn from it.
        given: (B, k) float64, rows that sum to 1; 0 for columns that the public model masks.
    """

    given: Tensor | None = None

    def probabilities(self) -> Tensor:
        """Return the probabilities as they are."""
        assert self.given is not None
        return self.given

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return log-probabilities as `NextToken.log_prob` does."""
        places, share = self.rows.places(targets)
        return self.probabilities().gather(1, places[:, None])[:, 0].log() + share


class Baseline(Mechanism):
    """A mechanism whose answer is a `GivenToken`."""

    no_budget = "its cost is not one member's own; ClippedMixing and ClippedLogPool take a budget"

    def answer_bytes(self, width: int) -> int:
        """Return the bytes of `Mechanism.answer_bytes` and those of three more float64 rows."""
        return super().answer_bytes(width) + 3 * 8 * width


def unprotected(rows: Rows) -> tuple[Inputs, Projection]:
    """Return the checked rows, and their projection with every weight 1.

    Raises:
        ValueError: a row has NaN, +inf or no finite logit.
    """
    inputs = prepare(rows.private, rows.public)
    projection = Projection(torch.ones_like(inputs.private_lse), *inputs[2:])
    return inputs, projection.check()


def answered(
    rows: Rows, projection: Projection, weights: Tensor, events: tuple[Event, ...]
) -> GivenToken:
    """Return the answer with probabilities in proportion to these weights.

    Args:
        rows: the rows.
        projection: theirs.
        weights: (B, k) float64, not negative; those of masked columns do not count.
        events: costs of the answers.
    """
    kept = weights.masked_fill(rows.public.isneginf(), 0.0)
    return GivenToken(rows, projection, events, given=kept / kept.sum(-1, keepdim=True))
