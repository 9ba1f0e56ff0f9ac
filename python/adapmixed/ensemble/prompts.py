"""An ensemble of prompts: every member is the public model with one private record in its prompt.

All prompts begin with the same tokens, which are computed once. Then comes a slot of a public
length: a member's record with its introduction, behind padding. In the public prompt, and for a
member without a record, the slot holds padding alone. All that follows, the tokens that are drawn
included, is the same for every member. So a member's logits are a function of its own record and of
public values: shapes, and with them the order of sums, follow from public limits.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble.cache import cache_argument, keep_rows, key_value_cache, written_layers
from adapmixed.ensemble.ensemble import Ensemble
from adapmixed.ensemble.forward import BatchedForward, masking
from adapmixed.ensemble.lora import Adapter
from adapmixed.ensemble.members import fingerprint
from adapmixed.ensemble.public_model import base_files, load_base
from adapmixed.ensemble.vocabulary import (
    beginning_of,
    begun,
    check_prompt,
    end_of_text,
    plain_ids,
)
from adapmixed.limits import check_count, check_models, check_type

LONGEST = 256
"""Tokens of a record that a prompt holds unless told otherwise; the others are cut."""
_EXAMPLE = "\n\nHere is an example:\n\n"
_MARK = "\ue000"  # of private use: no template has it


@dataclass(frozen=True, eq=False)
class Prompts:
    """The prompts of the public model and of N members.

    Attributes:
        common: (C,) int64, the tokens with which all prompts begin, C >= 1.
        slots: (N + 1, L) int64, what follows, padded on the left; the public prompt's is the first.
        mask: (N + 1, L), 1 where a slot holds a token.
    """

    common: Tensor
    slots: Tensor
    mask: Tensor

    @property
    def length(self) -> int:
        """C + L."""
        return len(self.common) + self.slots.shape[1]

    @property
    def whole_mask(self) -> Tensor:
        """The mask of all positions, (N + 1, C + L)."""
        ones = self.mask.new_ones(len(self.mask), len(self.common))
        return torch.cat([ones, self.mask], dim=1)


@dataclass(frozen=True, kw_only=True)
class PromptForward(BatchedForward):
    """Runs a model behind the members' prompts on the same tokens.

    Attributes:
        prompts: of the public model and of all members.
    """

    prompts: Prompts

    @property
    def begun(self) -> int:
        """The number of positions of a prompt."""
        return self.prompts.length

    def check_length(self, length: int) -> None:
        """Raise ValueError if the model has fewer positions than the prompts and this many."""
        if self.max_positions is not None and self.begun + length > self.max_positions:
            raise ValueError(
                f"input must have at most {self.max_positions - self.begun} tokens behind prompts "
                f"of {self.begun} in a window of {self.max_positions}, got {length}"
            )

    @torch.no_grad()
    def new_cache(self, positions: int = 0, batch: int = 1, chunk: int = 1) -> Any:
        """Return a cache that holds the prompts; see `BatchedForward`."""
        prompts, first = self.prompts, len(self.prompts.common)
        cache = key_value_cache(self.model.config, max(positions, prompts.length))
        once = key_value_cache(self.model.config, first)
        self._read(prompts.common[None], {}, once)
        rows = len(prompts.slots)
        for layer, read in zip(cache.layers, once.layers, strict=True):
            if read.keys is not None:
                shape = (rows, *read.keys.shape[1:])
                layer.update(read.keys.expand(shape), read.values.expand(shape))
                if hasattr(layer, "cumulative_length"):  # a window has forgotten the first ones
                    layer.cumulative_length = first
        mask = prompts.whole_mask
        for start in range(0, prompts.slots.shape[1], chunk):
            ids = prompts.slots[:, start : start + chunk]
            part = mask[:, : first + start + ids.shape[1]]
            self._read(ids, masking(part, ids.shape[1]), cache)
        if batch > 1:
            repeated = torch.arange(rows, device=mask.device).repeat_interleave(batch)
            for layer in written_layers(cache):
                keep_rows(layer, repeated, prompts.length, max(positions, prompts.length))
        return cache

    def _read(self, ids: Tensor, masked: dict[str, Tensor], cache: Any) -> None:
        """Write the keys and values of these tokens into a cache."""
        body = self.model.base_model
        body(input_ids=ids, **masked, **{cache_argument(body): cache}, use_cache=True)

    def _masking(self, ids: Tensor, mask: Tensor | None, cache: Any) -> dict[str, Tensor]:
        """Return the masks of the prompts and the sequences, each behind its own padding."""
        prompts, new = self.prompts.whole_mask, ids.shape[1]
        length = cache.get_seq_length() + new
        own = prompts.new_ones(1, length - self.begun) if mask is None else mask
        padding = (own.cumsum(dim=1) == 0).sum(dim=1)  # of each sequence, before its prompt
        places = torch.arange(length, device=ids.device) - padding[:, None]
        held = prompts[:, places.clamp(0, self.begun - 1)]  # (N + 1, b or 1, length)
        held = torch.where(places < self.begun, held * (places >= 0), 1)
        return masking(held.expand(-1, len(ids) // len(prompts), -1).flatten(0, 1), new)

    @cached_property
    def _cached_bytes(self) -> tuple[tuple[int, bool, int | None], ...]:
        return BatchedForward(**_fields(self))._cached_bytes


def _fields(forward: BatchedForward) -> dict[str, Any]:
    """Return the arguments of a pass without prompts."""
    return {one.name: getattr(forward, one.name) for one in fields(BatchedForward)}


class PromptEnsemble(Ensemble):
    """An ensemble whose members are prompts with one private record each. Nothing is trained.

    The public model's prompt is the same without a record. `filled` gives the members their
    records; without one a member answers as the public model does.

    Args:
        base: a folder, a hub name, or a transformers model.
        describe: what a record is, as in "a clinic's discharge summary". Public.
        records: B, the number of members.
        longest: the most tokens of a record; the others are cut.
        plain: whether prompts are plain text instead of a message for the chat template.
        tokenizer: of a model object; None for the one that lies with the base.
        dtype: the base's dtype; None for fp32, or for a model object's own.
        device: the device; None for the CPU, or for a model object's own.

    Attributes:
        opening: the tokens behind every record, with which each text begins to be drawn.
        cut: how many records were longer than `longest`.

    Raises:
        ValueError: an argument is not valid, the base has no tokenizer, no chat template and
            `plain` is not set, or the prompts leave no room in its window.
    """

    def __init__(
        self,
        base: Any,
        describe: str,
        *,
        records: int,
        longest: int = LONGEST,
        plain: bool = False,
        tokenizer: Any = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        check_type("describe", describe, str, 'a phrase such as "a film review"')
        check_models(records, "records")
        check_count("longest", longest)
        if not describe.strip():
            raise ValueError(f"describe must say what a record is, got {describe!r}")
        model, found = load_base(base, dtype)
        tokenizer = found if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ValueError("base must have a tokenizer, but has none")
        model = model if device is None else model.to(device)
        super().__init__(
            model, [Adapter({})] * records, adapted={}, tokenizer=tokenizer, unverified=()
        )
        before, self._around, after = _wording(tokenizer, describe.strip(), plain)
        self.opening = self._ids(after)
        common = begun(beginning_of(tokenizer), self._ids(before))
        self._common = common or [end_of_text(tokenizer, self.vocab_size)]
        self._longest = longest
        local = isinstance(base, str | os.PathLike) and Path(base).is_dir()
        commit = getattr(model.config, "_commit_hash", None)
        model_name = fingerprint(base, (), base_files(base) if local else {}, commit)
        self._public = [model_name, describe.strip(), plain, longest]
        self._empty = self._forward
        self._fill([None] * records)

    def filled(self, records: Sequence[str | None]) -> PromptEnsemble:
        """Return this ensemble with other records; the model is shared.

        Args:
            records: one text for each member; None for a member without one. A record that is
                longer than `longest` tokens is cut.

        Raises:
            ValueError: there is another number of records, or one holds no text.
        """
        if len(records) != self.num_models:
            raise ValueError(f"records must be {self.num_models}, got {len(records)}")
        found = copy.copy(self)
        found._fill(records)
        return found

    def _fill(self, records: Sequence[str | None]) -> None:
        intro, outro = self._around
        most, end = len(self._ids(intro)) + self._longest, self._ids(outro)
        slots = torch.zeros(self.num_models + 1, most + len(end), dtype=torch.int64)
        mask = torch.zeros_like(slots)
        self.cut = 0
        for row, record in enumerate(records, 1):
            if record is None:
                continue
            if not record.strip():
                raise ValueError(f"records must hold text, got {record!r}")
            # As a tokenizer cuts the whole text, without tokens that the base does not have.
            whole = plain_ids(self.tokenizer, intro + record)
            ids = [one for one in whole if one < self.vocab_size]
            self.cut += len(ids) > most
            shown = torch.tensor([*ids[:most], *end])
            slots[row, -len(shown) :], mask[row, -len(shown) :] = shown, 1
        common = torch.tensor(self._common)
        prompts = Prompts(*(part.to(self.device) for part in (common, slots, mask)))
        absent = tuple(i for i, record in enumerate(records) if record is None)
        self._forward = PromptForward(
            **_fields(self._empty) | {"zero_members": absent, "max_positions": self._window},
            prompts=prompts,
        )
        self._forward.check_length(len(self.opening))
        self._of_active = {}
        window = self._forward.max_positions
        self.max_positions = None if window is None else window - prompts.length
        told = json.dumps([self._public, list(records)])
        self.fingerprint = hashlib.sha256(told.encode()).hexdigest()

    @property
    def public_prompt(self) -> tuple[int, ...]:
        """The tokens of a prompt without a record."""
        return (*self._common, *self.opening)

    @property
    def _window(self) -> int | None:
        """The longest input. A window that slides counts, because it would count the padding."""
        sliding = [window for _, _, window in self._empty._cached_bytes]
        limits = [one for one in (self._empty.max_positions, *sliding) if one is not None]
        return min(limits, default=None)

    def _ids(self, text: str) -> list[int]:
        ids = plain_ids(self.tokenizer, text)
        check_prompt(ids, self.vocab_size, self.tokenizer)
        return ids


def _wording(tokenizer: Any, describe: str, plain: bool) -> tuple[str, tuple[str, str], str]:
    """Return the text before a record's slot, around a record in it, and behind it."""
    if plain:
        return "", (f"{describe}:\n\n", "\n\n"), f"{describe}:\n\n"
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "base must have a chat template, but its tokenizer has none: plain=True (--plain) "
            "writes prompts without one"
        )
    asked = f"Write {describe}. Answer with its text alone.{_MARK}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(_MARK)
    return before, (_EXAMPLE, ""), after
