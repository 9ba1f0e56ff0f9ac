"""The distribution of the sampled tokens, in integers."""

from __future__ import annotations

import math

from torch import Tensor

_UNITS = 2**1074  # in 1: every double is a multiple of 2^-1074


def sampling_weights(probabilities: Tensor, public_logits: Tensor) -> list[list[int]]:
    """Return the sampler's weights: p in units of 2^-1074, at least 1 if q > 0, and 0 if q = 0.

    Token v is drawn with probability w_v / sum(w). Python integers, exact.
    """
    rows = zip(probabilities.tolist(), (public_logits > -math.inf).tolist(), strict=True)
    return [
        [max(_units(p), 1) if held else 0 for p, held in zip(*row, strict=True)] for row in rows
    ]


def _units(p: float) -> int:
    numerator, denominator = p.as_integer_ratio()
    return numerator * (_UNITS // denominator)
