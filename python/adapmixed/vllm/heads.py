"""The private rows of members that adapt the output layer alone, from the last hidden states.

They are computed as in `adapmixed.ensemble.output_layer`, by the same operator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import Adapter, head_name
from adapmixed.ensemble.members import Members, read_members
from adapmixed.ensemble.output_layer import SPARE, HeadAdapters, Logits, LogitsRoom
from adapmixed.ensemble.vocabulary import unnamed_ids
from adapmixed.limits import active_tokens
from adapmixed.mechanisms import Origin
from adapmixed.ranks import ALONE
from adapmixed_ext.inputs import likeliest

_CAPS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True, eq=False)
class Loaded:
    """An ensemble read from disk, before its public model runs inside vLLM.

    Attributes:
        parts: the public model, the adapters and what is known of them.
        origin: the origin of its rows.
    """

    parts: Members
    origin: Origin

    @property
    def num_models(self) -> int:
        """N."""
        return self.parts.num_models

    def reference(self) -> Ensemble:
        """Return our own engine over the same members. It changes the public model."""
        parts = self.parts
        return Ensemble(
            parts.model, parts.adapters, adapted=parts.adapted, tokenizer=parts.tokenizer
        )

    def heads(self, device: torch.device) -> Heads:
        """Return the members' output layers on a device."""
        config = self.parts.model.config.get_text_config()
        vocab = int(config.vocab_size)
        ((name, ranks),) = self.parts.adapted.items()
        tokenizer = self.parts.tokenizer
        masked = None if tokenizer is None else unnamed_ids(tokenizer, vocab)
        size = self.parts.model.get_output_embeddings().weight.shape[1]
        shape, active = (int(size), vocab), self.origin.active_tokens
        return Heads(self.parts.adapters, name, max(ranks), shape, masked, active).to(device)


def load(
    base: str,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    active: int | None = None,
) -> Loaded:
    """Read an ensemble whose members adapt the output layer alone.

    Args:
        base: the public model's folder.
        folder: the ensemble's folder.
        dtype: the public model's dtype; None for fp32.
        active: K of the active vocabulary; None, or V and more, for all tokens.

    Raises:
        ValueError: as `Ensemble.from_pretrained`, or members adapt more than the output layer, or
            the public model caps or scales its logits.
    """
    parts = read_members(base, folder, adapted=None, dtype=dtype, device=None, ranks=ALONE)
    check_heads(parts.adapted, head_name(parts.model))
    config = parts.model.config.get_text_config()
    for name in _CAPS:
        value = getattr(config, name, None)
        if value not in (None, 1, 1.0):
            raise ValueError(f"base must not cap or scale its logits inside vLLM: {name} = {value}")
    speaking = active_tokens(active, int(config.vocab_size))
    return Loaded(parts, Origin(parts.fingerprint, parts.unverified, speaking, parts.unit))


def check_heads(adapted: Mapping[str, Sequence[int]], head: str | None) -> None:
    """Raise ValueError unless members adapt the output layer alone.

    Args:
        adapted: the layers that members may adapt.
        head: name of the output layer.
    """
    if set(adapted) != {head}:
        others = ", ".join(sorted(set(adapted) - {head})) or "no layer"
        raise ValueError(
            f"ensemble must have members that adapt the output layer {head} alone inside vLLM, "
            f"got members that adapt {others}: train them with --adapt head, or use "
            "'adapmixed serve'"
        )


class Heads:
    """The output layers of N members.

    Args:
        adapters: one for each member.
        name: name of the output layer.
        rank: the largest rank that a member may have.
        shape: (d, V).
        masked: ids that stand for no token; None if there are none.
        active: K of the active vocabulary; None for all tokens.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        name: str,
        rank: int,
        shape: tuple[int, int],
        masked: Tensor | None,
        active: int | None,
    ) -> None:
        updates = [one.updates.get(name) for one in adapters]
        self.num_models, self.vocab_size = len(updates), shape[1]
        self._masked = masked if masked is not None and len(masked) else None
        self._zero = [i for i, one in enumerate(adapters) if one.is_zero]
        self._adapters, self._active = HeadAdapters(updates, shape, rank), active
        self._room = LogitsRoom()

    def to(self, device: torch.device) -> Heads:
        """Move all weights to a device; return this object."""
        self._adapters = self._adapters.to(device)
        if self._masked is not None:
            self._masked = self._masked.to(device)
        return self

    def rows(self, hidden: Tensor, public: Tensor) -> Logits:
        """Return the logits of B positions. Their memory is used again once they are dropped.

        Args:
            hidden: (B, d) hidden states, as the output layer gets them.
            public: (B, V) logits of the public model.
        """
        if self._masked is not None:
            public = public.index_fill(-1, self._masked, -torch.inf)
        tokens = None if self._active is None else likeliest(public, self._active)
        start = public if tokens is None else public.gather(1, tokens)
        width = start.shape[1] + (0 if tokens is None else SPARE)
        private = self._room.take((self.num_models, len(public), width), public)
        private = private[..., : start.shape[1]]
        self._adapters.write(start, hidden, tokens, private)
        for member in self._zero:
            private[member] = start
        return Logits(private, public, tokens)
