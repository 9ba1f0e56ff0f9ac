"""The forward pass of an ensemble: repeated rows, positions, padding, cache, memory limit."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble.lora import head_name, layer_shape, linear_names
from adapmixed.ensemble.output_layer import SPARE, Logits, LogitsRoom, OutputLayer
from adapmixed.ensemble.trunk import Trunk
from adapmixed.limits import LEAST_ACTIVE
from adapmixed.ranks import ALONE, Ranks

DEFAULT_MEMORY_BYTES = 1 << 30
AnswerBytes = Callable[[int, int, int, int | None], int]
"""Maps (rows N + 1, V, bytes per logit, K or None) to the bytes that answering one query takes
beyond the logits."""
_LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True)
class BatchedForward:
    """Runs a model with stacked adapters on the same tokens for every member.

    Threads may share it; their passes run one after the other.

    Attributes:
        model: a causal language model with stacked adapters (`stack_adapters`).
        num_models: N of this process.
        vocab_size: V, the width of the logits.
        max_positions: longest input in tokens, or None if the model sets no limit.
        zero_members: members whose updates are all zero. Their logits are copied from the public
            block, because an empty shard must answer exactly as the public model does. Computed in
            another row of a matrix product, the same numbers may round differently.
        trunk: the layers that members share; rows are repeated where it ends.
        layer: the model's output layer.
        active: K, number of the tokens about which members speak; None for all.
        ranks: the processes that run the other members on the same tokens. All use the main
            process's public row, since another batch may round the same numbers differently.
    """

    model: Any
    num_models: int
    vocab_size: int
    max_positions: int | None
    zero_members: tuple[int, ...]
    layer: OutputLayer
    trunk: Trunk = Trunk()
    active: int | None = None
    ranks: Ranks = ALONE
    # Hooks at the end of the trunk store the shapes of the current pass.
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

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
    def __call__(
        self,
        ids: Tensor,
        mask: Tensor | None,
        cache: Any,
        *,
        last_only: bool = False,
        room: LogitsRoom | None = None,
    ) -> Logits:
        """Return the logits of all members, and of the public model.

        Args:
            ids: (b, s) int64, the tokens that the cache does not hold yet.
            mask: (b, cached + s) int64 or None.
            cache: a transformers cache, which advances by s, or None for a single pass.
            last_only: whether to compute the last position's logits alone.
            room: memory for the logits. It is used if the model does not scale its output;
                otherwise it would add to the scaled logits.

        Returns:
            private (N, b, s or 1, K), public (b, s or 1, V) and tokens (b, s or 1, K), in the
            model's dtype.
        """
        if cache is None and self.begun:
            cache = self.new_cache(self.begun + ids.shape[1], len(ids), ids.shape[1])
        rows = self.num_models + 1
        copies = rows if self.trunk.repeats_input else 1
        arguments: dict[str, Any] = {"input_ids": ids.repeat(copies, 1)}
        if cache is not None:
            from adapmixed.ensemble.cache import cache_argument

            arguments[cache_argument(self.model)] = cache
        arguments |= self._masking(arguments["input_ids"], mask, cache)
        layer = self.layer
        with self._lock:
            layer.active, layer.room = self.active, None if self._scales_logits else room
            try:
                output = self.model(
                    **arguments,
                    use_cache=cache is not None,
                    logits_to_keep=1 if last_only else 0,
                ).logits
                private, public, tokens = layer.split(output)
            finally:
                layer.room = layer.tokens = None
        if self._scales_logits and not self.ranks.alone:  # devices may round that otherwise
            public.copy_(self.ranks.same(public.contiguous()))
        masked = layer.masked
        if masked is not None:
            public.index_fill_(-1, masked, float("-inf"))
            if tokens is None:
                private.index_fill_(-1, masked, float("-inf"))
        columns = public if tokens is None else public.gather(-1, tokens)
        for member in self.zero_members:
            private[member].copy_(columns)
        return Logits(private, public, tokens)

    def chunks(
        self, ids: Tensor, mask: Tensor | None, chunk: int, room: LogitsRoom
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Yield (slice of positions, private, public, tokens), `chunk` positions each."""
        batch, length = ids.shape
        room.release(chunk * self.logits_size(batch))  # too much room would exceed the limit
        cache = self.new_cache(length + self.begun, batch, chunk) if chunk < length else None
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = None if mask is None else mask[:, :stop]
            result = self(ids[:, start:stop], part, cache, room=room)
            yield slice(start, stop), *result
            del result  # so that the caller can free it before the next one is computed

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
        replace(self, ranks=ALONE)(token, None, cache, last_only=True)
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

        Raises:
            ValueError: if not even one position fits; the message names the bytes needed, and what
                would fit.
        """
        window = length if window is None else window
        logits, activations = self._position_bytes(batch, window, answer_bytes)
        fixed, per_position = (logits, activations) if last_only else (0, logits + activations)
        if not last_only and memory_bytes >= length * per_position:
            return length
        cache = self.cache_bytes(batch, window)
        needed = cache + fixed + per_position
        if not last_only:
            needed = min(needed, length * per_position)
        if memory_bytes < needed:
            raise ValueError(
                f"memory_bytes must be >= {needed} for {self._rows(batch)} rows (one for the "
                f"public and each private model, times the batch), got {memory_bytes}: keys and "
                f"values of {window} positions take {cache} bytes, and computing one position "
                f"{fixed + per_position}{self._fitting(batch, window, answer_bytes, memory_bytes)}"
            )
        return min(length, (memory_bytes - cache - fixed) // per_position)

    def _fitting(
        self, batch: int, window: int, answer_bytes: AnswerBytes | None, memory_bytes: int
    ) -> str:
        """Return the largest batch, and the largest active vocabulary, that fit; "" for neither."""

        def needed(active: int) -> int:
            return (
                sum(replace(self, active=active)._position_bytes(batch, window, answer_bytes))
                + cache
            )

        cache = self.cache_bytes(batch, window)
        most = memory_bytes // self.sequence_bytes(window, answer_bytes)
        widths = range(LEAST_ACTIVE, self.active or self.vocab_size)
        fitting = bisect_right(widths, memory_bytes, key=needed)
        ways = [f"a batch of {most}"] if most else []
        ways += [f"active = {widths[fitting - 1]}"] if fitting else []
        return f"; {' or '.join(ways)} would fit" if ways else ""

    def sequence_bytes(self, window: int, answer_bytes: AnswerBytes | None) -> int:
        """Return the least `memory_bytes` to decode one sequence over this window.

        A batch of b needs b times as much. `chunk_size` says what is counted.
        """
        cache = self.cache_bytes(1, window)
        return cache + sum(self._position_bytes(1, window, answer_bytes))

    @property
    def _scales_logits(self) -> bool:
        config = self.model.config.get_text_config()
        return any(getattr(config, name, None) for name in _LOGIT_SCALES)

    def logits_size(self, batch: int) -> int:
        """Return how many logits one position has in this process, b (V + N K)."""
        return batch * (self.vocab_size + self.num_models * self._width)

    @property
    def _width(self) -> int:
        """The numbers between two members of a position: V, or K and a few."""
        return self.vocab_size if self.active is None else self.active + SPARE

    def _rows(self, batch: int) -> int:
        return (self.ranks.held(self.num_models)[0] + 1) * batch  # the same on every process

    def _position_bytes(
        self, batch: int, window: int, answer_bytes: AnswerBytes | None
    ) -> tuple[int, int]:
        """Return the bytes of one position's logits, and those of a layer's activations."""
        rows = self._rows(batch)
        config = self.model.config.get_text_config()
        hidden = int(config.hidden_size) * int(getattr(config, "altup_num_inputs", 1))
        inner = self._widest
        element = int(next(self.model.parameters()).element_size())
        members, gathered = self.ranks.held(self.num_models)
        numbers = self.vocab_size + members * self._width
        # Capping or scaling the output needs a second copy of it.
        logits = (2 if self._scales_logits else 1) * batch * numbers * element
        received = batch * gathered * self._width * element
        if answer_bytes is None:
            logits += received
        else:
            rows_held = max(members, gathered) + 1
            held = batch * answer_bytes(rows_held, self.vocab_size, element, self.active)
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
        activations += batch * (4 + own * members) * self._width
        if self.active is not None and self.trunk.head is None:  # the active tokens' rows
            activations += self.active * int(config.hidden_size) * element
        return logits, activations


def masking(mask: Tensor, new: int) -> dict[str, Tensor]:
    """Return the mask of all positions, and the numbers of the new ones without padding."""
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -new:]
    return {"attention_mask": mask, "position_ids": positions}
