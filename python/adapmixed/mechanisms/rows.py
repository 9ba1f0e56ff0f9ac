"""The rows that a mechanism answers, shaped by public values before any projection.

A temperature and the likeliest tokens of the public model are the same for neighbouring ensembles,
so every guarantee holds for the shaped rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adapmixed.limits import (
    LEAST_LOGIT,
    LEAST_PUBLIC,
    check_number,
    check_optional_count,
    check_temperature,
)
from adapmixed_ext.inputs import ensemble_logits, log_sum_exp


@dataclass(frozen=True)
class Rows:
    """The logits of one call.

    Attributes:
        private: (N, B, k) private logits.
        public: (B, k) public logits.
        tokens: (B, k) int64, ids of the kept tokens; None if all V are kept.
        vocab_size: V.
        drawn: whether tokens are drawn; False if only log-probabilities are computed.
    """

    private: Tensor
    public: Tensor
    tokens: Tensor | None
    vocab_size: int
    drawn: bool = True

    def apart_from(self, *logits: Tensor) -> Rows:
        """Return these rows, each copied if it shares memory with one of these logits."""
        memory = {one.untyped_storage().data_ptr() for one in logits}
        private, public = (
            one.clone() if one.untyped_storage().data_ptr() in memory else one
            for one in (self.private, self.public)
        )
        return replace(self, private=private, public=public)

    def answerable(self) -> Rows:
        """Return rows for which no operator raises an error that depends on a private row.

        A private row with NaN or +inf, or without a finite logit, becomes the public row. If its
        largest logit is beyond ±2^18, that is subtracted from the row, which changes no probability
        but for rounding. A new row depends on the old one and on the public row alone, so every
        guarantee holds. Private logits are copied only if a row changes.
        """
        largest = self.private.amax(-1, keepdim=True)
        bad, far = ~largest.isfinite(), largest.abs() > LARGEST
        if not bool((bad | far).any()):
            return self
        private = self.private.clone()
        for i, b in (bad | far).squeeze(-1).nonzero().tolist():
            row = self.public[b] if bool(bad[i, b]) else private[i, b] - largest[i, b]
            private[i, b] = row
        return replace(self, private=private)

    def without_tail(self) -> Rows:
        """Return rows whose members do not speak about the tail, tokens below `LEAST_PUBLIC`.

        On the tail a member's probability becomes q, and on the other tokens it is re-scaled. A
        private row without a finite logit there becomes the public row. A new row depends on the
        old one and on the public row alone, so every guarantee holds (docs/theory/numerics.md). A
        row with the bits of the public one keeps them. Private logits are copied only if a member
        speaks about the tail.

        Raises:
            ValueError: a row has NaN, +inf or no finite logit.
        """
        # A superset of the tail, found without a sum, is in most cases what is masked everywhere.
        largest = self.public.amax(-1, keepdim=True).float()
        highest = largest + (LEAST_PUBLIC + math.log(self.vocab_size))
        positions, tokens = (self.public < highest).nonzero(as_tuple=True)
        low = self.public[positions, tokens], self.private[:, positions, tokens]
        if all(bool(one.isneginf().all()) for one in low):
            return self
        public_lse, _ = log_sum_exp(self.public, "public_logits")
        tail = self.public < (public_lse + LEAST_PUBLIC).unsqueeze(-1)
        if not bool(tail.any()):
            return self
        public = self.public.masked_fill(tail, -math.inf)
        least = self.private.amax(-1, keepdim=True).float() + LEAST_LOGIT
        inside = self.private.masked_fill(tail | (self.private < least), -math.inf)
        silent = inside.amax(-1).isneginf()
        inside[silent] = public.expand_as(inside)[silent]
        shift = log_sum_exp(inside, "private_logits")[0] - log_sum_exp(public, "public_logits")[0]
        private = torch.where(silent.unsqueeze(-1), self.public, self.private)
        positions, tokens = tail.nonzero(as_tuple=True)
        kept = self.public[positions, tokens] + shift[:, positions]
        private[:, positions, tokens] = kept.to(private.dtype)
        return replace(self, private=private)

    def check_targets(self, targets: Tensor) -> None:
        """Raise ValueError unless these are (B,) int64 tokens of the vocabulary."""
        positions = len(self.public)
        if not isinstance(targets, Tensor):
            raise ValueError(f"targets must be a torch.Tensor, got {type(targets).__name__}")
        if targets.dtype != torch.int64 or tuple(targets.shape) != (positions,):
            raise ValueError(
                f"targets must be torch.int64 of shape ({positions},), got {targets.dtype} "
                f"{tuple(targets.shape)}"
            )
        outside = ((targets < 0) | (targets >= self.vocab_size)).nonzero()
        if outside.numel():
            at = int(outside[0])
            raise ValueError(
                f"targets[{at}] must be a token in [0, {self.vocab_size}), got {int(targets[at])}"
            )

    def released(self, places: Tensor) -> Tensor:
        """Return the (B,) ids of the kept tokens at (B,) places."""
        if self.tokens is None:
            return places
        return self.tokens.gather(1, places.unsqueeze(1)).squeeze(1)

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets' (B,) places among the kept tokens, and (B,) bool, True if kept."""
        if self.tokens is None:
            return targets, torch.ones_like(targets, dtype=torch.bool)
        found = self.tokens == targets.unsqueeze(1)
        return found.to(torch.int64).argmax(1), found.any(1)


