"""Cut a stream of tokens into blocks to train on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
