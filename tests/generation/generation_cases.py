"""Parts that the tests of generated text share."""

from __future__ import annotations

from typing import Any

import torch

from adapmixed.ensemble import Ensemble
from adapmixed.mechanisms import PublicOnly

PROMPT = "The statement executes the first clause"
# The likeliest public token instead of a draw, so that the text is known.
FIRST = PublicOnly()
LIKELIEST: dict[str, Any] = {"top_k": 1}


def tokens_of(ensemble: Ensemble, text: str) -> torch.Tensor:
    return torch.tensor([ensemble.tokenizer(text)["input_ids"]])
