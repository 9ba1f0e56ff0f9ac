"""The rows that a mechanism answers: shaped by public values alone, before any projection.

A temperature, or the likeliest tokens of the public model, are the same for neighbouring ensembles.
So what holds for every query holds for the shaped rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adapmixed.checks import check_number, check_optional_count
from adapmixed_ext.inputs import ensemble_logits


@dataclass(frozen=True)
class Rows:
    """Logits of one call.

    Attributes:
        private: (N, B, k).
        public: (B, k).
        tokens: (B, k) int64, which tokens these are; None if all V are kept.
        vocab_size: V.
    """

    private: Tensor
    public: Tensor
    tokens: Tensor | None
    vocab_size: int

    def released(self, places: Tensor) -> Tensor:
        """Return the (B,) tokens of the vocabulary at (B,) places among those kept."""
        if self.tokens is None:
            return places
        return self.tokens.gather(1, places.unsqueeze(1)).squeeze(1)

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B,) places of the targets among those kept, and (B,) bool if they are."""
        if self.tokens is None:
            return targets, torch.ones_like(targets, dtype=torch.bool)
        found = self.tokens == targets.unsqueeze(1)
        return found.to(torch.int64).argmax(1), found.any(1)


LEAST_TEMPERATURE = 1e-3
"""Divided by less, logits that models give reach the operators' limit of 1e6, and whether a private
row does would show."""


def check_shape(temperature: float, top_k: int | None) -> None:
    """Raise unless rows can be shaped so."""
    check_number("temperature", temperature, least=LEAST_TEMPERATURE)
    check_optional_count("top_k", top_k)


def shaped(
    private_logits: Tensor,
    public_logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Rows:
    """Return the rows with this temperature and the `top_k` likeliest tokens of the public model.

    A private row without any of these tokens is the public one. Divided logits are float32.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V).
        temperature: ≥ 0.001, divides every logit.
        top_k: ≥ 1; None keeps all tokens.

    Raises:
        ValueError: as the operators for bad logits, and for numbers out of range.
    """
    check_shape(temperature, top_k)
    private, public = ensemble_logits(private_logits, public_logits)
    vocab_size, tokens = public.shape[-1], None
    if top_k is not None and top_k < vocab_size:
        tokens = public.float().topk(top_k, dim=-1).indices
        # Not gather(), which makes a float32 copy of bfloat16 rows on its way.
        positions = torch.arange(len(tokens), device=tokens.device)[:, None]
        private, public = private[:, positions, tokens], public[positions, tokens]
        empty = torch.isneginf(private.amax(-1))
        private[empty] = public.expand_as(private)[empty]
    if temperature != 1.0:  # one copy of what an answer's memory consists of: `shaped_bytes`
        private, public = (
            one.to(torch.float32, copy=True).div_(temperature) for one in (private, public)
        )
    return Rows(private, public, tokens, vocab_size)


def shaped_bytes(
    rows: int, vocab_size: int, element: int, *, temperature: float, top_k: int | None
) -> int:
    """Return the bytes of the copies that `shaped` makes of one query's rows.

    Args:
        rows: N + 1.
        vocab_size: V.
        element: bytes of a logit.
    """
    kept = vocab_size if top_k is None else min(top_k, vocab_size)
    cut = element if kept < vocab_size else 0
    return rows * kept * (cut + (4 if temperature != 1.0 else 0))


def check_confidence(public_confidence: float | None) -> None:
    """Raise unless this is a probability or None."""
    if public_confidence is not None:
        check_number("public_confidence", public_confidence, least=0.0, most=1.0)


def unsure(public: Tensor, public_lse: Tensor, public_confidence: float | None) -> Tensor:
    """Return (B,) bool: the likeliest public token has at most this probability.

    All positions if the rule is off (None).
    """
    if public_confidence is None:
        return torch.ones_like(public_lse, dtype=torch.bool)
    top = (public.double().amax(-1) - public_lse).exp()
    return top <= public_confidence
