"""What a mechanism may do to a query by the public distribution alone, at no privacy cost.

A rule of q is the same for neighbouring ensembles, so that what holds for every query holds for the
queries it lets through, over the tokens it keeps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from adapmixed.mechanisms.checks import check_count, check_number
from adapmixed.ranks import ALONE, Ranks
from adapmixed_ext.ops import ensemble_logits


@dataclass(frozen=True)
class Restricted:
    """The logits of the tokens that are kept.

    Attributes:
        private_logits: (N, B, k).
        public_logits: (B, k).
        tokens: (B, k) int64, which tokens these are; None where all V are kept.
    """

    private_logits: Tensor
    public_logits: Tensor
    tokens: Tensor | None

    def released(self, chosen: Tensor) -> Tensor:
        """(B,) tokens of the vocabulary from (B,) places among those kept."""
        if self.tokens is None:
            return chosen
        return self.tokens.gather(1, chosen.unsqueeze(1)).squeeze(1)

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) places of the targets among those kept, and (B,) bool, whether they are there."""
        if self.tokens is None:
            return targets, torch.ones_like(targets, dtype=torch.bool)
        found = self.tokens == targets.unsqueeze(1)
        return found.to(torch.int64).argmax(1), found.any(1)


def restrict(
    private_logits: Tensor, public_logits: Tensor, top_k: int | None, ranks: Ranks = ALONE
) -> Restricted:
    """The top_k likeliest tokens of q; a private row without any of them is q's.

    Every distribution is then the one given these tokens: their logits alone are read.
    """
    private, public = ensemble_logits(private_logits, public_logits)
    if top_k is None or top_k >= public.shape[-1]:
        return Restricted(private, public, None)
    tokens = ranks.same(public.float().topk(top_k, dim=-1).indices)
    index = tokens.unsqueeze(0).expand(len(private), -1, -1)
    kept, kept_public = private.gather(2, index), public.gather(1, tokens)
    empty = torch.isneginf(kept).all(-1, keepdim=True)
    return Restricted(torch.where(empty, kept_public, kept), kept_public, tokens)


def check_rules(top_k: int | None, sure_above: float | None) -> None:
    """Refuses settings of the rules that are out of range."""
    check_count("top_k", top_k, optional=True)
    if sure_above is not None:
        check_number("sure_above", sure_above, least=0.0, most=1.0)


def unsure(public_logits: Tensor, public_lse: Tensor, most: float | None) -> Tensor:
    """(B,) bool, the positions whose likeliest public token has probability at most `most`.

    All of them where the rule is off (None).
    """
    if most is None:
        return torch.ones_like(public_lse, dtype=torch.bool)
    top = (public_logits.double().amax(-1) - public_lse).exp()
    return top <= most
