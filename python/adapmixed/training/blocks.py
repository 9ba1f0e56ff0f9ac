"""Turn text into blocks of tokens to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble.vocabulary import beginning_of, end_of_text

IGNORED = -100
"""The label that torch's cross entropy ignores."""


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
        beginning: the k tokens that every block begins with (`vocabulary.beginning_of`).

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
