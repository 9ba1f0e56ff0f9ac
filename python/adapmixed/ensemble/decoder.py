"""Decoding: the next position's logits, sequences that join and leave, and their keys and values.

transformers' own cache copies all past positions at every step (`torch.cat`), which takes a large
part of a step. Here a token is written in place, into room for later positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from adapmixed.ensemble.lora import Logits, LogitsRoom

if TYPE_CHECKING:
    from adapmixed.ensemble.ensemble import AnswerBytes, Ensemble

_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")  # the last one holds nothing


class Decoder:
    """The next position's logits, and the cache that advances by the chosen tokens.

    `Ensemble.decoder` makes it. The cache holds b rows of keys and values in layers that members
    share with the public model, and (N + 1) b rows in all other layers. It reserves room for every
    position that `memory_bytes` was checked for.

    Sequences may leave and join between two tokens.

    Attributes:
        length: number of positions that the next token is predicted from, with padding.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        ids: Tensor,
        mask: Tensor | None,
        memory_bytes: int,
        active: int | None = None,
        new_tokens: int = 0,
        answer_bytes: AnswerBytes | None = None,
        unread: bool = False,
    ) -> None:
        mask = torch.ones_like(ids) if mask is None else mask.to(ids)
        fits = mask.shape == ids.shape and bool(mask[:, -1].all())
        if not fits or not torch.equal(mask, mask.clamp(0, 1).cummax(dim=1).values):
            raise ValueError(
                f"attention_mask must have the shape of input_ids {tuple(ids.shape)} and 0s before "
                f"1s in each row, since decoding pads on the left, got {mask}"
            )
        self._ensemble, self._active = ensemble, active
        self._logits: Logits | None = None
        self._room = LogitsRoom()
        padding = (mask == 0).sum(dim=1)
        first = int(padding.min())
        self._padding = padding - first  # (b,) int64, the positions before each sequence
        self._left = ids[:, first:]  # the tokens that the cache does not hold yet
        self.length = self.unread
        # Each sequence's positions at its end, so that no later read needs more memory.
        self._ends = self.length - self._padding + new_tokens
        self._chunk = ensemble.chunk_size(
            len(ids), self.length, memory_bytes, last_only=True, window=self.window,
            answer_bytes=answer_bytes, active=active,
        )  # fmt: skip
        self._cache = ensemble.new_cache(self.window, len(ids), self._chunk)
        if not unread:
            self.read()

    @property
    def window(self) -> int:
        """The largest number of positions that its sequences will need."""
        return int(self._ends.max()) + self._ensemble.begun

    @property
    def unread(self) -> int:
        """The number of positions still to `read` before the decoder can go on."""
        return self._left.shape[1]

    def read(self, positions: int | None = None) -> None:
        """Read the next positions of the prompts, in chunks that fit the memory.

        Args:
            positions: their number; None for all.
        """
        left = 0 if positions is None else max(0, self.unread - positions)
        while self.unread > left:
            size = min(self._chunk, self.unread - left)
            ids, self._left = self._left[:, :size], self._left[:, size:]
            self._advance(ids)

    @property
    def logits(self) -> Logits:
        """The next position's: private (N, b, K), public (b, V), and the tokens of the K columns.

        The tokens are (b, K) int64, ascending; None if K = V.
        """
        assert self._logits is not None, "read() or append() must come first"
        private, public, tokens = self._logits
        return Logits(private[:, :, -1], public[:, -1], None if tokens is None else tokens[:, -1])

    def append(self, tokens: Tensor) -> None:
        """Advance by one token per sequence, the same for every member.

        Args:
            tokens: (b,) int64 or int32.

        Raises:
            ValueError: if the shape or a token is wrong, or if the context is full. Nothing
                advances then.
        """
        self._check_read()
        batch = len(self._ends)
        if tuple(tokens.shape) != (batch,):
            raise ValueError(f"tokens must have shape ({batch},), got {tuple(tokens.shape)}")
        self._ensemble.check_tokens("tokens", tokens)
        self._ensemble.check_length(self.length + 1)
        self.length += 1
        self._advance(tokens.to(self._ensemble.device, torch.int64)[:, None])

    def drop(self, ended: Tensor) -> None:
        """Drop sequences that ended, before `append` advances the others, which keep their order.

        The logits are lost until then. Padding that the others have in common is dropped, too.

        Args:
            ended: (b,) bool, at least one of them False.
        """
        going = (~ended).nonzero()[:, 0].to(self._ends.device)
        first, read = int(self._padding[going].min()), self.length - self.unread
        self._ends, self._padding = self._ends[going], self._padding[going] - first
        held = self._ensemble.begun + max(0, read - first)
        for layer in written_layers(self._cache):
            regroup(layer, [(layer, going)], len(ended), held, self.window)
        self._logits = None
        self._left = self._left[going, max(0, first - read) :]
        self.length -= first

    def join(self, other: Decoder) -> None:
        """Add another decoder's sequences behind these, before `append` advances all of them.

        The logits of both are lost until then, and the other decoder must not be used again.

        Args:
            other: of the same ensemble.

        Raises:
            ValueError: if the other decoder is of another ensemble.
        """
        if other._ensemble is not self._ensemble or other._active != self._active:
            raise ValueError("other must be a decoder of the same ensemble")
        self._check_read()
        other._check_read()
        self._logits = other._logits = None
        width, device = max(self.length, other.length), self._ends.device
        kept, joining = (torch.arange(len(side._ends), device=device) for side in (self, other))
        self._ends = torch.cat([self._ends, other._ends])
        pairs = zip(written_layers(self._cache), written_layers(other._cache), strict=True)
        for layer, more in pairs:
            sources = [(layer, kept), (more, joining)]
            regroup(layer, sources, len(kept), self._ensemble.begun + width, self.window)
            more.keys = more.values = more._blocks = None  # no second copy of other layers
        self._padding = torch.cat([side._padding + width - side.length for side in (self, other)])
        self._left = torch.cat([self._left, other._left])
        self.length = width

    def _check_read(self) -> None:
        if self.unread:
            raise ValueError(f"read() must be called first: {self.unread} positions are unread")

    def _advance(self, ids: Tensor) -> None:
        self._logits = None  # free the old logits before computing the new ones
        places = torch.arange(self.length - self.unread, device=ids.device)
        mask = (places >= self._padding[:, None]).long() if bool(self._padding.any()) else None
        self._logits = self._ensemble.forward(
            ids, mask, self._cache, active=self._active, last_only=True, room=self._room
        )


