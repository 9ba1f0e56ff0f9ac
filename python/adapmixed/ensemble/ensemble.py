"""Load N private models and their public one from disk, and evaluate them together."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble.forward import DEFAULT_MEMORY_BYTES, AnswerBytes, Decoder, Forward
from adapmixed.ensemble.lora import (
    Adapter,
    head_name,
    layer_shape,
    merged_layers,
    stack_adapters,
)
from adapmixed.ensemble.members import read_members
from adapmixed.ensemble.output_layer import HeadAdapters, LogitsRoom, OutputLayer, row_width
from adapmixed.ensemble.support import TESTED, check_behaviour, check_model, max_positions
from adapmixed.ensemble.trunk import Trunk, find_trunk, repeat_at
from adapmixed.ensemble.vocabulary import beginning_of, unnamed_ids
from adapmixed.limits import active_tokens, check_models, check_vocabulary
from adapmixed.ranks import ALONE, Ranks

_LOG = logging.getLogger(__name__)


class Ensemble(Forward):
    """A public causal language model with N LoRA adapters, as one batched model.

    Several processes can share an ensemble: each then holds a contiguous slice of the members and
    its own public model. If members adapt the output layer alone, every process holds all of them.
    Private logits are those of this process's members. Every process must call every method with
    the same arguments in the same order (docs/how-to/several-gpus.md).

    Every method runs without gradients and in eval mode (no dropout). Logits are raw and in the
    model's dtype: callers apply the softmax. N and the order of members are those of the folder.
    Some ids may stand for no token of the tokenizer, because models pad their vocabulary. These
    have logit -inf in every private and public row, so they are never released.

    Attributes:
        num_models: N >= 1, over all processes.
        ranks: the processes that share the members; `ALONE` if this process has all of them.
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
            "base": the public model may not be the one of the training.
            "tokenizer": the tokenizer may not be the one of the training.
        unit: the column of names if every name has a member of its own, which guarantees then
            protect with everything under it; None if they protect a shard.
        fingerprint: hexadecimal digest of the base and of the members' files in their order; None
            if the ensemble was not loaded from files. A base folder counts with its files, a hub
            name with its commit, a model object with its name. An accountant is bound to it,
            because it counts what each shard spent.
        folder: the folder with `ensemble.json`, whose register has all ledgers; None without one.
    """

    def __init__(
        self,
        model: Any,
        adapters: Sequence[Adapter],
        *,
        adapted: Mapping[str, Sequence[int]] | None = None,
        tokenizer: Any = None,
        unverified: tuple[str, ...] = ("shards", "base"),
        ranks: Ranks = ALONE,
        num_models: int | None = None,
        unit: str | None = None,
        fingerprint: str | None = None,
        folder: str | None = None,
    ) -> None:
        """Take over `model` and change it; use `from_pretrained` to load from files.

        Args:
            model: a transformers causal language model without adapters.
            adapters: those of this process's members.
            adapted: the layers that members may adapt, with their ranks, a public constant; None
                for those of `adapters`.
            tokenizer: the model's tokenizer, or None.
            unverified: see the attribute.
            ranks: the processes that share the members, and how many there are (`Ranks.over`).
            num_models: N; None for the number of `adapters`.
            unit, fingerprint, folder: see the attributes.

        Raises:
            ValueError: if there are no adapters, if tokenizer and model do not fit, or if an
                ensemble cannot be built on the model (docs/reference/supported-models.md).
        """
        super().__init__()
        self.num_models = check_models(len(adapters) if num_models is None else num_models)
        check_model(model, tokenizer)
        text_config = model.config.get_text_config()
        vocab_size = int(text_config.vocab_size)
        check_vocabulary(vocab_size, "model")
        unnamed = None if tokenizer is None else unnamed_ids(tokenizer, vocab_size)
        masked = unnamed.to(model.device) if unnamed is not None and len(unnamed) else None
        adapted = merged_layers([one.layers for one in adapters]) if adapted is None else adapted
        self.trunk = find_trunk(model, adapted)
        head = head_name(model)
        stack_adapters(model, adapters, adapted, head=head)
        base, heads = model.get_submodule(head), None
        if head in adapted:
            updates = [adapter.updates.get(head) for adapter in adapters]
            short = model.dtype == torch.bfloat16
            heads = HeadAdapters(updates, layer_shape(base), max(adapted[head]), short)
            heads = heads.to(model.device)
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
        hooks = repeat_at(model, self.trunk, len(adapters) + 1)
        model.eval()
        model.requires_grad_(False)
        self.model, self.ranks = model, ranks
        self.zero_members = tuple(i for i, adapter in enumerate(adapters) if adapter.is_zero)
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.beginning = beginning_of(tokenizer)
        self.config = model.config
        self.max_positions = max_positions(text_config)
        self.unverified = unverified
        self.unit, self.fingerprint, self.folder = unit, fingerprint, folder
        if model.config.model_type not in TESTED:
            try:
                check_behaviour(self)
            except ValueError as error:
                if not hooks or not ranks.alone:  # all ranks would have to decide so
                    raise
                _LOG.warning("members share no block, which costs time: %s", error)
                for hook in hooks:
                    hook.remove()
                self.trunk = Trunk()
                self.__dict__.pop("_cached_bytes", None)
                check_behaviour(self)

    @classmethod
    def from_pretrained(
        cls,
        base: Any,
        folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | None],
        *,
        adapted: Mapping[str, Sequence[int]] | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        ranks: Ranks = ALONE,
    ) -> Ensemble:
        """Load the public model and its adapters.

        Args:
            base: a folder, a hub name, or a transformers model. A model is copied and never
                changed; `tokenizer` is then None.
            folder: an ensemble folder (with `ensemble.json`), or a sequence of peft folders, one
                per member. None in the sequence stands for a missing member, which answers as the
                public model does.
            adapted: for a sequence of folders only: the layers that members may adapt, with their
                ranks, for instance {"lm_head": [8]}. It must not depend on which members are
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
        if not ensemble.ranks.alone:  # devices may differ, but all caches must have the same rows
            facts = {"what members share": ensemble.trunk, "all files": ensemble.fingerprint}
            ensemble.ranks.agree(facts)
        _LOG.info(
            "ensemble of %d models over %d tokens, window %s, sharing %s; not verified: %s",
            ensemble.num_models,
            ensemble.vocab_size,
            ensemble.max_positions or "unlimited",
            ensemble.trunk,
            ", ".join(ensemble.unverified) or "nothing",
        )
        del read  # whose factors are packed; glibc would keep their memory
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
        return ensemble

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the public model and of all logits."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def give_up_trunk(self) -> None:
        """Free the weights below the output layer; another engine computes the hidden states."""
        getattr(self.model, self.model.base_model_prefix).to("meta")

    @property
    def longest_text(self) -> int | None:
        """The longest text in tokens that fits behind `beginning`, or None without a limit."""
        return None if self.max_positions is None else self.max_positions - len(self.beginning)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Return the ids that end a text, from the tokenizer and the base's generation settings."""
        settings = getattr(self.model, "generation_config", None)
        tokens: set[int] = set()
        for owner in (self.tokenizer, settings):
            found = getattr(owner, "eos_token_id", None)
            tokens.update([found] if isinstance(found, int) else found or ())
        return frozenset(tokens)

    def logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of every position at once.

        This is for small inputs, since it holds N b t V numbers.

        Args:
            input_ids: (b, t) int64 or int32.
            attention_mask: (b, t) of 0 and 1, where 0 marks padding on either side. Logits at
                padding are unspecified.

        Returns:
            private (N, b, t, V) and public (b, t, V), with the N of this process.

        Raises:
            ValueError: if shapes, tokens or the length (> max_positions) are wrong.
        """
        private, public, _ = self.forward(*self.check_ids(input_ids, attention_mask), None)
        return private, public

    def iter_logits(
        self,
        input_ids: Tensor,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        attention_mask: Tensor | None = None,
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
            attention_mask: as in `logits`.
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
        ids, mask = self.check_ids(input_ids, attention_mask)
        active = active_tokens(active, self.vocab_size)
        batch, length = ids.shape
        chunk = self.chunk_size(batch, length, memory_bytes, last_only=False, active=active)
        return self._chunks(ids, mask, chunk, room or LogitsRoom(), active)

    def _chunks(
        self, ids: Tensor, mask: Tensor | None, chunk: int, room: LogitsRoom, active: int | None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        batch, length = ids.shape
        members = self.output_layer.num_models * row_width(self.vocab_size, active)
        room.release(chunk * batch * (self.vocab_size + members))  # more would exceed the limit
        cache = self.new_cache(length + self.begun, batch, chunk) if chunk < length else None
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = None if mask is None else mask[:, :stop]
            result = self.forward(ids[:, start:stop], part, cache, active=active, room=room)
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
            attention_mask: (b, t) of 0 and 1; prompts of unequal length are padded on the left.
            new_tokens: the largest number of tokens that will be appended. The cache reserves room
                for them, within `memory_bytes`. Beyond that it grows by a quarter, uncounted.
            answer_bytes: returns the bytes that the caller holds together with a position's logits.
                They count towards `memory_bytes`.
            unread: whether to leave the reading to `Decoder.read`, for prompts in parts.
            active: as in `iter_logits`.

        Returns:
            the decoder, which holds the logits after the prompt unless it is unread.

        Raises:
            ValueError: as in `iter_logits`, or if a row ends in padding.
        """
        ids, mask = self.check_ids(input_ids, attention_mask)
        active = active_tokens(active, self.vocab_size)
        return Decoder(self, ids, mask, memory_bytes, active, new_tokens, answer_bytes, unread)

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
        position = self._position_bytes(1, window, answer_bytes, active)
        return self.cache_bytes(1, window) + sum(position)


def try_members(model: Any, tokenizer: Any, layers: Sequence[str]) -> Trunk:
    """Return the trunk of an ensemble whose members adapt these layers, which can be loaded.

    Models of a tested type are only looked at. Others are tried, which changes them.

    Args:
        model: the public model; of a tested type it needs no weights.
        tokenizer: its tokenizer.
        layers: full names of layers.

    Raises:
        ValueError: as :class:`Ensemble`.
    """
    check_model(model, tokenizer)
    if model.config.model_type in TESTED:
        return find_trunk(model, layers)
    shapes = {name: layer_shape(model.get_submodule(name)) for name in layers}
    updates = {
        name: (torch.full((size_in, 1), 0.1), torch.full((1, size_out), 0.1))
        for name, (size_in, size_out) in shapes.items()
    }
    return Ensemble(model, [Adapter(updates)], tokenizer=tokenizer).trunk
