"""Turn text into blocks of tokens to train on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapmixed.text import beginning_of, end_of_text

IGNORED = -100
"""The label that torch's cross entropy ignores."""
PASS_TOKENS = 512
"""Tokens per forward pass on a CPU, so that the logits stay in the cache; at least one block."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of tokens to train on or to score, as `token_blocks` cuts them.

    Attributes:
        inputs: (blocks, t) int64 token ids.
        labels: (blocks, t) int64; each block has a label that counts.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def passes(self, rows: Tensor, *, whole: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input_ids, targets), each (k, s) int64, for the passes of a step.

        What follows the last target is left out.

        Args:
            rows: (n,) int64, the numbers of the step's blocks.
            whole: whether one pass takes all of them, as on a GPU.
        """
        most = len(rows) if whole else max(1, PASS_TOKENS // self.labels.shape[1])
        for part in torch.split(rows, most):
            targets = self.labels[part, 1:]
            last = int((targets != IGNORED).any(0).nonzero().max()) + 1
            yield self.inputs[part, :last], targets[:, :last]


def token_stream(tokenizer: Any, texts: Sequence[str], vocab_size: int | None = None) -> list[int]:
    """Return the token ids of all texts in order, each followed by the end-of-text token.

    A BOS that a chat template has written is left out, since every block begins with one.

    Args:
        tokenizer: the base's tokenizer.
        texts: the texts.
        vocab_size: V of the base, to leave out what only the tokenizer has; None for all tokens.

    Raises:
        ValueError: if the tokenizer has no end-of-text token.
    """
    end = end_of_text(tokenizer, vocab_size)
    beginning = list(beginning_of(tokenizer))
    stream: list[int] = []
    for text in texts:
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        ids = ids[len(beginning) :] if ids[: len(beginning)] == beginning else ids
        stream += ids if vocab_size is None else [one for one in ids if one < vocab_size]
        stream.append(end)
    return stream


def token_blocks(
    tokens: Sequence[int], block_size: int, beginning: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Cut one shard's token stream into blocks, with the last one padded.

    Args:
        tokens: the stream; fewer than two tokens give no block, since nothing can be predicted.
        block_size: t, tokens of the stream per block, >= 2.
        beginning: the k tokens that every block begins with (`text.beginning_of`).

    Returns:
        (input_ids, labels), each (blocks, k + t) int64. Labels are -100 where nothing is scored: at
        the beginning, at the first token of the stream in each block and at padding.

    Raises:
        ValueError: if `block_size` is below 2.
    """
    if block_size < 2:
        raise ValueError(f"block_size must be >= 2, got {block_size}")
    starts = [i for i in range(0, len(tokens), block_size) if len(tokens) - i >= 2]
    inputs = torch.zeros((len(starts), len(beginning) + block_size), dtype=torch.int64)
    labels = torch.full(inputs.shape, IGNORED, dtype=torch.int64)
    first = len(beginning) + 1
    for row, start in enumerate(starts):
        block = torch.tensor([*beginning, *tokens[start : start + block_size]], dtype=torch.int64)
        inputs[row, : block.numel()] = block
        labels[row, first : block.numel()] = block[first:]
    return inputs, labels
