"""Step-by-step decoding of an ensemble: one key/value cache, the same tokens for every member."""

from __future__ import annotations

import torch
from torch import Tensor

from adapmixed.ensemble.forward import BatchedForward, Beside
from adapmixed.ensemble.room import LogitsRoom


class Decoder:
    """Holds the next position's logits and advances by the tokens that were chosen for it.

    Made by `Ensemble.decoder`. The cache holds b rows of keys and values in layers that the members
    share with the public model and (N + 1) b rows in the others. It has room for all positions that
    were counted when the memory was asked for.

    Where the window slides, it is each sequence's own: what is forgotten, and when, is what would
    be if the sequence were alone, whatever lies beside it. All are read anew when one is cut.
    """

    def __init__(
        self,
        forward: BatchedForward,
        ids: Tensor,
        mask: Tensor | None,
        memory_bytes: int,
        slide: bool = False,
        new_tokens: int = 0,
        beside: Beside | None = None,
    ) -> None:
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("attention_mask must end in 1 in every row: pad on the left to decode")
        self._forward = forward
        self._memory_bytes = memory_bytes
        self._beside = beside
        self._slide = slide
        self._ids = ids
        self._mask = mask
        self._logits: Tensor
        self._going: Tensor | None = None  # sequences of these logits that were not dropped
        self._room = LogitsRoom()
        limit = forward.max_positions if slide else None
        if limit is not None:
            self._keep(limit, limit)
        # The most positions that will ever be read at once: no later read can need more memory.
        window = self.length + new_tokens
        self._window = window if limit is None else min(window, limit)
        self._read()

    @property
    def length(self) -> int:
        """Positions that the next token is predicted from, padding included."""
        return self._ids.shape[1]

    @property
    def logits(self) -> tuple[Tensor, Tensor]:
        """(private (N, b, V), public (b, V)) of the next position, in the model's dtype."""
        logits = self._logits[:, :, -1]
        if self._going is not None:
            logits = logits[:, self._going]
        return logits[1:], logits[0]

    def append(self, tokens: Tensor) -> None:
        """Advances by one token per sequence, the same for every member.

        Where a sequence's window is full and may slide, its later half and the new token are kept.

        Args:
            tokens: (b,) int64 or int32.

        Raises:
            ValueError: if the shape or a token is wrong, or the context is full; nothing advances.
        """
        batch, length = self._ids.shape
        if tuple(tokens.shape) != (batch,):
            raise ValueError(f"tokens must have shape ({batch},), got {tuple(tokens.shape)}")
        self._forward.check_tokens("tokens", tokens)
        full = length == self._forward.max_positions
        if not (full and self._slide):
            self._forward.check_length(length + 1)
        new = tokens.to(self._forward.model.device, torch.int64)[:, None]
        self._ids = torch.cat([self._ids, new], dim=1)
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(new)], dim=1)
        if full:
            self._keep(length, max(1, length // 2))
            self._read()
        else:
            self._advance(new, self._mask)

    def drop(self, ended: Tensor) -> None:
        """Forgets sequences; the others keep their order, and only they are read from here on.

        Args:
            ended: (b,) bool, at least one of them False.
        """
        going = (~ended).nonzero()[:, 0].to(self._ids.device)
        blocks = torch.arange(len(self._logits), device=going.device)[:, None] * len(ended)
        for layer in self._cache.layers:
            rows = going if len(layer.keys) == len(ended) else (blocks + going).flatten()
            layer.reorder_cache(rows)  # what beam search reorders with also selects
        # Their logits are usually done with, and a copy of the others' would be for nothing.
        self._going = going if self._going is None else self._going[going]
        self._ids = self._ids[going]
        if self._mask is not None:
            self._mask = self._mask[going]

    def _keep(self, limit: int, count: int) -> None:
        """Cuts sequences of more than `limit` tokens to their last `count`, and pads no further."""
        mask = torch.ones_like(self._ids) if self._mask is None else self._mask
        held = mask.sum(dim=1)
        held = torch.where(held > limit, held.clamp_max(count), held)
        order = mask.argsort(dim=1, stable=True)  # padding first; tokens keep their order
        width = int(held.max())
        place = torch.arange(width, device=held.device)
        mask = (place >= width - held[:, None]).to(mask.dtype)
        self._ids = self._ids.gather(1, order)[:, -width:] * mask
        self._mask = None if bool(mask.all()) else mask

    def _read(self) -> None:
        """Fills a new cache with all positions, chunk by chunk."""
        batch, length = self._ids.shape
        chunk = self._forward.chunk_size(
            batch, length, self._memory_bytes, last_only=True, window=self._window,
            beside=self._beside,
        )  # fmt: skip
        self._cache = self._forward.new_cache(self._window)
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = None if self._mask is None else self._mask[:, :stop]
            self._advance(self._ids[:, start:stop], part)

    def _advance(self, ids: Tensor, mask: Tensor | None) -> None:
        self._going = None
        self._logits = ids.new_empty(0)  # the old ones go before the new ones are computed
        self._logits = self._forward(ids, mask, self._cache, last_only=True, room=self._room)
