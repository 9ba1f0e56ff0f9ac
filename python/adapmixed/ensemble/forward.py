"""The forward pass of an ensemble, and decoding: rows, positions, padding, cache, memory limit."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from adapmixed.ensemble.lora import head_name, layer_shape, linear_names
from adapmixed.ensemble.output_layer import Logits, LogitsRoom, OutputLayer, row_width
from adapmixed.ensemble.trunk import Trunk
from adapmixed.limits import LEAST_ACTIVE
from adapmixed.ranks import Ranks

DEFAULT_MEMORY_BYTES = 1 << 30
AnswerBytes = Callable[[int, int, int, int | None], int]
"""Maps (rows N + 1, V, bytes per logit, K or None) to the bytes that answering one query takes
beyond the logits."""
_LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Forward:
    """The pass of a model with stacked adapters on the same tokens for every member.

    It is the part of an `Ensemble` that computes, and counts the memory for it. Threads may share
    it; their passes run one after the other. Several processes run their members on the same
    tokens, and all use the main process's public row, since another batch may round otherwise.

    Attributes:
        model: a causal language model with stacked adapters (`stack_adapters`).
        output_layer: its output layer, with the N of this process and the members' adapters of it.
        zero_members: members whose updates are all zero. Their logits are copied from the public
            block, because an empty shard must answer exactly as the public model does. Computed in
            another row of a matrix product, the same numbers may round differently.
    """

    model: Any
    output_layer: OutputLayer
    zero_members: tuple[int, ...]
    trunk: Trunk
    vocab_size: int
    max_positions: int | None
    ranks: Ranks

    def __init__(self) -> None:
        # Hooks at the end of the trunk store the shapes of the current pass.
        self._lock = threading.Lock()

    def check_ids(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Any]:
        """Return the validated ids and mask, int64 and on the model's device.

        Args:
            input_ids: as in `Ensemble.logits`.
            attention_mask: as in `Ensemble.logits`.

        Raises:
            ValueError: as `Ensemble.logits`.
        """
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids must have shape (b, t) with b, t >= 1, got {tuple(input_ids.shape)}"
            )
        self.check_tokens("input_ids", input_ids)
        self.check_length(input_ids.shape[1])
        ids = input_ids.to(self.model.device, torch.int64)
        if attention_mask is None:
            return ids, None
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids {tuple(input_ids.shape)}, "
                f"got {tuple(attention_mask.shape)}"
            )
        mask = attention_mask.to(self.model.device, torch.int64)
        other = mask[(mask != 0) & (mask != 1)]
        if other.numel():
            raise ValueError(f"attention_mask must hold 0 and 1 alone, got {int(other[0])}")
        if not bool(mask.any(dim=1).all()):
            row = int((~mask.any(dim=1)).nonzero()[0])
            raise ValueError(f"attention_mask must have a 1 in every row, got none in row {row}")
        return ids, mask

    def check_tokens(self, name: str, tokens: Tensor) -> None:
        """Raise ValueError unless all tokens are ids of this vocabulary."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be int64 or int32, got {tokens.dtype}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"{name} must lie in [0, {self.vocab_size}), got values in [{low}, {high}]"
            )

    def check_length(self, length: int) -> None:
        """Raise ValueError if the model has fewer positions."""
        if self.max_positions is not None and length > self.max_positions:
            raise ValueError(
                f"input must have at most max_positions = {self.max_positions} positions, "
                f"got {length}"
            )

    @property
    def begun(self) -> int:
        """The number of positions that a new cache holds, before the tokens of the sequences."""
        return 0

    def new_cache(self, positions: int = 0, batch: int = 1, chunk: int = 1) -> Any:
        """Return a key/value cache without any token of the sequences.

        Args:
            positions: how many positions it reserves.
            batch: number of sequences.
            chunk: how many positions may be computed in one pass, if it holds any.
        """
        from adapmixed.ensemble.cache import key_value_cache

        return key_value_cache(self.model.config, positions)

    def _masking(self, ids: Tensor, mask: Tensor | None, cache: Any) -> dict[str, Tensor]:
        """Return the arguments that say which positions hold tokens; none without padding.

        Args:
            ids: (rows, s), the new tokens of all rows.
            mask: (b, positions so far and s), or None.
            cache: holds the positions before the new ones.
        """
        if mask is None:
            return {}
        return masking(mask.repeat(len(ids) // len(mask), 1), ids.shape[1])

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        cache: Any,
        *,
        active: int | None = None,
        last_only: bool = False,
        room: LogitsRoom | None = None,
    ) -> Logits:
        """Return the logits of all members, and of the public model.

        Args:
            ids: (b, s) int64, the tokens that the cache does not hold yet.
            mask: (b, cached + s) int64 or None.
            cache: a transformers cache, which advances by s, or None for a single pass.
            active: K, number of the tokens about which members speak; None for all.
            last_only: whether to compute the last position's logits alone.
            room: memory for the logits. It is used if the model does not scale its output;
                otherwise it would add to the scaled logits.

        Returns:
            private (N, b, s or 1, K), public (b, s or 1, V) and tokens (b, s or 1, K), in the
            model's dtype.
        """
        if cache is None and self.begun:
            cache = self.new_cache(self.begun + ids.shape[1], len(ids), ids.shape[1])
        layer = self.output_layer
        copies = layer.num_models + 1 if self.trunk.repeats_input else 1
        arguments: dict[str, Any] = {"input_ids": ids.repeat(copies, 1)}
        if cache is not None:
            from adapmixed.ensemble.cache import cache_argument

            arguments[cache_argument(self.model)] = cache
        arguments |= self._masking(arguments["input_ids"], mask, cache)
        with self._lock:
            layer.active, layer.room = active, None if self._scales_logits else room
            try:
                output = self.model(
                    **arguments,
                    use_cache=cache is not None,
                    logits_to_keep=1 if last_only else 0,
                ).logits
                if self._scales_logits and not self.ranks.alone:  # devices may round that otherwise
                    public = output[..., : self.vocab_size]
                    public.copy_(self.ranks.same(public.contiguous()))
                return layer.split(output, self.zero_members)
            finally:
                layer.room = None

    @cached_property
    @torch.no_grad()
    def _cached_bytes(self) -> tuple[tuple[int, bool, int | None], ...]:
        """Return (bytes per row and position, whether members have own rows, window) per layer.

        The window is None if it does not slide. The sizes are read from a cache with one position,
        because configurations name the heads in many ways.
        """
        from adapmixed.ensemble.cache import written_layers

        cache = self.new_cache()
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.model.device)
        self.forward(token, None, cache, last_only=True)
        found = []
        for layer in written_layers(cache):
            rows = len(layer.keys)
            size = sum(part.numel() * part.element_size() for part in (layer.keys, layer.values))
            found.append((size // rows, rows > 1, getattr(layer, "sliding_window", None)))
        return tuple(found)

    @cached_property
    def _widest(self) -> int:
        """Return the width of the widest linear layer below the output layer.

        Configurations name it in many ways, and it may differ from block to block.
        """
        head = head_name(self.model)
        below = [name for name in linear_names(self.model) if not f"{name}.".startswith(f"{head}.")]
        return max(max(layer_shape(self.model.get_submodule(name))) for name in below)

    def cache_bytes(self, batch: int, positions: int) -> int:
        """Return the bytes of a key/value cache of `batch` = b sequences.

        A layer holds 2 rows positions heads head_dim numbers, with b rows in the trunk and
        (N + 1) b above. Layers with a sliding window keep no more positions than the window. The
        largest layer counts twice: layers are copied one by one when a sequence ends, and a layer
        with a sliding window at every token.
        """
        layers = [
            (self._rows(batch) if own else batch)
            * size
            * (positions if window is None else min(positions, window))
            for size, own, window in self._cached_bytes
        ]
        return sum(layers) + max(layers)

    def chunk_size(
        self,
        batch: int,
        length: int,
        memory_bytes: int,
        *,
        last_only: bool,
        window: int | None = None,
        answer_bytes: AnswerBytes | None = None,
        active: int | None = None,
    ) -> int:
        """Return how many positions one pass may take so that everything fits the limit.

        These are counted; weights and adapters are not:

        - the key/value cache of `window` positions. Without `last_only` it is not needed if all
          positions fit one pass;
        - b (V + N K) logits per position, or of one position if `last_only`; twice as many if the
          model caps or scales its logits;
        - the bytes that `answer_bytes` adds for the last position's query;
        - an estimate of one layer's activations.

        Args:
            batch: b, the number of sequences.
            length: positions of the input.
            memory_bytes: the limit, in bytes.
            last_only: whether only the last position's logits are computed.
            window: positions that the cache holds; None for `length`.
            answer_bytes: as in `Ensemble.decoder`.
            active: as in `forward`.

        Raises:
            ValueError: if not even one position fits; the message names the bytes needed, and what
                would fit.
        """
        window = length if window is None else window
        logits, activations = self._position_bytes(batch, window, answer_bytes, active)
        fixed, per_position = (logits, activations) if last_only else (0, logits + activations)
        if not last_only and memory_bytes >= length * per_position:
            return length
        cache = self.cache_bytes(batch, window)
        needed = cache + fixed + per_position
        if not last_only:
            needed = min(needed, length * per_position)
        if memory_bytes < needed:
            fitting = self._fitting(batch, window, answer_bytes, active, memory_bytes)
            raise ValueError(
                f"memory_bytes must be >= {needed} for {self._rows(batch)} rows (one for the "
                f"public and each private model, times the batch), got {memory_bytes}: keys and "
                f"values of {window} positions take {cache} bytes, and computing one position "
                f"{fixed + per_position}{fitting}"
            )
        return min(length, (memory_bytes - cache - fixed) // per_position)

    def _fitting(
        self,
        batch: int,
        window: int,
        answer_bytes: AnswerBytes | None,
        active: int | None,
        memory_bytes: int,
    ) -> str:
        """Return the largest batch, and the largest active vocabulary, that fit; "" for neither."""

        def needed(batch: int, active: int | None) -> int:
            cache = self.cache_bytes(batch, window)
            return cache + sum(self._position_bytes(batch, window, answer_bytes, active))

        most = memory_bytes // needed(1, active)
        widths = range(LEAST_ACTIVE, active or self.vocab_size)
        fitting = bisect_right(widths, memory_bytes, key=lambda width: needed(batch, width))
        ways = [f"a batch of {most}"] if most else []
        ways += [f"active = {widths[fitting - 1]}"] if fitting else []
        return f"; {' or '.join(ways)} would fit" if ways else ""

    @property
    def _scales_logits(self) -> bool:
        config = self.model.config.get_text_config()
        return any(getattr(config, name, None) for name in _LOGIT_SCALES)

    def _rows(self, batch: int) -> int:
        """Return the rows of a batch, the same number on every process."""
        return (self.ranks.held(self.output_layer.num_models)[0] + 1) * batch

    def _position_bytes(
        self, batch: int, window: int, answer_bytes: AnswerBytes | None, active: int | None
    ) -> tuple[int, int]:
        """Return the bytes of one position's logits, and those of a layer's activations."""
        rows = self._rows(batch)
        config = self.model.config.get_text_config()
        hidden = int(config.hidden_size) * int(getattr(config, "altup_num_inputs", 1))
        inner = self._widest
        element = int(next(self.model.parameters()).element_size())
        members, gathered = self.ranks.held(self.output_layer.num_models)
        width = row_width(self.vocab_size, active)
        numbers = self.vocab_size + members * width
        # Capping or scaling the output needs a second copy of it.
        logits = (2 if self._scales_logits else 1) * batch * numbers * element
        received = batch * gathered * width * element
        if answer_bytes is None:
            logits += received
        else:
            rows_held = max(members, gathered) + 1
            held = batch * answer_bytes(rows_held, self.vocab_size, element, active)
            logits = max(logits, batch * numbers * element + received + held)
        # Residual stream, normed input, q, k, v, attention output, twice the wider hidden layer
        # and, at worst, a row of scores or masks over all positions for every head.
        heads = int(getattr(config, "num_attention_heads", 1))
        computed = batch if self.trunk.head is not None else rows
        activations = computed * (element * (8 * hidden + 2 * inner) + 4 * heads * window)
        if element < 4:  # adapters compute in fp32
            activations += computed * 4 * (hidden + inner)
        # In the output layer the public columns, and those of members in fp32 or without adapters.
        own = (0 if element == 4 else 4) + (0 if self.trunk.head is not None else element)
        activations += batch * (4 + own * members) * width
        if active is not None and self.trunk.head is None:  # the active tokens' rows
            activations += active * int(config.hidden_size) * element
        return logits, activations


def masking(mask: Tensor, new: int) -> dict[str, Tensor]:
    """Return the mask of all positions, and the numbers of the new ones without padding."""
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -new:]
    return {"attention_mask": mask, "position_ids": positions}


class Decoder:
    """The next position's logits, and the cache that advances by the chosen tokens.

    `Ensemble.decoder` makes it. The cache holds b rows of keys and values in layers that members
    share with the public model, and (N + 1) b rows in all other layers. It reserves room for every
    position that `memory_bytes` was checked for.

    Sequences may leave and join between two tokens.
    """

    def __init__(
        self,
        forward: Forward,
        ids: Tensor,
        mask: Tensor | None,
        memory_bytes: int,
        active: int | None = None,
        new_tokens: int = 0,
        answer_bytes: AnswerBytes | None = None,
        unread: bool = False,
    ) -> None:
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("attention_mask must end in 1 in every row: pad on the left to decode")
        self._forward, self._active = forward, active
        self._memory_bytes = memory_bytes
        self._answer_bytes = answer_bytes
        self._ids = ids
        self._mask = mask
        self._logits: Logits | None
        self._going: Tensor | None = None  # the sequences of `_logits` that were not dropped
        self._room = LogitsRoom()
        self._unread = 0  # positions at the end that the cache does not hold yet
        self._cut(int(self._padding().min()))
        # Each sequence's positions at its end, so that no later read needs more memory.
        self._ends = self.length - self._padding() + new_tokens
        self._begin()
        if not unread:
            self.read()

    @property
    def length(self) -> int:
        """The number of positions that the next token is predicted from, with padding."""
        return self._ids.shape[1]

    @property
    def window(self) -> int:
        """The largest number of positions that its sequences will need."""
        return int(self._ends.max()) + self._forward.begun

    @property
    def unread(self) -> int:
        """The number of positions still to `read` before the decoder can go on."""
        return self._unread

    def read(self, positions: int | None = None) -> None:
        """Read the next positions of the prompts, in chunks that fit the memory.

        Args:
            positions: their number; None for all.
        """
        left = 0 if positions is None else max(0, self._unread - positions)
        while self._unread > left:
            start = self.length - self._unread
            self._unread = max(left, self._unread - self._chunk)
            stop = self.length - self._unread
            part = None if self._mask is None else self._mask[:, :stop]
            self._advance(self._ids[:, start:stop], part)

    @property
    def logits(self) -> Logits:
        """The next position's: private (N, b, K), public (b, V), and the tokens of the K columns.

        The tokens are (b, K) int64, ascending; None if K = V.
        """
        assert self._logits is not None, "read() or append() must come first"
        private, public, tokens = self._logits
        private, public = private[:, :, -1], public[:, -1]
        tokens = None if tokens is None else tokens[:, -1]
        if self._going is not None:
            private, public = private[:, self._going], public[self._going]
            tokens = None if tokens is None else tokens[self._going]
        return Logits(private, public, tokens)

    def append(self, tokens: Tensor) -> None:
        """Advance by one token per sequence, the same for every member.

        Args:
            tokens: (b,) int64 or int32.

        Raises:
            ValueError: if the shape or a token is wrong, or if the context is full. Nothing
                advances then.
        """
        self._check_read()
        batch, length = self._ids.shape
        if tuple(tokens.shape) != (batch,):
            raise ValueError(f"tokens must have shape ({batch},), got {tuple(tokens.shape)}")
        self._forward.check_tokens("tokens", tokens)
        self._forward.check_length(length + 1)
        new = tokens.to(self._forward.model.device, torch.int64)[:, None]
        self._ids = torch.cat([self._ids, new], dim=1)
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(new)], dim=1)
        self._advance(new, self._mask)

    def drop(self, ended: Tensor) -> None:
        """Drop sequences that ended; the others keep their order.

        Padding that the others have in common is dropped, too. If prompts are not read to the end,
        the reading begins anew.

        Args:
            ended: (b,) bool, at least one of them False.
        """
        from adapmixed.ensemble.cache import keep_rows, written_layers

        going = (~ended).nonzero()[:, 0].to(self._ids.device)
        first = int(self._padding()[going].min())
        self._ends = self._ends[going]
        if not self._unread:
            rows = self._forward.output_layer.num_models + 1
            blocks = torch.arange(rows, device=going.device) * len(ended)
            in_all_blocks = (blocks[:, None] + going).flatten()
            for layer in written_layers(self._cache):
                kept = going if len(layer.keys) == len(ended) else in_all_blocks
                keep_rows(layer, kept, self._forward.begun + self.length - first, self.window)
            # The logits are not copied here: usually nobody reads them again.
            self._going = going if self._going is None else self._going[going]
        self._ids = self._ids[going]
        if self._mask is not None:
            self._mask = self._mask[going]
        self._cut(first)
        if self._unread:
            self._begin()

    def join(self, other: Decoder) -> None:
        """Add another decoder's sequences behind these, before `append` advances all of them.

        The logits of both are lost until then, and the other decoder must not be used again.

        Args:
            other: of the same ensemble.

        Raises:
            ValueError: if the other decoder is of another ensemble.
        """
        from adapmixed.ensemble.cache import join_rows, written_layers

        if other._forward is not self._forward or other._active != self._active:
            raise ValueError("other must be a decoder of the same ensemble")
        self._check_read()
        other._check_read()
        self._logits = other._logits = None
        self._going = None
        self._ends = torch.cat([self._ends, other._ends])
        sequences = len(self._ids), len(other._ids)
        pairs = zip(written_layers(self._cache), written_layers(other._cache), strict=True)
        for layer, joining in pairs:
            join_rows(layer, joining, sequences, self.window)
        width = max(self.length, other.length)
        masks = [one._all_masked(width) for one in (self, other)]
        self._ids = torch.cat([pad(one._ids, (width - one.length, 0)) for one in (self, other)])
        self._set_mask(torch.cat(masks))

    def _all_masked(self, width: int) -> Tensor:
        """Return the (b, width) mask with padding on the left."""
        mask = torch.ones_like(self._ids) if self._mask is None else self._mask
        return pad(mask, (width - self.length, 0))

    def _cut(self, first: int) -> None:
        """Forget the ids and the mask of the first positions, which hold padding alone."""
        self._ids = self._ids[:, first:]
        if self._mask is not None:
            self._set_mask(self._mask[:, first:])

    def _set_mask(self, mask: Tensor) -> None:
        self._mask = None if bool(mask.all()) else mask

    def _padding(self) -> Tensor:
        """Return (b,) int64, the positions before each sequence's first token."""
        if self._mask is None:
            return torch.zeros_like(self._ids[:, 0])
        return (self._mask.cumsum(dim=1) == 0).sum(dim=1)

    def _check_read(self) -> None:
        if self._unread:
            raise ValueError(f"read() must be called first: {self._unread} positions are unread")

    def _begin(self) -> None:
        """Make a new cache, which holds no position yet."""
        batch, length = self._ids.shape
        self._chunk = self._forward.chunk_size(
            batch, length, self._memory_bytes, last_only=True, window=self.window,
            answer_bytes=self._answer_bytes, active=self._active,
        )  # fmt: skip
        self._cache = self._forward.new_cache(self.window, batch, self._chunk)
        self._unread = length

    def _advance(self, ids: Tensor, mask: Tensor | None) -> None:
        self._going = None
        self._logits = None  # free the old logits before computing the new ones
        self._logits = self._forward.forward(
            ids, mask, self._cache, active=self._active, last_only=True, room=self._room
        )
