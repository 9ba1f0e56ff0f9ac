"""A key/value cache with room for later positions, so that a token is written in place.

transformers' own cache copies all past positions at every step (`torch.cat`), which takes a large
part of a step.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_GROWTH = 4  # a full layer grows by a quarter
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")  # the last one holds nothing


def key_value_cache(config: Any, positions: int) -> DynamicCache:
    """Return an empty cache for a model of this configuration.

    Layers that are not plain attention, for instance with a sliding window, use transformers'
    own cache layers.

    Args:
        config: the model's transformers configuration.
        positions: how many positions each layer reserves when it is first written. A layer grows
            if more come.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        PreallocatedLayer(positions) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


def written_layers(cache: Any) -> list[Any]:
    """Return the layers that hold keys and values; the others read those of a layer below."""
    return [layer for layer in cache.layers if layer.keys is not None]


def check_cache(config: Any) -> None:
    """Check that a model keeps nothing between positions but keys and values.

    Raises:
        ValueError: if a layer has a recurrent state, or another kind of memory.
    """
    for layer in DynamicCache(config=config).layers:
        if hasattr(layer, "update_recurrent_state"):
            raise ValueError(
                f"base must have attention layers only, got {config.model_type} with recurrent "
                "ones: their state depends on padding and chunk boundaries, so that a batch would "
                "answer otherwise than single prompts"
            )
        if type(layer).__name__ not in _LAYERS:
            raise ValueError(
                f"base must have layers that cache keys and values alone, got {config.model_type} "
                f"with {type(layer).__name__}"
            )


def cache_argument(model: Any) -> str:
    """Return the name of the argument by which a model takes a cache.

    transformers renamed it from `past_key_values` to `cache` in version 5.24.

    Raises:
        ValueError: if the model takes none.
    """
    known = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in known:
            return name
    raise ValueError(
        "base must take a key/value cache (an argument cache or past_key_values), got "
        f"{type(model).__name__}, which takes none"
    )


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not followed
    """A cache layer whose keys and values are views into larger, reserved blocks.

    It holds the same numbers as transformers' layer. `keys` and `values` are (rows, heads, length,
    head_dim) views of blocks of length `positions`. The rest of a block is uninitialised and never
    read.
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
        """Append (rows, heads, new, head_dim) and return all keys and values."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        keys = self.keys = self._append(0, self.keys, key_states)
        values = self.values = self._append(1, self.values, value_states)
        return keys, values

    def _append(self, which: int, held: Tensor | None, new: Tensor) -> Tensor:
        start = 0 if held is None else held.shape[-2]
        stop = start + new.shape[-2]
        block = self._blocks[which]
        if block is None or block.shape[-2] < stop:
            grown = stop + stop // _GROWTH if start else stop
            room = self._positions if stop <= self._positions else grown
            block = new.new_empty((*new.shape[:-2], room, new.shape[-1]))
            if held is not None:
                block[..., :start, :] = held
            self._blocks[which] = block
        block[..., start:stop, :] = new
        return block[..., :stop, :]


def keep_rows(layer: Any, rows: Tensor, left: int, positions: int) -> None:
    """Keep some rows of a cache layer, and of these the last `left` positions.

    Args:
        layer: a layer of `key_value_cache` that was written.
        rows: (r,) int64 on the layer's device.
        left: number of positions that stay. A layer with a sliding window may hold fewer.
        positions: how many positions these rows will need; as in :func:`join_rows`.
    """
    kept = []
    for part in (layer.keys, layer.values):
        stay = min(part.shape[-2], left)
        kept.append(part[..., part.shape[-2] - stay :, :].index_select(0, rows))
    _hold(layer, kept, kept[0].shape[-2], left, positions)


def join_rows(layer: Any, other: Any, sequences: tuple[int, int], positions: int) -> None:
    """Add another layer's sequences behind those of a cache layer; the other layer loses them.

    Rows are grouped in blocks of all sequences, one block per member. The shorter rows are padded
    on the left with zeros.

    Args:
        layer: a layer of `key_value_cache` that was written.
        other: the same layer of another cache for the same model.
        sequences: number of sequences in each of the two.
        positions: how many positions to reserve; a layer with a sliding window reserves none.
    """
    length = max(layer.get_seq_length(), other.get_seq_length())
    held = max(layer.keys.shape[-2], other.keys.shape[-2])
    room = max(held, positions) if isinstance(layer, PreallocatedLayer) else held
    joined = []
    for name in ("keys", "values"):
        parts = [getattr(one, name) for one in (layer, other)]
        blocks = len(parts[0]) // sequences[0]
        _, heads, _, size = parts[0].shape
        block = parts[0].new_empty(blocks, sum(sequences), heads, room, size)
        start = 0
        for part, count in zip(parts, sequences, strict=True):
            rows, padding = block[:, start : start + count], held - part.shape[-2]
            rows[..., :padding, :] = 0.0  # masked, but 0 times a NaN would not be 0
            rows[..., padding:held, :] = part.unflatten(0, (blocks, count))
            start += count
        joined.append(block.flatten(0, 1))
    other.keys = other.values = None
    _hold(layer, joined, held, length, positions)


def _hold(layer: Any, blocks: list[Tensor], held: int, length: int, positions: int) -> None:
    """Let a layer hold the first `held` positions of new blocks, the last ones of `length`.

    From now on it reserves `positions` if it needs larger blocks.
    """
    layer.keys, layer.values = (block[..., :held, :] for block in blocks)
    if isinstance(layer, PreallocatedLayer):
        layer._blocks, layer._positions = list(blocks), positions
    if hasattr(layer, "cumulative_length"):  # a sliding window counts what it has forgotten, too
        layer.cumulative_length = length
