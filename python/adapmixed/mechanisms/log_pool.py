"""ClippedLogPool: the logarithmic pool of clipped log-ratios."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms.base import Mechanism, Proposal, Retirement, proposal
from adapmixed.mechanisms.checks import check_count, check_number
from adapmixed.mechanisms.law import Law, public_below
from adapmixed.mechanisms.public_rules import check_rules, restrict, unsure
from adapmixed.privacy.bounded_range import individual_rho
from adapmixed.privacy.events import (
    BoundedRangeAnswer,
    Event,
    IndividualCharge,
    PublicAnswer,
)
from adapmixed.ranks import ALONE, Ranks
from adapmixed_ext import RandomSource

_MOST_DEPTH = 600.0  # of log p/q: tokens from q = e^-100 on are still the pool's


@dataclass(frozen=True)
class ClippedLogPool(Mechanism):
    """p(v) ∝ q(v) exp((κ/N) Σ_i clip(log p_i(v)/q(v), a, b)): a fixed, publishable (ε, δ).

    With one slot emptied log p changes within a range of κ(b−a)/N, which bounds every Rényi
    divergence (zCDP; docs/privacy.md, section 12). With one model less it changes within the same
    range where N is a public constant, else within twice that, since N is then one less, too.

    Attributes:
        lower: a ≤ 0, in log units.
        upper: b ≥ 0, in log units.
        scale: κ ≥ 0; above 1 it sharpens what the shards agree on.
        queries: T ≥ 1, how many queries the guarantee is planned for, all charged with the first;
            None: every query is charged as it comes, their number being fixed beforehand, or a
            filter decides.
        top_k, sure_above: as in ClippedMixing.
        num_models: N, a public constant, whichever models are there: at least their number, and a
            slot without a model has u_i = 0. Fixed without looking at private data. None: N is the
            number of models that are there.
    """

    name: ClassVar[str] = "clipped-log-pool"

    lower: float
    upper: float
    scale: float = 1.0
    queries: int | None = None
    top_k: int | None = None
    sure_above: float | None = None
    num_models: int | None = None

    def __post_init__(self) -> None:
        check_number("lower", self.lower, least=-1e6, most=0.0)
        check_number("upper", self.upper, least=0.0, most=1e6)
        check_number("scale", self.scale, least=0.0)
        check_count("queries", self.queries, optional=True)
        if self.scale * (self.upper - self.lower) > _MOST_DEPTH:
            raise ValueError(
                f"scale * (upper - lower) must be <= {_MOST_DEPTH:g}, got {self.scale!r} * "
                f"{self.upper - self.lower!r}: tokens may be lost where doubles end"
            )
        check_rules(self.top_k, self.sure_above)
        check_count("num_models", self.num_models, optional=True)

    def __repr__(self) -> str:
        """Ledgers and results that were begun before there was `num_models` go on without it."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.num_models is None:
            del values["num_models"]
        listed = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"{type(self).__name__}({listed})"

    @property
    def budget(self) -> int | None:
        """T, the queries that the guarantee is planned for."""
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
        """See :meth:`Mechanism.propose`; charges are zCDP ρ, (models, B, 1), rounded up.

        Raises:
            ValueError: there are more models than num_models.
        """
        kept = restrict(private_logits, public_logits, self.top_k, ranks)
        private, public = kept.private_logits, kept.public_logits
        models, positions = ranks.slots(len(private)), len(public)
        rare = public_below(-self.scale * (self.upper - self.lower))
        divisor = self._divisor(models)
        pool = ops.log_pool(
            private, public, lower=self.lower, upper=self.upper, scale=self.scale,
            num_models=divisor,
        ).check()  # fmt: skip
        asked = ranks.same(unsure(public, pool.public_lse, self.sure_above))
        span = ranks.gather(pool.span).cpu().numpy()
        rho = individual_rho(span, self.scale, self.lower, self.upper, divisor)
        charges = torch.where(asked.cpu().unsqueeze(1), torch.from_numpy(rho).unsqueeze(-1), 0.0)

        def law(active: Tensor) -> Law:
            chosen = ranks.rows(active & asked)
            if not ranks.alone:  # the other ranks' part comes with the answer
                mine = replace(pool, active=chosen)
                return Law(
                    private, public, mine, kept=kept, ranks=ranks, slots=divisor, public_below=rare
                )
            if bool(chosen.all()):
                return Law(private, public, pool, kept=kept, public_below=rare)
            restricted = ops.log_pool(
                private, public, lower=self.lower, upper=self.upper, scale=self.scale,
                num_models=divisor, active=chosen,
            )  # fmt: skip
            return Law(private, public, restricted, kept=kept, public_below=rare)

        def charged(active: Tensor) -> Sequence[Event]:
            amount = torch.where(active.cpu(), charges[..., 0], 0.0).numpy()
            return [IndividualCharge("zcdp", None, amount)]

        every = torch.ones(models, positions, dtype=torch.bool, device=public.device)
        answered = int(asked.sum())
        setting = (self.scale, self.lower, self.upper, divisor)
        constant = self.num_models is not None
        events: list[Event] = [
            BoundedRangeAnswer(*setting, answered, self.queries, constant_models=constant),
            PublicAnswer(positions - answered),
        ]
        return proposal(
            law(every), public_logits, models, ~asked, events, targets, rng, charges,
            Retirement(law, charged), ranks=ranks,
        )  # fmt: skip

    def _divisor(self, models: int) -> int:
        """N, by which the sum over the models that are there is divided."""
        if self.num_models is None:
            return models
        if models > self.num_models:
            raise ValueError(
                f"num_models must be at least the number of models that are there, {models}, got "
                f"{self.num_models}"
            )
        return self.num_models
