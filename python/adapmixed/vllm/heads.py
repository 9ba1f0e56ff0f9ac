"""The private rows of members that adapt the output layer alone, from the last hidden states.

z_i = z_0 + scale_i (h A_i) B_i, as `adapmixed.ensemble.batched_lora.HeadLoRA` computes it but for
the last bits. Here one step has few positions, so one product takes the A of all members. No
operand's shape depends on which members are there or on their ranks, so that a member's row does
not depend on another member. If all members have one rank, fp32 rows on a CPU come from our own
operator, which writes them once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.batched_lora import RankGroup
from adapmixed.ensemble.layers import head_name
from adapmixed.ensemble.member import Adapter
from adapmixed.ensemble.parts import Parts, read_parts
from adapmixed.ensemble.provenance import fingerprint
from adapmixed.ensemble.room import LogitsRoom
from adapmixed.ensemble.vocabulary import unnamed_ids
from adapmixed.mechanisms import Origin
from adapmixed.ranks import ALONE
from adapmixed_ext.low_rank import add_low_rank, can_add_low_rank

_CAPS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True, eq=False)
class Loaded:
    """An ensemble read from disk, before its public model runs inside vLLM.

    Attributes:
        parts: the public model, the adapters and what is known of them.
        origin: the origin of its rows.
    """

    parts: Parts
    origin: Origin

    @property
    def num_models(self) -> int:
        """N."""
        return len(self.parts.paths)

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
        return Heads(self.parts.adapters, name, ranks, (int(size), vocab), masked).to(device)


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
    parts = read_parts(base, folder, adapted=None, dtype=dtype, device=None, ranks=ALONE)
    check_heads(parts.adapted, head_name(parts.model))
    config = parts.model.config.get_text_config()
    for name in _CAPS:
        value = getattr(config, name, None)
        if value not in (None, 1, 1.0):
            raise ValueError(f"base must not cap or scale its logits inside vLLM: {name} = {value}")
    digest = fingerprint(base, parts.digests, parts.base_files, parts.commit)
    whole = active is None or active >= int(config.vocab_size)
    return Loaded(parts, Origin(digest, parts.unverified, None if whole else active))


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
        ranks: all ranks that a member may have.
        shape: (d, V).
        masked: ids that stand for no token; None if there are none.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        name: str,
        ranks: Sequence[int],
        shape: tuple[int, int],
        masked: Tensor | None,
    ) -> None:
        updates = [one.updates.get(name) for one in adapters]
        self.num_models, self.vocab_size = len(updates), shape[1]
        self._masked = masked if masked is not None and len(masked) else None
        self._zero = [i for i, one in enumerate(adapters) if one.is_zero]
        self._ranks = [_Rank(RankGroup(updates, rank, shape)) for rank in ranks]
        self._room = LogitsRoom()

    def to(self, device: torch.device) -> Heads:
        """Move all weights to a device; return this object."""
        self._ranks = [one.to(device) for one in self._ranks]
        if self._masked is not None:
            self._masked = self._masked.to(device)
        return self

    def rows(self, hidden: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
        """Return the private and the public rows. Their memory is used again once they are dropped.

        Args:
            hidden: (B, d) hidden states, as the output layer gets them.
            public: (B, V) logits of the public model.

        Returns:
            private (N, B, V) and public (B, V), in the dtype of `public`.
        """
        inputs = hidden.float()
        whole = self._room.take((self.num_models + 1, *public.shape), public)
        whole[0] = public
        private = whole[1:]
        if len(self._ranks) == 1 and can_add_low_rank(public):
            self._ranks[0].write(private, public, inputs)
        else:
            private.copy_(public.expand_as(private))
            for one in self._ranks:
                one.add(private, inputs)
        for member in self._zero:
            private[member] = public
        if self._masked is not None:
            whole.index_fill_(-1, self._masked, -torch.inf)
        return private, whole[0]


class _Rank:
    """The updates of one rank of all members; members of another rank have zeros."""

    def __init__(self, group: RankGroup) -> None:
        size, rank = group.down.shape[1:]
        self._down = group.down.transpose(0, 1).reshape(size, -1).contiguous()
        self._up, self._others, self._rank = group.up, group.others, rank

    def to(self, device: torch.device) -> _Rank:
        """Move the weights to a device; return this object."""
        self._down, self._up = self._down.to(device), self._up.to(device)
        self._others = self._others.to(device)
        return self

    def write(self, outputs: Tensor, public: Tensor, inputs: Tensor) -> None:
        """Write the rows of all members; those of another rank get the public row.

        Args:
            outputs: (N, B, V) fp32.
            public: (B, V) fp32.
            inputs: (B, d) fp32.
        """
        add_low_rank(public, self._hidden(inputs), self._up, outputs)
        if len(self._others):
            outputs[self._others] = public

    def _hidden(self, inputs: Tensor) -> Tensor:
        """Return h A_i, (N, B, r)."""
        return (inputs @ self._down).view(len(inputs), -1, self._rank).transpose(0, 1)

    def add(self, outputs: Tensor, inputs: Tensor) -> None:
        """Add the updates in place, in fp32; rows of members of another rank keep their bits.

        Args:
            outputs: (N, B, V).
            inputs: (B, d) fp32.
        """
        kept = outputs.index_select(0, self._others) if len(self._others) else None
        hidden = self._hidden(inputs)
        if outputs.dtype == self._up.dtype:
            outputs.baddbmm_(hidden, self._up)
        else:
            outputs.copy_(outputs.to(self._up.dtype).baddbmm_(hidden, self._up))
        if kept is not None:
            outputs.index_copy_(0, self._others, kept)