LARGEST = 2.0**18
"""Size of the largest logit beyond which a shaped row is shifted. The operators raise at 1e6, and
that error would reveal a private row. Every dtype represents this number, or no larger one."""


def check_shape(temperature: float, top_k: int | None) -> None:
    """Raise ValueError unless rows can have this temperature and top-k."""
    check_temperature(temperature)
    check_optional_count("top_k", top_k)


def shaped(
    private_logits: Tensor,
    public_logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Rows:
    """Return the rows with this temperature and the `top_k` likeliest tokens of the public model.

    A private row without any of these tokens becomes the public row. Divided logits are float32. If
    the largest logit of a row would lie beyond ±2^18, it is subtracted from the row first. This
    changes no probability, and then no finite logits raise, whatever the private rows are. Rows are
    not shifted if neither temperature nor top-k changes them.

    Args:
        private_logits: (N, B, V) raw logits.
        public_logits: (B, V) raw logits.
        temperature: divides every logit; in [0.01, 100].
        top_k: number of tokens to keep, ≥ 1; None keeps all.

    Returns:
        Rows with k = min(top_k, V) tokens.

    Raises:
        ValueError: the logits are not valid, or a number is out of range.
    """
    check_shape(temperature, top_k)
    private, public = ensemble_logits(private_logits, public_logits)
    vocab_size, tokens = public.shape[-1], None
    if top_k is not None and top_k < vocab_size:
        tokens = public.float().topk(top_k, dim=-1).indices
        # gather() would make a float32 copy of bfloat16 rows.
        positions = torch.arange(len(tokens), device=tokens.device)[:, None]
        private, public = private[:, positions, tokens], public[positions, tokens]
        empty = torch.isneginf(private.amax(-1))
        private[empty] = public.expand_as(private)[empty]
    if temperature != 1.0:  # this copy is counted in `shaped_bytes`
        private, public = (one.to(torch.float32, copy=True) for one in (private, public))
    if tokens is not None or temperature != 1.0:
        for logits in (private, public):
            _divide(logits, temperature)
    return Rows(private, public, tokens, vocab_size)


def _divide(logits: Tensor, temperature: float) -> None:
    """Divide rows in place. Subtract the largest logit first if it would lie beyond ±`LARGEST`.

    Other rows, and those with NaN, +inf or no finite logit, are divided without a shift. A result
    too small for the dtype becomes -inf; its probability is 0 in any case.
    """
    largest = logits.amax(-1, keepdim=True)
    far = largest.isfinite() & ((largest / temperature).abs() > LARGEST)
    logits.sub_(torch.where(far, largest, 0.0)).div_(temperature)


def shaped_bytes(
    rows: int, vocab_size: int, element: int, *, temperature: float, top_k: int | None
) -> int:
    """Return the bytes of the copies that `shaped` makes of one query's rows.

    Args:
        rows: N + 1.
        vocab_size: V.
        element: bytes of a logit.
        temperature: as in :func:`shaped`.
        top_k: as in :func:`shaped`.
    """
    kept = vocab_size if top_k is None else min(top_k, vocab_size)
    cut = element if kept < vocab_size else 0
    return rows * kept * (cut + (4 if temperature != 1.0 else 0))


def check_confidence(public_confidence: float | None) -> None:
    """Raise ValueError unless this is a probability or None."""
    if public_confidence is not None:
        check_number("public_confidence", public_confidence, least=0.0, most=1.0)


def unsure(
    public: Tensor, public_confidence: float | None, public_lse: Tensor | None = None
) -> Tensor:
    """Return (B,) bool, True if the likeliest public token has at most this probability.

    All are True if `public_confidence` is None.

    Args:
        public: (B, V) public logits.
        public_confidence: the probability; None for no such rule.
        public_lse: (B,) float64, their log-sum-exps; None to compute them.
    """
    if public_confidence is None:
        return torch.ones(len(public), dtype=torch.bool, device=public.device)
    exact = public.double()
    lse = exact.logsumexp(-1) if public_lse is None else public_lse
    return (exact.amax(-1) - lse).exp() <= public_confidence
