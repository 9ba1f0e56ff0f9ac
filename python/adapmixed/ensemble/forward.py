"""The forward pass behind an ensemble: repeated rows, positions, padding, cache, memory budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble.batched_lora import HEAD_MEMBERS
from adapmixed.ensemble.room import LogitsRoom
from adapmixed.ensemble.trunk import Trunk
from adapmixed.ranks import ALONE, Ranks

DEFAULT_MEMORY_BYTES = 1 << 30
Beside = Callable[[int, int, int], int]
"""Rows N + 1, V and the bytes of a logit to the bytes that answering one query takes besides."""
_LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True)
class BatchedForward:
    """Runs a model with stacked adapters on the same tokens for every member.

    Threads may share it; their passes come one after the other.

    Attributes:
        model: a causal language model with stacked adapters (`stack_adapters`).
        num_models: N, of this rank.
        vocab_size: V, the width of the logits.
        max_positions: longest input, or None if the model sets no limit.
        zero_members: members whose update vanishes. Their logits are a copy of the public block:
            the same numbers computed in another row of a matrix product may round differently, and
            an empty shard must answer exactly as the public model does.
        trunk: what the members share; the model repeats its rows where it ends.
        masked_ids: (m,) int64 on the model's device, whose logits are -inf in every row, or None.
        adapts_head: whether members may adapt the output layer, alone or with others.
        ranks: that run other members on the same tokens; all answer with the public row of the
            leading one, since the same numbers in another batch may round differently.
    """

    model: Any
    num_models: int
    vocab_size: int
    max_positions: int | None
    zero_members: tuple[int, ...]
    trunk: Trunk = Trunk()
    masked_ids: Tensor | None = None
    adapts_head: bool = False
    ranks: Ranks = ALONE
    # The layers where rows part remember the shapes of the pass that they are in.
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def check_ids(
        self, input_ids: Tensor, attention_mask: Tensor | None, *, any_length: bool = False
    ) -> tuple[Tensor, Any]:
        """Validated (input_ids, attention_mask) on the model's device, int64; see `Ensemble`.

        `any_length` leaves out the model's window.
        """
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids must have shape (b, t) with b, t >= 1, got {tuple(input_ids.shape)}"
            )
        self.check_tokens("input_ids", input_ids)
        if not any_length:
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
        if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any(dim=1).all()):
            raise ValueError("attention_mask must be 0 or 1 with a 1 in every row")
        return ids, mask

    def check_tokens(self, name: str, tokens: Tensor) -> None:
        """Refuses anything but token ids of this vocabulary."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be int64 or int32, got {tokens.dtype}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"{name} must lie in [0, {self.vocab_size}), got values in [{low}, {high}]"
            )

    def check_length(self, length: int) -> None:
        """Refuses more positions than the model has."""
        if self.max_positions is not None and length > self.max_positions:
            raise ValueError(
                f"input must have at most max_positions = {self.max_positions} positions, "
                f"got {length}"
            )

    def new_cache(self, positions: int = 0) -> Any:
        """An empty key/value cache for this model, with room for so many positions, or more."""
        from adapmixed.ensemble.cache import key_value_cache

        return key_value_cache(self.model.config, positions)

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor,
        mask: Tensor | None,
        cache: Any,
        *,
        last_only: bool = False,
        room: LogitsRoom | None = None,
    ) -> Tensor:
        """Return the logits of all rows.

        Args:
            ids: (b, s) int64, the tokens that the cache does not hold yet.
            mask: (b, cached + s) int64 or None.
            cache: a transformers cache, which advances by s, or None for a single pass.
            last_only: only the last position's logits are computed.
            room: memory for the logits, used if the output layer alone is adapted and its output is
                not scaled: it would be held beside the scaled logits.

        Returns:
            (N + 1, b, s or 1, V) in the model's dtype, block 0 public.
        """
        rows = self.num_models + 1
        copies = rows if self.trunk.repeats_input else 1
        arguments: dict[str, Any] = {"input_ids": ids.repeat(copies, 1)}
        if mask is not None:
            positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            arguments["attention_mask"] = mask.repeat(copies, 1)
            arguments["position_ids"] = positions.repeat(copies, 1)
        head = None if self.trunk.head is None else self.model.get_submodule(self.trunk.head)
        with self._lock:
            try:
                if head is not None:
                    head.room = None if self._scales_logits else room
                output = self.model(
                    **arguments,
                    past_key_values=cache,
                    use_cache=cache is not None,
                    logits_to_keep=1 if last_only else 0,
                ).logits
            finally:
                if head is not None:
                    head.room = None
        logits: Tensor = output.view(rows, ids.shape[0], -1, output.shape[-1])
        if not self.ranks.alone:
            logits[0].copy_(self.ranks.same(logits[0]))
        for member in self.zero_members:
            logits[member + 1].copy_(logits[0])
        if self.masked_ids is not None:
            logits.index_fill_(-1, self.masked_ids, float("-inf"))
        return logits

    def chunks(
        self, ids: Tensor, mask: Tensor | None, chunk: int, room: LogitsRoom
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the logits of `chunk` positions at a time: (slice, private, public)."""
        batch, length = ids.shape
        room.release(chunk * self.logits_size(batch))  # not beside what this input needs
        cache = self.new_cache(length) if chunk < length else None
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = None if mask is None else mask[:, :stop]
            result = self(ids[:, start:stop], part, cache, room=room)
            yield slice(start, stop), result[1:], result[0]
            del result  # gone, if the reader's are, before the next one is computed

    @cached_property
    @torch.no_grad()
    def _cached_bytes(self) -> tuple[tuple[int, bool, int | None], ...]:
        """Of each layer: bytes of a row's keys and values of one position, whether every member has
        rows of its own, and the window or None.

        Read off a cache that holds one position: configurations name heads in too many ways.
        """
        cache = self.new_cache()
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.model.device)
        replace(self, ranks=ALONE)(token, None, cache, last_only=True)
        found = []
        for layer in cache.layers:
            rows = len(layer.keys)
            size = sum(part.numel() * part.element_size() for part in (layer.keys, layer.values))
            found.append((size // rows, rows > 1, getattr(layer, "sliding_window", None)))
        return tuple(found)

    def cache_bytes(self, batch: int, positions: int) -> int:
        """Return the bytes of a key/value cache of b sequences.

        A layer has 2 rows positions heads head_dim numbers: b rows in the trunk, (N + 1) b above.
        Layers with a sliding window keep no more positions than it. The largest layer counts twice:
        layer by layer it is copied when sequences end, and a sliding window with every token.
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
        beside: Beside | None = None,
    ) -> int:
        """Positions per pass so that cache, logits and activations fit the budget.

        Counted: the key/value cache of `window` positions (None: of `length`; without `last_only`
        it is left out where all are computed in one pass), (N + 1) b V logits per position (once in
        all if `last_only`; twice these where the model caps or scales them), what is held `beside`
        the last position's logits when they are answered, and an estimate of one layer's
        activations. Not counted: weights and adapters.

        Raises:
            ValueError: naming the bytes needed, if not even one position fits.
        """
        window = length if window is None else window
        logits, activations = self._position_bytes(batch, window, beside)
        fixed, per_position = (logits, activations) if last_only else (0, logits + activations)
        if not last_only and memory_bytes >= length * per_position:
            return length
        cache = self.cache_bytes(batch, window)
        needed = cache + fixed + per_position
        if not last_only:
            needed = min(needed, length * per_position)
        if memory_bytes < needed:
            raise ValueError(
                f"memory_bytes must be >= {needed} for {self._rows(batch)} rows (a row for the "
                f"public and each private model, times the batch): {cache} bytes of keys and "
                f"values of {window} positions, and {fixed + per_position} to compute one, got "
                f"{memory_bytes}"
            )
        return min(length, (memory_bytes - cache - fixed) // per_position)

    def sequence_bytes(self, window: int, beside: Beside | None) -> int:
        """The least `memory_bytes` of a sequence that is decoded over this window; of b, b times.

        See `chunk_size`.
        """
        cache = self.cache_bytes(1, window)
        return cache + sum(self._position_bytes(1, window, beside))

    @property
    def _scales_logits(self) -> bool:
        config = self.model.config.get_text_config()
        return any(getattr(config, name, None) for name in _LOGIT_SCALES)

    def logits_size(self, batch: int) -> int:
        """Return how many numbers the logits of one position are, on this rank."""
        return (self.num_models + 1) * batch * self.vocab_size

    def _rows(self, batch: int) -> int:
        return (self.ranks.held(self.num_models)[0] + 1) * batch  # the same on every process

    def _position_bytes(self, batch: int, window: int, beside: Beside | None) -> tuple[int, int]:
        """Of one position: its logits as they are answered, and a layer's activations."""
        rows = self._rows(batch)
        config = self.model.config.get_text_config()
        hidden = int(config.hidden_size)
        inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        element = int(next(self.model.parameters()).element_size())
        # Caps and scales of the output are computed beside what they are applied to.
        logits = (2 if self._scales_logits else 1) * rows * self.vocab_size * element
        gathered = self.ranks.held(self.num_models)[1]
        if beside is not None:
            answering = (rows + gathered * batch) * self.vocab_size * element
            members = max(rows // batch, gathered + 1)
            answering += batch * beside(members, self.vocab_size, element)
            logits = max(logits, answering)
        else:
            logits += gathered * batch * self.vocab_size * element
        # Residual stream, normed input, q, k, v, attention output, the wider hidden layer twice;
        # attention adds a score or mask row over all positions for every head at worst.
        heads = int(getattr(config, "num_attention_heads", 1))
        computed = batch if self.trunk.head is not None else rows
        activations = computed * (element * (8 * hidden + 2 * inner) + 4 * heads * window)
        if element < 4:  # adapters read and add in fp32
            activations += computed * 4 * (hidden + inner)
        if self.adapts_head:
            # Beside the logits of a few members: a copy of those that keep their bits, and in
            # 16 bits one in fp32.
            members = min(HEAD_MEMBERS, rows // batch)
            copied = element + (4 if element < 4 else 0)
            activations += batch * (copied * members * self.vocab_size + 4 * hidden)
        return logits, activations
