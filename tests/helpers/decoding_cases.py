"""Run mechanisms in the decoding loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from result_cases import NOISY
from torch import Tensor

from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import Mechanism, PMixED, PublicOnly, Unprotected
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom

PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 3, 3]])
MECHANISMS: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "adapmixed": NOISY,
    "pmixed": PMixED(8.0, 1e-5, 1000, 6.0),
}


def steps(
    ensemble: Any,
    mechanism: Mechanism,
    prompt: Tensor = PROMPT,
    *,
    max_new_tokens: int = 4,
    accountant: Accountant | None = None,
    rng: Any = None,
    memory_bytes: int = 1 << 30,
    **settings: Any,
) -> Iterator[Tensor]:
    """Yield the answers to token ids step by step.

    The default source of randomness is seeded, and the default accountant is a new one.
    """
    accountant = Accountant(1e-5) if accountant is None else accountant
    rng = SeededRandom(0) if rng is None else rng
    if getattr(ensemble, "tokenizer", "") is None:
        ensemble.tokenizer = "unused"
    generator = PrivateGenerator(
        ensemble, mechanism, accountant, rng=rng, memory_bytes=memory_bytes
    )
    return generator.stream_tokens(prompt, max_new_tokens=max_new_tokens, **settings)


def answered(
    ensemble: Any, mechanism: Mechanism, prompt: Tensor = PROMPT, **settings: Any
) -> Tensor:
    """Return the tokens of all steps, (b, s) int64, with −1 after an end."""
    return torch.stack(list(steps(ensemble, mechanism, prompt, **settings)), dim=1)
