"""N private models and their public one: rows, positions, padding, cache, memory limit."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble.decoder import Decoder, cache_argument, key_value_cache, written_layers
from adapmixed.ensemble.lora import (
    TESTED,
    Adapter,
    BatchedLoRA,
    HeadAdapters,
    Logits,
    LogitsRoom,
    OutputLayer,
    Trunk,
    find_trunk,
    head_name,
    layer_shape,
    linear_names,
    merged_layers,
    repeat_at,
    row_width,
)
from adapmixed.ensemble.members import read_members
from adapmixed.ensemble.public_model import check_behaviour, check_model, max_positions
from adapmixed.limits import LEAST_ACTIVE, active_tokens, check_models, check_vocabulary
from adapmixed.ranks import SINGLE, Ranks
from adapmixed.text import beginning_of, unnamed_ids

_LOG = logging.getLogger(__name__)
DEFAULT_MEMORY_BYTES = 1 << 30
AnswerBytes = Callable[[int, int, int, int | None], int]
"""Maps (rows N + 1, V, bytes per logit, K or None) to the bytes that answering one query takes
beyond the logits."""
LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings of models that cap or scale their logits."""


class Ensemble:
    """A public causal language model with N LoRA adapters, as one batched model.

    Several processes can share an ensemble: each then holds a contiguous slice of the members and
    its own public model, of which all use the main process's row, since another batch may round
    otherwise. If members adapt the output layer alone, every process holds all of them.
    Private logits are those of this process's members. Every process must call every method with
    the same arguments in the same order (docs/how-to/several-gpus.md).

    Threads may share an ensemble; their passes run one after the other. Every method runs without
    gradients and in eval mode (no dropout). Logits are raw and in the model's dtype: callers apply
    the softmax. N and the order of members are those of the folder. Some ids may stand for no token
    of the tokenizer, because models pad their vocabulary. These have logit -inf in every private
    and public row, so they are never released.

    Attributes:
        num_models: N >= 1, over all processes.
        ranks: the processes that share the members; `SINGLE` if this process has all of them.
        vocab_size: V, the width of the logits.
        tokenizer: the base's tokenizer, or None if it has none.
        config: the base's transformers configuration.
        trunk: the layers that members share with the public model, computed once. `str(trunk)` is
            a phrase for people.
        beginning: the tokens with which the tokenizer begins every text, mostly BOS or none.
        max_positions: longest input in tokens, or None if the base sets no limit.
        unverified: what loading could not verify, which every guarantee repeats as a caveat.
            "shards": shards may overlap.
            "positions": documents were assigned by their position in a file, so that one edit can
            move others.
            "names": the folder does not record how documents were assigned.
            "base": the public model or its tokenizer may not be the one of the training.
        unit: the column of names if every name has a member of its own, which guarantees then
            protect with everything under it; None if they protect a shard.
        fingerprint: hexadecimal digest of the base and of the members' files in their order; None
            if the ensemble was not loaded from files. A base folder counts with its files, a hub
            name with its commit, a model object with its name. An accountant is bound to it,
            because it counts what each shard spent.
        folder: the folder with `ensemble.json`, whose register has all ledgers; None without one.
        model: the public model with stacked adapters.
        device: the device that the model computes on.
        dtype: the dtype of the public model and of all logits.
        output_layer: its output layer, with the N of this process and the members' adapters of it.
        zero_members: members whose updates are all zero. Their logits are copied from the public
            block, because an empty shard must answer exactly as the public model does. Computed in
            another row of a matrix product, the same numbers may round differently.
    """

    def __init__(
        self,
        model: Any,
        adapters: Sequence[Adapter],
        *,
        adapted: Mapping[str, int] | None = None,
        tokenizer: Any = None,
        unverified: tuple[str, ...] = ("shards", "base"),
        ranks: Ranks = SINGLE,
        unit: str | None = None,
        fingerprint: str | None = None,
        folder: str | None = None,
    ) -> None:
        """Take over `model` and change it; use `from_pretrained` to load from files.

        Args:
            model: a transformers causal language model without adapters.
            adapters: those of this process's members.
            adapted: the layers that members may adapt, with their largest rank, a public constant;
                None for those of `adapters`.
            tokenizer: the model's tokenizer, or None.
            unverified: see the attribute.
            ranks: the processes that share the members, and how many there are (`Ranks.over`).
            unit, fingerprint, folder: see the attributes.

        Raises:
            ValueError: if there are no adapters, if tokenizer and model do not fit, or if an
                ensemble cannot be built on the model (docs/reference/supported-models.md).
        """
        # The output layer holds the settings and the tokens of the current pass.
        self._lock = threading.Lock()
        self.num_models = check_models(ranks.held(len(adapters))[1] or len(adapters))
        check_model(model, tokenizer)
        self._cache_argument = cache_argument(model)
        text_config = model.config.get_text_config()
        vocab_size = int(text_config.vocab_size)
        check_vocabulary(vocab_size, "model")
        unnamed = None if tokenizer is None else unnamed_ids(tokenizer, vocab_size)
        masked = unnamed.to(model.device) if unnamed is not None and len(unnamed) else None
        adapted = merged_layers([lora.layers for lora in adapters]) if adapted is None else adapted
        self.trunk = find_trunk(model, adapted)
        head = head_name(model)
        # The widest layer below the output layer, which configurations name in many ways.
        below = [model.get_submodule(name) for name in linear_names(model) if name != head]
        self._widest = max(max(layer_shape(layer)) for layer in below)
        base, heads = model.get_submodule(head), None
        for name, rank in adapted.items():
            updates = [adapter.updates.get(name) for adapter in adapters]
            try:
                layer = model.get_submodule(name)
            except AttributeError as error:
                raise ValueError(
                    f"adapted must name layers of the base by their full names, got {name!r}"
                ) from error
            if name == head:
                short = model.dtype == torch.bfloat16
                heads = HeadAdapters(updates, layer_shape(base), rank, short).to(model.device)
            else:
                model.set_submodule(name, BatchedLoRA(layer, updates, rank))
        self.output_layer = OutputLayer(
            base,
            len(adapters),
            vocab_size,
            heads,
            shared=self.trunk.head is not None,
            masked=masked,
            ranks=ranks,
        )
        model.set_submodule(head, self.output_layer)
        repeat_at(model, self.trunk, len(adapters) + 1)
        model.eval()
        model.requires_grad_(False)
        self.model, self.ranks = model, ranks
        self.device, self.dtype = model.device, model.dtype
        self.zero_members = tuple(i for i, adapter in enumerate(adapters) if adapter.is_zero)
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.beginning = beginning_of(tokenizer)
        self.config = model.config
        self.max_positions = max_positions(text_config)
        self._scales_logits = any(getattr(text_config, name, None) for name in LOGIT_SCALES)
        self.unverified = unverified
        self.unit, self.fingerprint, self.folder = unit, fingerprint, folder
        if model.config.model_type not in TESTED:
            check_behaviour(self)

    @classmethod
    def from_pretrained(
        cls,
        base: Any,
        folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | None],
        *,
        adapted: Mapping[str, int] | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        ranks: Ranks = SINGLE,
    ) -> Ensemble:
        """Load the public model and its adapters.

        Args:
            base: a folder, a hub name, or a transformers model. A model is copied and never
                changed; `tokenizer` is then None.
            folder: an ensemble folder (with `ensemble.json`), or a sequence of peft folders, one
                per member. None in the sequence stands for a missing member, which answers as the
                public model does.
            adapted: for a sequence of folders only: the layers that members may adapt, with their
                largest rank, for instance {"lm_head": 8}. It must not depend on which members are
                present. Without it all members must adapt the same layers with the same ranks.
            dtype: the base's dtype; None for fp32, or for a model object's own. Adapters stay in
                fp32.
            device: the device; None for the CPU, or for a model object's own.
            ranks: the processes that share the members (`adapmixed.ranks.joined`). All of them must
                call this together; each reads only its own members.

        Returns:
            the ensemble, ready to answer.

        Raises:
            ValueError: if the folder is unreadable, empty, of another format, or lists a member
                twice, or if shards overlap.
            ValueError: if members adapt layers outside `adapted`, or it is needed and missing; if
                an adapter is not plain LoRA or does not fit the base.
            ValueError: if the base or its tokenizer differs from the one of the training. Digests
                are compared or, if none was recorded, the name in `adapter_config.json`.
            ValueError: if the base is not supported (docs/reference/supported-models.md).
            ValueError: if there are more processes than members, or they read different files.
        """
        read = read_members(base, folder, adapted=adapted, dtype=dtype, device=device, ranks=ranks)
        ensemble = cls(**read)
        _LOG.info(
            "ensemble of %d models in %s on %s, sharing %s; not verified: %s",
            *(ensemble.num_models, ensemble.dtype, ensemble.device, ensemble.trunk),
            ", ".join(ensemble.unverified) or "nothing",
        )
        del read  # whose factors are packed; glibc would keep their memory
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
        return ensemble

    def give_up_trunk(self) -> None:
        """Free the weights below the output layer; another engine computes the hidden states."""
        getattr(self.model, self.model.base_model_prefix).to("meta")

    @property
    def longest_text(self) -> int | None:
        """The longest text in tokens that fits behind `beginning`, or None without a limit."""
        return None if self.max_positions is None else self.max_positions - len(self.beginning)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The ids that end a text, of the tokenizer and of the base's generation settings."""
        settings = getattr(self.model, "generation_config", None)
        tokens: set[int] = set()
        for owner in (self.tokenizer, settings):
            ends = getattr(owner, "eos_token_id", None)
            tokens.update([ends] if isinstance(ends, int) else ends or ())
        return frozenset(tokens)

    def logits(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of every position at once.

        This is for small inputs, since it holds N b t V numbers.

        Args:
            input_ids: (b, t) int64 or int32.

        Returns:
            private (N, b, t, V) and public (b, t, V), with the N of this process.

        Raises:
            ValueError: if shapes, tokens or the length (> max_positions) are wrong.
        """
        private, public, _ = self.forward(self.check_ids(input_ids), None, None)
        return private, public

    def iter_logits(
        self,
        input_ids: Tensor,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        room: LogitsRoom | None = None,
        active: int | None = None,
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Return the logits in chunks of positions, within a memory limit.

        The input passes through a key/value cache chunk by chunk. Up to rounding this gives the
        logits of a single pass. A chunk's tensors may be freed when the next chunk is requested.

        Args:
            input_ids: as in `logits`.
            memory_bytes: limit in bytes for a chunk's logits, an estimate of one layer's
                activations and, if there are several chunks, the cache. Weights and adapters are
                not counted.
            room: memory that a caller keeps between inputs, so that it is used again.
            active: K, number of the likeliest public tokens about which members speak; None, or V
                and more, for all.

        Returns:
            iterator of (slice of positions, private (N, b, chunk, K), public (b, chunk, V), tokens
            (b, chunk, K)), the ids of the private columns, ascending; None if they are all.

        Raises:
            ValueError: as in `logits`, or if the limit does not hold the cache and one position;
                the message names the bytes needed. It is raised at the call, not at the first step.
        """
        ids = self.check_ids(input_ids)
        active = active_tokens(active, self.vocab_size)
        batch, length = ids.shape
        chunk = self.chunk_size(batch, length, memory_bytes, last_only=False, active=active)
        return self._chunks(ids, chunk, room or LogitsRoom(), active)

    def _chunks(
        self, ids: Tensor, chunk: int, room: LogitsRoom, active: int | None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        batch, length = ids.shape
        members = self.output_layer.num_models * row_width(self.vocab_size, active)
        room.release(chunk * batch * (self.vocab_size + members))  # more would exceed the limit
        cache = self.new_cache(length + self.begun, batch, chunk) if chunk < length else None
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            result = self.forward(ids[:, start:stop], None, cache, active=active, room=room)
            yield slice(start, stop), *result
            del result  # so that the caller can free it before the next one is computed

    def decoder(
        self,
        input_ids: Tensor,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        attention_mask: Tensor | None = None,
        new_tokens: int = 0,
        answer_bytes: AnswerBytes | None = None,
        unread: bool = False,
        active: int | None = None,
    ) -> Decoder:
        """Read a prompt and return a decoder that continues it.

        Args:
            input_ids: (b, t) prompts, with t <= max_positions.
            memory_bytes: as in `iter_logits`; it must hold the cache of all positions to come.
            attention_mask: (b, t) of 0, for padding, and 1; shorter prompts are padded on the left.
            new_tokens: the largest number of tokens that will be appended. The cache reserves room
                for them, within `memory_bytes`. Beyond that it is copied at every token, uncounted.
            answer_bytes: returns the bytes that the caller holds together with a position's logits.
                They count towards `memory_bytes`.
            unread: whether to leave the reading to `Decoder.read`, for prompts in parts.
            active: as in `iter_logits`.

        Returns:
            the decoder, which holds the logits after the prompt unless it is unread.

        Raises:
            ValueError: as in `iter_logits`, or if the mask has another form.
        """
        ids, active = self.check_ids(input_ids), active_tokens(active, self.vocab_size)
        options = memory_bytes, active, new_tokens, answer_bytes, unread
        return Decoder(self, ids, attention_mask, *options)

    def sequence_bytes(
        self,
        length: int,
        *,
        new_tokens: int = 0,
        answer_bytes: AnswerBytes | None = None,
        active: int | None = None,
    ) -> int:
        """Return the least `memory_bytes` with which `decoder` takes one prompt of this length.

        A batch of b prompts needs b times as much.

        Args:
            length: of the prompt, in tokens.
            new_tokens: as in `decoder`.
            answer_bytes: as in `decoder`.
            active: as in `iter_logits`.
        """
        window, active = self.begun + length + new_tokens, active_tokens(active, self.vocab_size)
        return sum(self._needs(1, window, answer_bytes, active))

    def check_ids(self, input_ids: Tensor) -> Tensor:
        """Return ids as int64 on the model's device, checked as `logits` says."""
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids must have shape (b, t) with b, t >= 1, got {tuple(input_ids.shape)}"
            )
        self.check_tokens("input_ids", input_ids)
        self.check_length(input_ids.shape[1])
        return input_ids.to(self.device, torch.int64)

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
            arguments[self._cache_argument] = cache
        arguments |= self._masking(arguments["input_ids"], mask, cache)
        with self._lock:
            layer.active, layer.room = active, None if self._scales_logits else room
            try:
                output = self.model(
                    **arguments,
                    use_cache=cache is not None,
                    logits_to_keep=1 if last_only else 0,
                ).logits
                if self._scales_logits and not self.ranks.single:  # devices may round otherwise
                    public = output[..., : self.vocab_size]
                    public.copy_(self.ranks.same(public.contiguous()))
                return layer.split(output, self.zero_members)
            finally:
                layer.room = None

    @cached_property
    def _cached_layers(self) -> tuple[tuple[int, int, int | None], ...]:
        """The layers with keys and values: (block, bytes per row and position, window or None).

        The sizes are read from a cache with one position, because configurations name the heads in
        many ways.
        """
        cache = self.new_cache()
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        active = active_tokens(LEAST_ACTIVE, self.vocab_size)
        self.forward(token, None, cache, active=active, last_only=True)
        return tuple(
            (
                cache.layers.index(layer),
                sum(part[:1].numel() * part.element_size() for part in (layer.keys, layer.values)),
                getattr(layer, "sliding_window", None),
            )
            for layer in written_layers(cache)
        )

    def cache_bytes(self, batch: int, positions: int) -> int:
        """Return the bytes of a key/value cache of `batch` = b sequences.

        A layer holds 2 rows positions heads head_dim numbers, with b rows in the trunk and
        (N + 1) b above, for the largest N of a process. Layers with a sliding window keep no more
        positions than the window. The largest layer counts twice: layers are copied one by one when
        a sequence ends, and a layer with a sliding window at every token.
        """
        rows = self.ranks.held(self.output_layer.num_models)[0] + 1
        layers = [
            (1 if self.trunk.shares(block) else rows) * batch * size
            * (positions if window is None else min(positions, window))
            for block, size, window in self._cached_layers
        ]  # fmt: skip
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

        - the key/value cache of `window` positions. Without `last_only` and `begun` it is not
          needed if all positions fit one pass;
        - b (V + N K) logits per position, or of one position if `last_only`; twice as many if the
          model caps or scales its logits;
        - the bytes that `answer_bytes` adds for the last position's query;
        - an estimate of one layer's activations.

        Args:
            batch: b, the number of sequences.
            length: positions of the input.
            memory_bytes: the limit, in bytes.
            last_only: whether only the last position's logits are computed.
            window: positions that the cache holds; None for `begun` and `length`.
            answer_bytes: as in `decoder`.
            active: as in `forward`.

        Raises:
            ValueError: if not even one position fits; the message names the bytes needed.
        """
        window = self.begun + length if window is None else window
        cache, logits, activations = self._needs(batch, window, answer_bytes, active)
        fixed, per_position = (logits, activations) if last_only else (0, logits + activations)
        needed = cache + fixed + per_position
        if not (last_only or self.begun):
            if memory_bytes >= length * per_position:
                return length
            needed = min(needed, length * per_position)
        if memory_bytes < needed:
            raise ValueError(
                f"memory_bytes must be >= {needed} for {batch} sequences of {self.num_models} "
                f"members and the public model, got {memory_bytes}: keys and values of {window} "
                f"positions take {cache} bytes, and computing one position {fixed + per_position}"
            )
        return min(length, (memory_bytes - cache - fixed) // per_position)

    def _needs(
        self, batch: int, window: int, answer_bytes: AnswerBytes | None, active: int | None
    ) -> tuple[int, int, int]:
        """Return the bytes of a cache, one position's logits, and one layer's activations."""
        members, gathered = self.ranks.held(self.output_layer.num_models)
        config = self.model.config.get_text_config()
        hidden = int(config.hidden_size) * int(getattr(config, "altup_num_inputs", 1))
        inner = self._widest
        element = int(next(self.model.parameters()).element_size())
        width = row_width(self.vocab_size, active)
        logits = batch * (self.vocab_size + members * width) * element
        held = batch * gathered * width * element  # received from other processes
        if answer_bytes is not None:
            rows = max(members, gathered) + 1
            held += batch * answer_bytes(rows, self.vocab_size, element, active)
        # Capping or scaling the output needs a second copy of it, before anything else is held.
        logits += max(held, logits if self._scales_logits else 0)
        # Residual stream, normed input, q, k, v, attention output, twice the wider hidden layer
        # and, at worst, a row of scores or masks over all positions for every head.
        heads = int(getattr(config, "num_attention_heads", 1))
        computed = batch if self.trunk.head is not None else (members + 1) * batch
        activations = computed * (element * (8 * hidden + 2 * inner) + 4 * heads * window)
        if element < 4:  # adapters compute in fp32
            activations += computed * 4 * (hidden + inner)
        # In the output layer the public columns, and those of members in fp32 or without adapters.
        size = (0 if element == 4 else 4) + (0 if self.trunk.head is not None else element)
        activations += batch * (4 + size * members) * width
        if active is not None and self.trunk.head is None:  # the active tokens' rows
            activations += active * int(config.hidden_size) * element
        return self.cache_bytes(batch, window), logits, activations


def masking(mask: Tensor, new: int) -> dict[str, Tensor]:
    """Return the mask of all positions, and the numbers of the new ones without padding."""
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -new:]
    return {"attention_mask": mask, "position_ids": positions}


def try_members(model: Any, tokenizer: Any, layers: Sequence[str]) -> Trunk:
    """Return the trunk of an ensemble whose members adapt these layers, which can be loaded.

    Args:
        model: the public model, which is changed.
        tokenizer: its tokenizer.
        layers: full names of layers.

    Raises:
        ValueError: as :class:`Ensemble`.
    """
    shapes = {name: layer_shape(model.get_submodule(name)) for name in layers}
    updates = {
        name: (torch.full((size_in, 1), 0.1), torch.full((1, size_out), 0.1))
        for name, (size_in, size_out) in shapes.items()
    }
    return Ensemble(model, [Adapter(updates)], tokenizer=tokenizer).trunk
