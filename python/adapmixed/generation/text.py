"""Text and tokens: prompts as a batch, what a token adds to a text, and strings that end one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapmixed.decoding import StopRule

# Tokens before the answer that it is decoded with: some tokenizers drop the first one's space.
_CONTEXT = 8


class Continuation:
    """A continuation, decoded as its tokens come."""

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt[-_CONTEXT:]
        self._shown = len(self._decoded())

    def add(self, token: int) -> str:
        """What this token adds; "" while it ends inside a character."""
        self._ids.append(token)
        text = self._decoded()
        return "" if text.endswith("\ufffd") else self._new(text)

    def rest(self) -> str:
        """What was held back for a character that never came."""
        return self._new(self._decoded())

    def _new(self, text: str) -> str:
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece

    def _decoded(self) -> str:
        return str(
            self._tokenizer.decode(
                self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """((b, t) int64 tokens, (b, t) mask or None where no row is padded).

    Raises:
        ValueError: no prompt, or one without tokens.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts[{index}] must hold at least one token, got none")
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    return ids, None if bool(mask.all()) else mask


def stop_rule(tokenizer: Any, strings: Sequence[str]) -> StopRule | None:
    """Ends a sequence once one of the strings is in what was released; None without strings.

    Raises:
        ValueError: an empty string.
    """
    several = isinstance(strings, Sequence) and not isinstance(strings, str | bytes)
    if not several or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(
            f"stop_strings must be a list of strings that are not empty, got {strings!r}"
        )
    if not strings:
        return None
    from transformers.generation.stopping_criteria import StopStringCriteria

    criteria = StopStringCriteria(tokenizer=tokenizer, stop_strings=list(strings))

    def ended(released: Tensor) -> Tensor:
        result: Tensor = criteria(released.clamp_min(0), None)
        return result

    return ended