def key_value_cache(config: Any, positions: int) -> DynamicCache:
    """Return an empty cache for a model of this configuration.

    Layers that are not plain attention, for instance with a sliding window, use transformers'
    own cache layers.

    Args:
        config: the model's transformers configuration.
        positions: how many positions each layer reserves when it is first written. If more come,
            it is copied for each of them.
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

    Another state may depend on padding and chunk boundaries, or cannot join or leave a batch.

    Raises:
        ValueError: if a layer has a recurrent state, or another kind of memory.
    """
    for layer in DynamicCache(config=config).layers:
        if type(layer).__name__ not in _LAYERS:
            raise ValueError(
                f"base must have attention layers only, which cache keys and values alone, got "
                f"{config.model_type} with {type(layer).__name__}"
            )


def cache_argument(model: Any) -> str:
    """Return the name of the argument by which a model takes a cache.

    transformers renamed it from `past_key_values` to `cache` in version 5.24.

    Raises:
        ValueError: if the model takes none.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
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
            room = max(stop, self._positions)
            block = new.new_empty((*new.shape[:-2], room, new.shape[-1]))
            if held is not None:
                block[..., :start, :] = held
            self._blocks[which] = block
        block[..., start:stop, :] = new
        return block[..., :stop, :]


def regroup(
    layer: Any, sources: Sequence[tuple[Any, Tensor]], batch: int, length: int, positions: int
) -> None:
    """Let a cache layer hold chosen sequences of layers, those of one source behind another's.

    Rows are grouped in blocks of all sequences, one block per member. The shorter rows are padded
    on the left with zeros.

    Args:
        layer: a layer of `key_value_cache` that was written.
        sources: this layer, and the same layer of other caches for the same model, each with the
            (r,) int64 numbers of the sequences that are chosen.
        batch: number of sequences that the layer has.
        length: number of positions that stay. A layer with a sliding window may hold fewer.
        positions: how many positions to reserve; a layer with a sliding window reserves none.
    """
    held = min(length, max(source.keys.shape[-2] for source, _ in sources))
    room = max(held, positions) if isinstance(layer, PreallocatedLayer) else held
    pair = []
    for name in ("keys", "values"):
        rows, heads, _, size = getattr(layer, name).shape
        blocks, start = rows // batch, 0
        # Zeros: what is padding is masked, but 0 times a NaN would not be 0.
        count = sum(len(chosen) for _, chosen in sources)
        block = getattr(layer, name).new_zeros(blocks, count, heads, room, size)
        for source, chosen in sources:
            part = getattr(source, name)
            stay, stop = min(part.shape[-2], held), start + len(chosen)
            last = part[..., part.shape[-2] - stay :, :]
            last = last.view(blocks, len(part) // blocks, heads, stay, size)
            place = block[:, start:stop, :, held - stay : held]
            torch.index_select(last, 1, chosen, out=place)
            start = stop
        pair.append(block.flatten(0, 1))
    layer.keys, layer.values = (block[..., :held, :] for block in pair)
    if isinstance(layer, PreallocatedLayer):
        layer._blocks, layer._positions = pair, positions
    if hasattr(layer, "cumulative_length"):  # a sliding window counts what it has forgotten, too
        layer.cumulative_length = length
