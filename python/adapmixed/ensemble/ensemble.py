"""N private models and their public one, loaded from disk and evaluated together."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adapmixed.checks import OVERFLOWS, check_option
from adapmixed.ensemble.adapted_layers import merged_layers
from adapmixed.ensemble.adapters import Adapter
from adapmixed.ensemble.batched_lora import stack_adapters
from adapmixed.ensemble.decoder import Decoder
from adapmixed.ensemble.forward import DEFAULT_MEMORY_BYTES, BatchedForward, Beside
from adapmixed.ensemble.layers import head_name
from adapmixed.ensemble.members import read_members
from adapmixed.ensemble.provenance import fingerprint
from adapmixed.ensemble.room import LogitsRoom
from adapmixed.ensemble.support import TESTED, check_behaviour, check_model, max_positions
from adapmixed.ensemble.trunk import find_trunk, repeat_at
from adapmixed.ensemble.vocabulary import unnamed_ids
from adapmixed.ranks import ALONE, Ranks

_LOG = logging.getLogger(__name__)


class Ensemble:
    """A public causal language model with N LoRA adapters, as one batched model.

    Spread over several processes, each has a contiguous slice of the members, with its own public
    model; of members of the output layer alone each has all. Then private logits are those of this
    process's members, and every process must call every method with the same arguments in the same
    order (docs/ranks.md).

    Every method runs without gradients, in eval mode (no dropout). Logits are in the model's dtype
    and raw: softmax is the reader's. N and the order of members are those of the folder. Ids that
    stand for no token of the tokenizer (a padded vocabulary) have logit -inf in every row, private
    and public: a public rule, by which they are never released.

    Attributes:
        num_models: N >= 1, of all processes.
        ranks: the processes that share the members; `ALONE` if this one has them all.
        vocab_size: V, the width of the logits.
        tokenizer: the base's tokenizer, or None if it has none.
        config: the base's transformers configuration.
        trunk: what the members share with the public model, which is computed once; prints as a
            phrase.
        max_positions: longest input in tokens, or None if the base sets no limit.
        unverified: what loading could not check or found missing; every guarantee says it.
            "shards": they may overlap. "positions": positions in a file assigned them, so one edit
            can move other documents. "names": what assigned them is not recorded. "base": the
            public model may not be that of the training. "tokenizer": only its tokenizer may not.
        fingerprint: of the base (its files where it is a folder, else its name) and the members'
            files in their order, hexadecimal; None if it was not loaded from files. An accountant
            is bound to it, since what member i has spent is that of shard i.
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
    ) -> None:
        """Takes over `model`, which is changed; `from_pretrained` is the ordinary way in.

        `adapters` are those of this rank; `ranks` know the number of all (`Ranks.over`). `adapted`
        names the layers that members may adapt, with their ranks: a public constant; None for what
        these adapters adapt.

        Raises:
            ValueError: if there are no adapters, tokenizer and model do not fit, or the model is
                not of a kind that an ensemble can be built on (`support`).
        """
        if not adapters:
            raise ValueError("an ensemble must have at least one private model, got 0")
        check_model(model)
        text_config = model.config.get_text_config()
        vocab_size = int(text_config.vocab_size)
        masked = None if tokenizer is None else unnamed_ids(tokenizer, vocab_size)
        adapted = merged_layers([one.layers for one in adapters]) if adapted is None else adapted
        self.trunk = find_trunk(model, adapted)
        head = head_name(model)
        stack_adapters(model, adapters, adapted, head=head, shared=self.trunk.head is not None)
        repeat_at(model, self.trunk, len(adapters) + 1)
        model.eval()
        model.requires_grad_(False)
        self.ranks = ranks
        self.num_models = len(adapters) if num_models is None else num_models
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.config = model.config
        self.max_positions = max_positions(text_config)
        self.unverified = unverified
        self.fingerprint: str | None = None
        self._forward = BatchedForward(
            model=model,
            num_models=len(adapters),
            vocab_size=vocab_size,
            max_positions=self.max_positions,
            zero_members=tuple(i for i, adapter in enumerate(adapters) if adapter.is_zero),
            trunk=self.trunk,
            masked_ids=masked.to(model.device) if masked is not None and len(masked) else None,
            adapts_head=head in adapted,
            ranks=ranks,
        )
        if model.config.model_type not in TESTED:
            check_behaviour(dataclasses.replace(self._forward, ranks=ALONE))

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
        """Loads the public model and its adapters.

        Args:
            base: a folder, a hub name (given to `from_pretrained`), or a transformers model, which
                is copied and never changed (its tokenizer is then None).
            folder: an ensemble folder (`ensemble.json`), or a sequence of peft folders, one per
                private model, and None for a missing one, which answers as the public model does.
            adapted: of a sequence: the layers that members may adapt, with their ranks, for
                instance {"lm_head": [8]}. It must not depend on which members there are: without
                it all must adapt the same ones, which are taken for those of a missing member,
                too. `ensemble.json` has its own.
            dtype: of the base; None means fp32, or a model object's own. Adapters stay in fp32.
            device: None means the CPU, or a model object's own.
            ranks: among which the members are spread (`adapmixed.ranks.joined`): this process reads
                its own alone, and all of them call this together.

        Raises:
            ValueError: if the folder is unreadable, newer than this version, empty or lists a
                member twice; if its shards overlap; if members adapt other layers than `adapted`,
                or `adapted` is needed and not given; if an adapter is not a plain LoRA adapter or
                does not fit the base; if the base or its tokenizer is not the one that the ensemble
                was trained with: by its digest or, where none was recorded, by the name in
                `adapter_config.json`; or if the base is of a kind that is refused (docs/models.md);
                if there are more ranks than members, or ranks that have read something else.
        """
        members = read_members(
            base, folder, adapted=adapted, dtype=dtype, device=device, ranks=ranks
        )
        ensemble = cls(
            members.model,
            members.adapters,
            adapted=members.adapted,
            tokenizer=members.tokenizer,
            unverified=members.unverified,
            ranks=members.ranks,
            num_models=len(members.paths),
        )
        if not members.ranks.alone:  # each has tried its own device: caches must have the same rows
            members.ranks.agree({"what members share": ensemble.trunk})
        ensemble.fingerprint = fingerprint(base, members.paths, members.base_sha256)
        _LOG.info(
            "ensemble of %d models over %d tokens, window %s, sharing %s; not verified: %s",
            ensemble.num_models,
            ensemble.vocab_size,
            ensemble.max_positions or "unlimited",
            ensemble.trunk,
            ", ".join(ensemble.unverified) or "nothing",
        )
        return ensemble

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self._forward.model.device
        return device

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a text: the tokenizer's, and those of the base's own settings."""
        settings = getattr(self._forward.model, "generation_config", None)
        tokens: set[int] = set()
        for owner in (self.tokenizer, settings):
            found = getattr(owner, "eos_token_id", None)
            tokens.update([found] if isinstance(found, int) else found or ())
        return frozenset(tokens)

    def logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of every position at once, for small inputs: N b t V numbers are held.

        Args:
            input_ids: (b, t) int64 or int32.
            attention_mask: (b, t) of 0 and 1, 0 marking padding on either side; what is answered
                at padding is unspecified.

        Returns:
            (private (N, b, t, V), public (b, t, V)); N of this rank.

        Raises:
            ValueError: if shapes, tokens or the length (> max_positions) are wrong.
        """
        ids, mask = self._forward.check_ids(input_ids, attention_mask)
        result = self._forward(ids, mask, None)
        return result[1:], result[0]

    def iter_logits(
        self,
        input_ids: Tensor,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        attention_mask: Tensor | None = None,
        room: LogitsRoom | None = None,
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Logits in chunks of positions, under a memory budget.

        The input is run through a key/value cache chunk by chunk, which gives the same logits as
        one pass (up to rounding). A chunk's tensors are free to go when the next one is asked for.

        Args:
            input_ids, attention_mask: as `logits`.
            memory_bytes: bounds the logits of a chunk, an estimate of a layer's activations and,
                where there are several chunks, the cache; weights and adapters come on top.
            room: kept by a reader of many inputs, so that each finds the memory of the one before.

        Returns:
            iterator of (slice of positions, private (N, b, chunk, V), public (b, chunk, V)).

        Raises:
            ValueError: as `logits`, or if the budget does not hold the cache and one position (the
                message names the bytes needed). Raised at the call, not at the first step.
        """
        ids, mask = self._forward.check_ids(input_ids, attention_mask)
        batch, length = ids.shape
        chunk = self._forward.chunk_size(batch, length, memory_bytes, last_only=False)
        return self._forward.chunks(ids, mask, chunk, room or LogitsRoom())

    def decoder(
        self,
        input_ids: Tensor,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        attention_mask: Tensor | None = None,
        overflow: str = "refuse",
        new_tokens: int = 0,
        beside: Beside | None = None,
    ) -> Decoder:
        """Reads a prompt and stands ready to decode after it.

        Args:
            input_ids: (b, t) prompts, t <= max_positions unless the window slides.
            memory_bytes: as `iter_logits`; it must hold the cache of all positions that will come.
            attention_mask: (b, t) of 0 and 1; prompts of unequal length are padded on the left.
            overflow: one of `OVERFLOWS`: what happens where the context is full. "slide" forgets
                the older half of a sequence and reads the rest anew; of a longer prompt the last
                max_positions tokens are read. The window is each sequence's own, without padding.
            new_tokens: how many will be appended at most, for `memory_bytes`. The cache has room
                for them from the first; for more it grows by a quarter, which is not counted.
            beside: what the reader holds beside the logits, for `memory_bytes`, too.

        Raises:
            ValueError: as `iter_logits`, or if a row ends in padding, or overflow is unknown.
        """
        check_option("overflow", overflow, OVERFLOWS)
        slide = overflow == "slide"
        ids, mask = self._forward.check_ids(input_ids, attention_mask, any_length=slide)
        return Decoder(self._forward, ids, mask, memory_bytes, slide, new_tokens, beside)

    def sequence_bytes(
        self,
        length: int,
        *,
        new_tokens: int = 0,
        overflow: str = "refuse",
        beside: Beside | None = None,
    ) -> int:
        """The least `memory_bytes` of `decoder` for one prompt of this length; for b, b times.

        Other arguments as `decoder`.
        """
        window = length + new_tokens
        if overflow == "slide" and self.max_positions is not None:
            window = min(window, self.max_positions)
        return self._forward.sequence_bytes(window, beside)
