"""The distribution that a proposal releases a draw of."""

from dataclasses import dataclass

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms import spread
from adapmixed.mechanisms.public_rules import Restricted
from adapmixed.ranks import ALONE, Ranks
from adapmixed_ext import RandomSource
from adapmixed_ext.ops import prepare

# Doubles keep their relative precision down to e^-708.
_LEAST_LOG_PROBABILITY = -700.0


def public_below(least_log_ratio: float) -> float:
    """log q below which a law with p/q >= e^least_log_ratio is q itself: a public rule.

    Elsewhere p >= e^-700, so that what is drawn is p but for a few units in the last place
    (docs/privacy.md, section 8).
    """
    return _LEAST_LOG_PROBABILITY - least_log_ratio


@dataclass(frozen=True)
class Law:
    """The distribution an answer is drawn from: the mixture, or pool, of projected rows.

    Where the ensemble is spread over ranks, all of them ask together and get the same answer.
    """

    private_logits: Tensor
    public_logits: Tensor
    projection: ops.Projection | ops.Clipping | ops.LogPool
    public_support: bool = True  # else tokens that q lacks may be drawn too
    kept: Restricted | None = None  # where these logits are of some tokens alone: which
    ranks: Ranks = ALONE
    slots: int | None = None  # the divisor N, where other rows are on other ranks; None: all here
    ratio: Tensor | None = None  # (B, V) float64, p/q, where it is known already
    public_below: float = -torch.inf  # tokens with a lower log q are answered from q

    def __post_init__(self) -> None:
        # Where operators only queue work, nothing has said yet that a row was bad.
        self.projection.check()
        # What was charged is the law of these values: a later change in place would be another law.
        for name in ("private_logits", "public_logits"):
            logits: Tensor = getattr(self, name)
            if logits.is_inference():  # carries no counter of changes: keep a copy of our own
                object.__setattr__(self, name, logits.clone())
        object.__setattr__(self, "_versions", self._current_versions())

    def _current_versions(self) -> tuple[int, ...]:
        logits = (self.private_logits, self.public_logits)
        return tuple(0 if t.is_inference() else t._version for t in logits)

    def _check_unchanged(self) -> None:
        if self._current_versions() != self._versions:  # type: ignore[attr-defined]
            raise ValueError(
                "private_logits and public_logits must not be changed between propose and release: "
                "the charged law is that of the proposed values"
            )

    def sample(self, rng: RandomSource) -> Tensor:
        """One token per position, (B,) int64."""
        self._check_unchanged()
        probabilities = self._probabilities()
        support = self.public_logits
        if not self.public_support:
            support = torch.where(probabilities > 0.0, 0.0, -torch.inf).to(support.dtype)
        # One draw for all ranks, from a key that one of them has.
        tokens = self.ranks.decide(
            lambda: ops.sample(probabilities, support, rng=rng),
            (len(support),),
            torch.int64,
            support.device,
        )
        return tokens if self.kept is None else self.kept.released(tokens)

    def _probabilities(self) -> Tensor:
        if self.ratio is not None:
            return self._log_q().exp() * self.ratio
        mixture = spread.mixture(
            self.private_logits, self.public_logits, self.projection, self.ranks, self.slots
        )
        if self.public_below > -torch.inf:
            rare = self._answered_from_q(self.public_logits)
            if bool(rare.any()):
                mixture[rare] = self._log_q()[rare].exp()
        return mixture

    def _answered_from_q(self, public_logits: Tensor) -> Tensor:
        """Which of (B, k) logits are of tokens that are so rare in q."""
        return public_logits < (self.public_below + self.projection.public_lse).unsqueeze(-1)

    def _log_q(self) -> Tensor:
        log_q = self.public_logits.to(torch.float64, copy=True)
        return log_q.sub_(self.projection.public_lse.unsqueeze(-1))

    def likeliest(self) -> Tensor:
        """The token of largest probability, (B,) int64: for evaluation, never to be released."""
        self._check_unchanged()
        tokens = self._probabilities().argmax(-1)
        return tokens if self.kept is None else self.kept.released(tokens)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(B,) float64, −inf for a target that is not kept; the whole (B, V) is never formed."""
        self._check_unchanged()
        found = None
        if self.kept is not None:
            targets, found = self.kept.places(targets)
        if self.ratio is not None:
            log_p = self._log_q() + self.ratio.log()
            values = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
        else:
            values = spread.log_prob(
                self.private_logits,
                self.public_logits,
                self.projection,
                targets,
                self.ranks,
                self.slots,
            )
            at_target = self.public_logits.gather(1, targets.unsqueeze(1))
            log_q = at_target.squeeze(1).double() - self.projection.public_lse
            values = torch.where(self._answered_from_q(at_target).squeeze(1), log_q, values)
        return values if found is None else torch.where(found, values, -torch.inf)


@dataclass(frozen=True)
class SplitLaw:
    """One law per position, where positions differ in their members."""

    laws: tuple[Law, ...]

    def sample(self, rng: RandomSource) -> Tensor:
        """One token per position, (B,) int64."""
        tokens = [law.sample(rng) for law in self.laws]
        return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)

    def likeliest(self) -> Tensor:
        """(B,) int64; see `Law.likeliest`."""
        parts = [law.likeliest() for law in self.laws]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(B,) float64."""
        parts = [law.log_prob(targets[b : b + 1]) for b, law in enumerate(self.laws)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def public_law(public_logits: Tensor, ranks: Ranks = ALONE) -> Law:
    """q itself: the mixture of one slot of weight 0, so that no private value is read for it."""
    inputs = prepare(public_logits[None], public_logits)
    weight = torch.zeros_like(inputs.private_lse)
    projection = ops.Projection(weight, weight + 1.0, *inputs[2:])
    return Law(inputs.private, inputs.public, projection, ranks=ranks)
