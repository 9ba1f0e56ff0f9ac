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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from adapmixed.ensemble.decoder import cache_argument, key_value_cache, regroup, written_layers
from adapmixed.ensemble.ensemble import Ensemble, masking
from adapmixed.ensemble.lora import MISSING
from adapmixed.ensemble.members import fingerprint
from adapmixed.ensemble.public_model import base_files, load_base
from adapmixed.limits import check_count, check_models, check_type
from adapmixed.text import beginning_of, begun, check_prompt, end_of_text, plain_ids

LONGEST = 256
"""Tokens of a record that a prompt holds unless told otherwise; the others are cut."""
_EXAMPLE = "\n\nHere is an example:\n\n"
_MARK = "\ue000"  # of private use: no template has it


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
        max_positions: the longest input behind the prompts.

    Raises:
        ValueError: an argument is not valid, the base has no tokenizer, no chat template and
            `plain` is not set, or the prompts leave no room in its window.
    """

    # What follows the C common tokens of each prompt, (N + 1, L) int64, padded on the left. The
    # public prompt's is the first. None before there are prompts.
    _slots: Tensor | None = None
    _mask: Tensor  # of whole prompts, (N + 1, C + L)

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
        model, base_tokenizer = load_base(base, dtype)
        tokenizer = base_tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ValueError("base must have a tokenizer, but has none")
        model = model if device is None else model.to(device)
        members = [MISSING] * records
        super().__init__(model, members, adapted={}, tokenizer=tokenizer, unverified=())
        before, self._around, after = _wording(tokenizer, describe.strip(), plain)
        self.opening = self._ids(after)
        common = begun(beginning_of(tokenizer), self._ids(before))
        self._common = common or [end_of_text(tokenizer, self.vocab_size)]
        self._longest = longest
        local = isinstance(base, str | os.PathLike) and Path(base).is_dir()
        commit = getattr(model.config, "_commit_hash", None)
        model_name = fingerprint(base, (), base_files(base) if local else {}, commit)
        self._public = [model_name, describe.strip(), plain, longest]
        # A window that slides counts, because it would count the padding.
        sliding = [window for _, _, window in self._cached_layers]
        limits = [limit for limit in (self.max_positions, *sliding) if limit is not None]
        self._fill([None] * records)
        if limits:
            self.max_positions = min(limits) - self.begun
            if len(self.opening) > self.max_positions:
                raise ValueError(
                    f"longest must leave room in the base's window of {min(limits)} positions, got "
                    f"{longest}, with which prompts take {self.begun + len(self.opening)} of them"
                )

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
        ensemble = copy.copy(self)
        ensemble._fill(records)
        return ensemble

    def _fill(self, records: Sequence[str | None]) -> None:
        intro, outro = self._around
        most, end = len(self._ids(intro)) + self._longest, self._ids(outro)
        first = len(self._common)
        slots = torch.zeros(self.num_models + 1, most + len(end), dtype=torch.int64)
        mask = pad(torch.zeros_like(slots), (first, 0), value=1)
        self.cut = 0
        for row, record in enumerate(records, 1):
            if record is None:
                continue
            if not record.strip():
                raise ValueError(f"records must hold text, got {record!r}")
            # As a tokenizer cuts the whole text, without tokens that the base does not have.
            whole = plain_ids(self.tokenizer, intro + record)
            ids = [token for token in whole if token < self.vocab_size]
            self.cut += len(ids) > most
            shown = torch.tensor([*ids[:most], *end])
            slots[row, -len(shown) :], mask[row, -len(shown) :] = shown, 1
        self._slots, self._mask = slots.to(self.device), mask.to(self.device)
        self.zero_members = tuple(i for i, record in enumerate(records) if record is None)
        text = json.dumps([self._public, list(records)])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    @property
    def begun(self) -> int:
        """The number of positions of a prompt, C + L; 0 before there are prompts."""
        return 0 if self._slots is None else len(self._common) + self._slots.shape[1]

    @torch.no_grad()
    def new_cache(self, positions: int = 0, batch: int = 1, chunk: int = 1) -> Any:
        """Return a cache that holds the prompts; see `Ensemble`."""
        if self._slots is None:
            return super().new_cache(positions, batch, chunk)
        first, rows = len(self._common), len(self._slots)
        cache = key_value_cache(self.config, max(positions, self.begun))
        once = key_value_cache(self.config, first)
        self._read(torch.tensor([self._common], device=self.device), {}, once)
        for layer, read in zip(cache.layers, once.layers, strict=True):
            if read.keys is not None:
                shape = (rows, *read.keys.shape[1:])
                layer.update(read.keys.expand(shape), read.values.expand(shape))
                if hasattr(layer, "cumulative_length"):  # a window has forgotten the first ones
                    layer.cumulative_length = first
        for start in range(0, self._slots.shape[1], chunk):
            ids = self._slots[:, start : start + chunk]
            part = self._mask[:, : first + start + ids.shape[1]]
            self._read(ids, masking(part, ids.shape[1]), cache)
        if batch > 1:
            again = torch.zeros(batch, dtype=torch.int64, device=self.device)
            for layer in written_layers(cache):
                regroup(layer, [(layer, again)], 1, self.begun, max(positions, self.begun))
        return cache

    def _read(self, ids: Tensor, masked: dict[str, Tensor], cache: Any) -> None:
        """Write the keys and values of these tokens into a cache."""
        body = self.model.base_model
        body(input_ids=ids, **masked, **{cache_argument(body): cache}, use_cache=True)

    def _masking(self, ids: Tensor, mask: Tensor | None, cache: Any) -> dict[str, Tensor]:
        """Return the masks of the prompts and the sequences, each behind its own padding."""
        if self._slots is None:
            return super()._masking(ids, mask, cache)
        prompts, new = self._mask, ids.shape[1]
        length = cache.get_seq_length() + new
        sequences = prompts.new_ones(1, length - self.begun) if mask is None else mask
        padding = (sequences.cumsum(dim=1) == 0).sum(dim=1)  # of each sequence, before its prompt
        places = torch.arange(length, device=ids.device) - padding[:, None]
        held = prompts[:, places.clamp(0, self.begun - 1)]  # (N + 1, b or 1, length)
        held = torch.where(places < self.begun, held * (places >= 0), 1)
        return masking(held.expand(-1, len(ids) // len(prompts), -1).flatten(0, 1), new)

    @property
    def public_prompt(self) -> tuple[int, ...]:
        """The tokens of a prompt without a record."""
        return (*self._common, *self.opening)

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
    request = f"Write {describe}. Answer with its text alone.{_MARK}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(_MARK)
    return before, (_EXAMPLE, ""), after
