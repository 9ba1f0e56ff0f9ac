"""Temperature and top-k of the public distribution, before anything is projected.

Each row becomes a function of itself and of q alone, the same for every row. So neighbouring
ensembles stay neighbours, an emptied slot still answers q, and what the mechanism guarantees for
any rows it guarantees for these. After mixing neither would be covered: the released token would
follow another law than the one that was charged.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adapmixed.mechanisms.base import Mechanism, Proposal
from adapmixed.mechanisms.checks import check_count, check_number
from adapmixed.ranks import ALONE, Ranks
from adapmixed_ext import RandomSource
from adapmixed_ext.ops import ensemble_logits


@dataclass(frozen=True)
class Shaped(Mechanism):
    """A mechanism over rows z/temperature, of which the top_k likeliest tokens of q are kept.

    Attributes:
        mechanism: answers the reshaped rows.
        temperature: > 0; other than 1 the division is in fp32, also of bf16 and fp16 rows.
        top_k: tokens kept, ≥ 1; None: all. A private row that has none of them becomes q's.

    Raises:
        ValueError: a setting out of range, or one that `mechanism` sets itself.
    """

    name: ClassVar[str] = "shaped"
    mechanism: Mechanism
    temperature: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, Mechanism):
            raise ValueError(f"mechanism must be a Mechanism, got {type(self.mechanism).__name__}")
        check_number("temperature", self.temperature, above=0.0)
        check_count("top_k", self.top_k, optional=True)
        own = getattr(self.mechanism, "top_k", None)
        if self.top_k is not None and hasattr(self.mechanism, "sure_above") and own is not None:
            raise ValueError(
                f"top_k must be given once, got {self.top_k} and the mechanism's {own}"
            )

    @property
    def budget(self) -> int | None:
        """That of the mechanism."""
        return self.mechanism.budget

    def held_bytes(self, rows: int, vocab_size: int, element: int) -> int:
        """The reshaped rows, in fp32 where there is a temperature, and what is held beside them."""
        if self.temperature == 1.0 and self.top_k is None:
            return self.mechanism.held_bytes(rows, vocab_size, element)
        shaped = element if self.temperature == 1.0 else 4
        inner = self.mechanism.held_bytes(rows, vocab_size, shaped)
        return rows * vocab_size * shaped + inner

    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        targets: Tensor | None = None,
        rng: RandomSource,
        ranks: Ranks = ALONE,
    ) -> Proposal:
        """As `Mechanism.propose`; a target that is not kept has log-probability −inf."""
        rows = self.reshape(private_logits, public_logits, ranks)
        return self.mechanism.propose(*rows, targets=targets, rng=rng, ranks=ranks)

    def reshape(
        self, private_logits: Tensor, public_logits: Tensor, ranks: Ranks = ALONE
    ) -> tuple[Tensor, Tensor]:
        """The rows that are projected: (N, B, V) and (B, V), −inf at tokens that are not kept."""
        private, public = ensemble_logits(private_logits, public_logits)
        top_k = self.top_k
        if top_k is not None and top_k >= public.shape[-1]:
            top_k = None
        if top_k is None and self.temperature == 1.0:
            return private, public
        # One copy, worked on in place: (N, B, V) is what an answer's memory consists of.
        dtype = private.dtype if self.temperature == 1.0 else torch.float32
        private, public = (rows.to(dtype, copy=True) for rows in (private, public))
        if self.temperature != 1.0:
            for rows in (private, public):
                rows.div_(self.temperature)
        if top_k is not None:
            kept = ranks.same(public.float().topk(top_k, dim=-1).indices)
            dropped = torch.ones_like(public, dtype=torch.bool).scatter_(1, kept, False)
            for rows in (private, public):
                rows.masked_fill_(dropped, -torch.inf)
            empty = torch.isneginf(private.amax(-1))
            private[empty] = public.expand_as(private)[empty]
        return private, public
