"""Keys and values of past positions, with room for those to come: a token is written in place.

transformers' own cache joins all past positions with the new one (`torch.cat`) in every step, which
was half of a step of GPT-2 small with N = 100 after 128 tokens (`benchmarks.forward`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_GROWTH = 4  # beyond the room, a layer grows by one part in so many


def key_value_cache(config: Any, positions: int) -> DynamicCache:
    """An empty cache for a model of this configuration.

    Layers of any other kind than plain attention (a sliding window) are transformers' own.

    Args:
        positions: that every layer makes room for when it is first written; it may hold more.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        PreallocatedLayer(positions) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not followed
    """The same numbers as transformers' layer, as views of the front of larger blocks.

    `keys` and `values` are (rows, heads, length, head_dim) views of blocks with `positions` in
    place of the length. What lies behind the views is not initialised, and never read.
    """

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, positions: int) -> None:
        super().__init__()
        self._positions = positions
        self._blocks: list[Tensor | None] = [None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends (rows, heads, new, head_dim); returns all keys and values."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        keys = self.keys = self._append(0, self.keys, key_states)
        values = self.values = self._append(1, self.values, value_states)
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects rows; the blocks of the old ones go at once, layer by layer."""
        super().reorder_cache(beam_idx)
        self._blocks = [None, None]

    def _append(self, which: int, held: Tensor | None, new: Tensor) -> Tensor:
        start = 0 if held is None else held.shape[-2]
        stop = start + new.shape[-2]
        block = self._blocks[which]
        if block is None or block.shape[-2] < stop or not _begins(block, held):
            grown = stop + stop // _GROWTH if start else stop
            room = self._positions if stop <= self._positions else grown
            block = new.new_empty((*new.shape[:-2], room, new.shape[-1]))
            if held is not None:
                block[..., :start, :] = held
            self._blocks[which] = block
        block[..., start:stop, :] = new
        return block[..., :stop, :]


def _begins(block: Tensor, held: Tensor | None) -> bool:
    """Whether `held` is the front of the block: transformers' methods may have put others there."""
    return held is None or (held.data_ptr() == block.data_ptr() and held.shape[0] == block.shape[0])
