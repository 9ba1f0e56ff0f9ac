"""Step-by-step decoding of an ensemble: one key/value cache, the same tokens for every member."""

from __future__ import annotations

import torch
from torch import Tensor

from adapmixed.models.forward import BatchedForward


class Decoder:
    """Holds the next position's logits and advances by the tokens that were chosen for it.

    Made by `Ensemble.decoder`. The cache holds (N + 1) b rows of keys and values.
    """

    def __init__(
        self, forward: BatchedForward, ids: Tensor, mask: Tensor | None, memory_bytes: int
    ) -> None:
        batch, length = ids.shape
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("attention_mask must end in 1 in every row: pad on the left to decode")
        chunk = forward.chunk_size(batch, length, memory_bytes, last_only=True)
        self._forward = forward
        self._mask = mask
        self._batch = batch
        self._length = length
        self._cache = forward.new_cache()
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = None if mask is None else mask[:, :stop]
            self._logits = forward(ids[:, start:stop], part, self._cache, last_only=True)

    @property
    def length(self) -> int:
        """Positions so far, padding included."""
        return self._length

    @property
    def logits(self) -> tuple[Tensor, Tensor]:
        """(private (N, b, V), public (b, V)) of the next position, in the model's dtype."""
        return self._logits[1:, :, -1], self._logits[0, :, -1]

    def append(self, tokens: Tensor) -> None:
        """Advances by one token per sequence, the same for every member.

        Args:
            tokens: (b,) int64 or int32.

        Raises:
            ValueError: if the shape or a token is wrong, or the context is full; nothing advances.
        """
        if tuple(tokens.shape) != (self._batch,):
            raise ValueError(f"tokens must have shape ({self._batch},), got {tuple(tokens.shape)}")
        self._forward.check_tokens("tokens", tokens)
        self._forward.check_length(self._length + 1)
        ids = tokens.to(self._forward.model.device, torch.int64)[:, None]
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(ids)], dim=1)
        self._logits = self._forward(ids, self._mask, self._cache, last_only=True)
        self._length += 1
