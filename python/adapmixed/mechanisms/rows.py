"""The rows that a mechanism answers, shaped by public values before any projection.

A temperature, the likeliest tokens of the public model and the active vocabulary are the same for
neighbouring ensembles, so every guarantee holds for the shaped rows.

The active vocabulary S are the tokens about which members speak: the K likeliest of the public
model, without those below `LEAST_PUBLIC`. All others are the tail and keep their public
probability: p_i'(y) = (1 − t) p_i(y) / p_i(S) on S, p_i'(y) = q(y) elsewhere, t = q(tail). For a
mechanism the tail is one more token, the last column of the rows (docs/theory/numerics.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.limits import (
    LEAST_PUBLIC,
    MOST_TOKENS,
    check_active,
    check_optional_count,
    check_temperature,
)
from adapmixed_ext.inputs import ensemble_logits, likeliest, log_sum_exp, near_log_sum_exp, of_type
from adapmixed_ext.types import RandomSource


@dataclass(frozen=True)
class ShapedLogits:
    """The logits of one call.

    Attributes:
        private: (N, B, k) private logits, or (N, B, k + 1) with the tail's column.
        public: (B, k) public logits, or (B, k + 1).
        tokens: (B, k) int64, ids of the columns, ascending; None if they are the V tokens.
        vocab_size: V.
        tail: (B, V) public logits of the tokens about which members do not speak, −inf for active
            ones, and for tokens that top-k removes; None without such tokens.
        tail_lse: (B,) float64, log-sum-exps of the tail, −inf if no token is left; None without.
        spare: whether a number behind each private row is free; see :func:`shaped`.
        private_lse: (N, B) float64, `near_log_sum_exp` of the private rows, all of them finite, if
            it is known; else None.
        lse_differences: (N, B) float64, log-sum-exps of the private rows minus those of the public
            ones, if there is a tail's column; else None.
    """

    private: Tensor
    public: Tensor
    tokens: Tensor | None
    vocab_size: int
    tail: Tensor | None = None
    tail_lse: Tensor | None = None
    spare: bool = False
    private_lse: Tensor | None = None
    lse_differences: Tensor | None = None

    @property
    def width(self) -> int:
        """k, the number of columns that are tokens."""
        return self.vocab_size if self.tokens is None else self.tokens.shape[1]

    def of_all(self, private: Tensor) -> ShapedLogits:
        """Return the rows with the private logits of all processes, in place of this one's."""
        if private is self.private:
            return self
        return replace(self, private=private, spare=False, private_lse=None)

    def answerable(self) -> ShapedLogits:
        """Return rows for which no operator raises an error that depends on a private row.

        A private row with NaN or +inf, or without a finite logit, becomes the public row. If its
        largest logit is beyond ±2^18, that is subtracted from the row, which changes no probability
        but for rounding. A new row depends on the old one and on the public row alone, so every
        guarantee holds. Private logits are copied only if a row changes.
        """
        if self.private_lse is not None:
            return self
        largest = self.private.amax(-1, keepdim=True)
        bad, shift = ~largest.isfinite(), _shift(largest, 1.0)
        if not bool((bad | (shift != 0)).any()):
            return self
        private = torch.where(bad, self.public, self.private - shift)
        return replace(self, private=private, spare=False)

    def with_tail(self) -> ShapedLogits:
        """Return rows in which the tail, if there is one, is the last column, in float32.

        The column's logit is lse_tail(z_0) + lse_S(z_i) − lse_S(z_0). So a member with the bits of
        the public row keeps them.

        Raises:
            ValueError: a row has NaN, +inf or no finite logit.
        """
        if self.tail_lse is None:
            return self
        likely = self.public.argmax(-1)
        public_lse = _sums(self.public, likely, "public_logits")
        private_lse = self.private_lse
        if private_lse is None:
            private_lse = _sums(self.private, likely, "private_logits")
        differences = private_lse - public_lse  # the column leaves them as they are
        column = (self.tail_lse + differences).float().unsqueeze(-1)
        last = self.tail_lse.float().unsqueeze(-1)
        public = torch.cat([self.public.float(), last], -1)
        shape, strides = (*column.shape[:2], self.width + 1), self.private.stride()
        if self.spare and self.private.dtype == torch.float32 and min(strides[:2]) > self.width:
            private = self.private.as_strided(shape, strides)
            private[..., -1:] = column
        else:
            private = torch.cat([self.private.float(), column], -1)
        return replace(self, private=private, public=public, lse_differences=differences)

    def unsure(self, confidence: float | None, public_lse: Tensor | None = None) -> Tensor:
        """Return (B,) bool, True if the likeliest public token has at most this probability.

        All are True without a confidence.

        Args:
            confidence: the probability; None for no such rule.
            public_lse: (B,) float64, the public rows' log-sum-exps; None to compute them.
        """
        if confidence is None:
            return torch.ones(len(self.public), dtype=torch.bool, device=self.public.device)
        exact = self.public.double()
        lse = exact.logsumexp(-1) if public_lse is None else public_lse
        return (exact[:, : self.width].amax(-1) - lse).exp() <= confidence

    def check_targets(self, targets: Tensor) -> None:
        """Raise ValueError unless these are (B,) int64 tokens of the vocabulary."""
        ids = of_type("targets", targets, torch.int64, self.public.shape[:1], self.public)
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise ValueError(
                f"targets must be tokens in [0, {self.vocab_size}), got {int(outside[0])}"
            )

    def named(self, places: Tensor) -> Tensor:
        """Return the (B,) tokens of (B,) columns below k."""
        if self.tokens is None:
            return places
        return self.tokens.gather(1, places.unsqueeze(1)).squeeze(1)

    def released(self, places: Tensor, rng: RandomSource) -> Tensor:
        """Return the (B,) tokens of (B,) columns; a tail's token is drawn from q outside S.

        It takes one counter of `rng` if there is a tail, whether a token is drawn from it or not.
        """
        tokens = self.named(places.clamp(max=self.width - 1))
        if self.tail is None:
            return tokens
        within = (places == self.width).nonzero()[:, 0]
        if not len(within):
            rng.reserve()
            return tokens
        logits = self.tail[within]
        probabilities = logits.double().softmax(-1)
        return tokens.index_copy(0, within, ops.sample(probabilities, logits, rng=rng))

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B,) columns of the targets, and (B,) float64, log of their share of the column.

        The share of a token in the tail is q/t, that of an active one 1, and of a removed one 0.
        """
        if self.tokens is None:
            places, present = targets, torch.ones_like(targets, dtype=torch.bool)
        else:
            same = self.tokens == targets.unsqueeze(1)
            places, present = same.to(torch.int64).argmax(1), same.any(1)
        share = torch.where(present, 0.0, -math.inf).double()
        if self.tail is None or self.tail_lse is None:
            return places, share
        logits = self.tail.gather(1, targets.unsqueeze(1)).squeeze(1).double()
        within = ~logits.isneginf()
        places = torch.where(within, self.width, places)
        return places, torch.where(within, logits - self.tail_lse, share)


LARGEST = 2.0**18
"""Size of the largest logit beyond which a shaped row is shifted. The operators raise at 1e6, and
that error would reveal a private row. Every dtype represents this number, or no larger one."""


def check_shape(temperature: float, top_k: int | None, active: int | None = None) -> None:
    """Raise ValueError unless rows can have this temperature, top-k and active vocabulary."""
    check_temperature(temperature)
    check_optional_count("top_k", top_k)
    check_active(active)


def shaped(
    private_logits: Tensor,
    public_logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    active: int | None = None,
    tokens: Tensor | None = None,
) -> ShapedLogits:
    """Return the rows with this temperature, top-k and active vocabulary.

    A private row without any finite logit on the active vocabulary becomes the public row. Divided
    logits are float32. If the largest logit of a row would lie beyond ±2^18, it is subtracted from
    the row first. This changes no probability, and then no finite logits raise, whatever the
    private rows are. Rows are not shifted if neither temperature nor top-k changes them.

    Args:
        private_logits: (N, B, V) raw logits, or (N, B, K) of the active tokens alone.
        public_logits: (B, V) raw logits.
        temperature: divides every logit; in [0.01, 100].
        top_k: number of the likeliest public tokens that all rows keep, ≥ 1; None keeps all.
        active: K ≥ 2, number of the likeliest public tokens about which members speak; None, or V
            and more, for all of at least e^−70.
        tokens: (B, K) int64, the active tokens, ascending, of private logits of K columns; None
            for logits of all tokens. If such rows lie further apart than K numbers, the tail may
            take the number behind each.

    Returns:
        Logits of k = min(top_k, K, V) columns, and their tail.

    Raises:
        ValueError: the logits are not valid, or a number is out of range.
    """
    check_shape(temperature, top_k, active)
    private, public = private_logits, public_logits
    spare = tokens is not None
    if tokens is None:
        private, public = ensemble_logits(private, public)
    vocab = public.shape[-1]
    speaking = min(active or vocab, vocab) if tokens is None else tokens.shape[1]
    support = min(top_k or vocab, vocab)
    kept = min(support, speaking)
    rest = None
    if kept < vocab:
        _sums(public, public.argmax(-1), "public_logits")  # for its errors
        whole = public
        if tokens is None or kept < speaking:
            private, tokens = _cut(private, whole, tokens, kept)
        public = whole.gather(1, tokens)
        if kept < support:
            rest = whole.clone()
            if support < vocab:
                top = likeliest(whole, support)
                rest.fill_(-math.inf).scatter_(1, top, whole.gather(1, top))
            rest.scatter_(1, tokens, -math.inf)
    if temperature != 1.0:  # this copy is counted in `answer_bytes`
        private, public = (rows.to(torch.float32, copy=True) for rows in (private, public))
        rest = None if rest is None else rest.float()
    cut = tokens is not None or temperature != 1.0
    if cut:
        shift = _shift(public.amax(-1, keepdim=True), temperature)
        public = _divided(public, shift, temperature)
        rest = None if rest is None else _divided(rest, shift, temperature)
    low = _below_floor(private, public, rest)
    if low is not None:
        if rest is None and bool((low & ~public.isneginf()).any()):
            rest = public.new_full((len(public), vocab), -math.inf)
        if rest is not None:
            ids = torch.arange(vocab, device=low.device) if tokens is None else tokens
            ids = ids.expand(low.shape)
            rest = rest.scatter(1, ids, torch.where(low, public, rest.gather(1, ids)))
        private, public = (rows.masked_fill(low, -math.inf) for rows in (private, public))
    lse = None if rest is None else rest.double().logsumexp(-1)
    if not cut and low is None:
        return ShapedLogits(private, public, tokens, vocab, rest, lse)
    spare = spare and private is private_logits
    if rest is not None and temperature == 1.0:  # these sums are needed anyway
        sums = near_log_sum_exp(private, public.argmax(-1))
        if bool((sums.abs() < LARGEST / 2).all()):  # then so are the largest logits
            return ShapedLogits(private, public, tokens, vocab, rest, lse, spare, sums)
    largest = private.amax(-1, keepdim=True)
    if cut or rest is not None:  # public reasons alone: a shift changes the bits of other rows
        private = _divided(private, _shift(largest, temperature), temperature)
    silent = largest.isneginf()
    private = torch.where(silent, public, private) if bool(silent.any()) else private
    spare = spare and private is private_logits
    return ShapedLogits(private, public, tokens, vocab, rest, lse, spare)


def _sums(logits: Tensor, likely: Tensor, name: str) -> Tensor:
    """Return a log-sum-exp for every row that depends on this row and a likely column alone.

    Args:
        logits: (B, k) or (N, B, k).
        likely: (B,) int64, a column that is likely in the rows of a position.
        name: name of the logits, for errors.

    Raises:
        ValueError: a row has NaN, +inf or no finite logit.
    """
    sums = near_log_sum_exp(logits, likely)
    lost = sums.isnan()
    return torch.where(lost, log_sum_exp(logits, name)[0], sums) if bool(lost.any()) else sums


def _cut(
    private: Tensor, public: Tensor, tokens: Tensor | None, kept: int
) -> tuple[Tensor, Tensor]:
    """Return the private logits of the `kept` likeliest tokens, and these tokens.

    Args:
        private: (N, B, k) logits.
        public: (B, V) logits.
        tokens: (B, k), the tokens of the private columns; None for all.
        kept: at most k.
    """
    among = public if tokens is None else public.gather(1, tokens)
    places = likeliest(among, kept)
    logits = private.gather(2, places.expand(len(private), -1, -1))
    return logits, places if tokens is None else tokens.gather(1, places)


def _below_floor(private: Tensor, public: Tensor, rest: Tensor | None) -> Tensor | None:
    """Return (B, k) bool, the columns below the floor; None if no row says anything about them.

    Args:
        private: (N, B, k) logits, of which −inf alone counts here.
        public: (B, k) logits at the temperature.
        rest: (B, V) public logits of the tokens without a column; None if there are none.
    """
    # A superset, found without a sum, mostly what is masked everywhere.
    largest = public.amax(-1, keepdim=True).float()
    low = public < largest + (LEAST_PUBLIC + math.log(MOST_TOKENS))
    positions, columns = low.nonzero(as_tuple=True)
    unsaid = bool(public[positions, columns].isneginf().all())
    if unsaid and bool(private[:, positions, columns].isneginf().all()):
        return None
    lse = public.double().logsumexp(-1, keepdim=True)
    if rest is not None:
        lse = lse.logaddexp(rest.double().logsumexp(-1, keepdim=True))
    return public < lse + LEAST_PUBLIC


def _shift(largest: Tensor, temperature: float) -> Tensor:
    """Return what to subtract from rows before they are divided.

    That is the largest logit if it would lie beyond ±`LARGEST`, else 0, also for rows with NaN,
    +inf or no finite logit.
    """
    far = largest.isfinite() & ((largest / temperature).abs() > LARGEST)
    return torch.where(far, largest, 0.0)


def _divided(logits: Tensor, shift: Tensor, temperature: float) -> Tensor:
    """Return rows less their shift and divided; in place if there is a temperature.

    A result too small for the dtype becomes -inf; its probability is 0 in any case.
    """
    if temperature != 1.0:  # the rows were copied
        return logits.sub_(shift).div_(temperature)
    return logits - shift if bool(shift.any()) else logits


def answer_bytes(
    rows: int,
    vocab_size: int,
    element: int,
    active: int | None,
    *,
    temperature: float,
    top_k: int | None,
) -> int:
    """Return the largest number of bytes that one answer holds in addition to its logits.

    These are copies of the rows, which are an ensemble's and have the active tokens alone, with
    the tail; and a pool's log-weights, the probabilities and the data of the draw, four times
    float64 for every column.

    Args:
        rows: N + 1.
        vocab_size: V.
        element: bytes of a logit.
        active, temperature, top_k: as in :func:`shaped`.
    """
    support = min(vocab_size, top_k or vocab_size)
    speaking = min(vocab_size, active or vocab_size)
    kept = min(support, speaking)
    copied = (element if kept < speaking else 0) + (4 if temperature != 1.0 else 0)
    if kept == support:
        return rows * kept * copied + 32 * kept
    # In fp32 the tail takes a free column of the ensemble's own rows.
    tail = 4 if copied or element < 4 else 0
    return rows * (kept + 1) * (copied + tail) + 12 * vocab_size + 32 * (kept + 1)
