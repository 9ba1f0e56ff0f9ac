"""ClippedMixing: the mean of distributions clipped to a density-ratio box around q."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms.base import Mechanism, Proposal, Retirement, proposal
from adapmixed.mechanisms.checks import check_count, check_number
from adapmixed.mechanisms.law import Law, public_below
from adapmixed.mechanisms.public_rules import check_rules, restrict, unsure
from adapmixed.privacy.events import (
    LOSS_ABSOLUTE_ERROR,
    ClippedAnswer,
    Event,
    IndividualCharge,
    PublicAnswer,
)
from adapmixed.privacy.law_rounding import LEAST_LOWER, MAX_VOCABULARY, charge_rounding
from adapmixed.ranks import ALONE, Ranks
from adapmixed_ext import RandomSource


@dataclass(frozen=True)
class ClippedMixing(Mechanism):
    """p = (1/N) Σ_i p̄_i, p̄_i = clip(s_i p_i, c q, C q) summing to 1: a fixed, publishable (ε, δ).

    The guarantee is that of a dominating pair, composed for a number of queries that is fixed
    beforehand (`queries`), or that of a per-model filter (`charge_order`), under which the box may
    even depend on earlier answers (docs/privacy.md).

    Attributes:
        lower: c in [0, 1], the least ratio p̄_i/q; with charge_order at least 1e-30.
        upper: C in [1, 1e60], the largest.
        queries: T ≥ 1, how many queries the fixed guarantee is for; None with a filter.
        charge_order: Rényi order α > 1 of the filter's charges; None without a filter.
        top_k: restricts every distribution to the k ≥ 1 likeliest public tokens; None: all.
        sure_above: a query whose likeliest public token has a larger probability is answered from
            q and costs nothing; None: never.
    """

    name: ClassVar[str] = "clipped-mixing"

    lower: float
    upper: float
    queries: int | None = None
    charge_order: float | None = None
    top_k: int | None = None
    sure_above: float | None = None

    def __post_init__(self) -> None:
        check_number(
            "lower", self.lower, least=0.0 if self.charge_order is None else LEAST_LOWER, most=1.0
        )
        check_number("upper", self.upper, least=1.0, most=1e60)
        check_count("queries", self.queries, optional=True)
        if self.charge_order is not None:
            check_number("charge_order", self.charge_order, above=1.0)
        check_rules(self.top_k, self.sure_above)

    @property
    def budget(self) -> int | None:
        """T, the queries that the fixed guarantee is for."""
        return self.queries

    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        targets: Tensor | None = None,
        rng: RandomSource,
        ranks: Ranks = ALONE,
    ) -> Proposal:
        """See :meth:`Mechanism.propose`; charges are (N, B, 1), inflated by their error.

        Raises:
            ValueError: as there; more than 2^20 tokens: no rounding is proved for them.
        """
        kept = restrict(private_logits, public_logits, self.top_k, ranks)
        private, public = kept.private_logits, kept.public_logits
        if public.shape[-1] > MAX_VOCABULARY:
            raise ValueError(
                f"public_logits must have at most {MAX_VOCABULARY} tokens, for which the rounding "
                f"of the rows' sums is accounted, got {public.shape[-1]}"
            )
        rare = public_below(math.log(self.lower)) if self.lower >= LEAST_LOWER else -math.inf
        models, positions = ranks.slots(len(private)), len(public)
        clipping = ops.clip_project(
            private, public, lower=self.lower, upper=self.upper, orders=self.charge_order,
            num_models=models,
        ).check()  # fmt: skip
        asked = ranks.same(unsure(public, clipping.public_lse, self.sure_above))
        charges, takes_part = None, asked
        if clipping.charge is not None and self.charge_order is not None:
            # Also where a row is q itself: the pool of the others is rounded, too.
            charge = ranks.gather(clipping.charge)
            relative, absolute = charge_rounding(float(self.charge_order), models)
            inflated = charge * ((1.0 + ops.loss_error) * (1.0 + relative))
            inflated += LOSS_ABSOLUTE_ERROR + absolute
            charges = torch.where(asked.unsqueeze(1), inflated, 0.0)
            # A row of charge 0, an emptied shard's, answers q by the same bits as a retired slot.
            takes_part = asked & (charge[..., 0] > 0)

        def law(active: Tensor) -> Law:
            chosen = replace(clipping, active=ranks.rows(active & takes_part))
            slots = None if ranks.alone else models
            return Law(
                private, public, chosen, kept=kept, ranks=ranks, slots=slots, public_below=rare
            )

        def charged(active: Tensor) -> Sequence[Event]:
            if charges is None or self.charge_order is None:
                raise ValueError(
                    "active must be None without charge_order, got a mask: a filter needs charges"
                )
            amount = torch.where(active, charges[..., 0], 0.0).cpu().numpy()
            return [IndividualCharge("renyi", float(self.charge_order), amount)]

        every = torch.ones(models, positions, dtype=torch.bool, device=public.device)
        answered = int(asked.sum())
        events: list[Event] = [
            ClippedAnswer(self.lower, self.upper, models, answered, self.queries),
            PublicAnswer(positions - answered),
        ]
        return proposal(
            law(every), public_logits, models, ~asked, events, targets, rng, charges,
            Retirement(law, charged), ranks=ranks,
        )  # fmt: skip
