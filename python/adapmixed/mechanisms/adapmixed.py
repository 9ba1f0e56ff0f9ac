"""AdaPMixED: noisy screening, projection onto a Rényi ball, data-dependent loss (Algorithm 1)."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms.base import Mechanism, Proposal, proposal
from adapmixed.mechanisms.checks import check_count, check_number, check_option
from adapmixed.mechanisms.law import Law
from adapmixed.mechanisms.spread import mean_ratio, screened_elsewhere
from adapmixed.privacy.ball_bounds import sound_bound
from adapmixed.privacy.events import (
    Event,
    GaussianScreening,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
)
from adapmixed.ranks import ALONE, Ranks
from adapmixed_ext import RandomSource
from adapmixed_ext.ops import Inputs, project_inputs
from adapmixed_ext.screening import screen_prepared

MAX_ORDERS = 32
Screen = Literal["noisy", "public"]
Loss = Literal["data-dependent", "fixed"]


@dataclass(frozen=True)
class AdaPMixED(Mechanism):
    """Algorithm 1 of the paper, its ablations as options.

    Attributes:
        order: Rényi order α > 1 of the ball, the screening and the loss.
        target_leakage: β ≥ 0; the ball has radius R = βα.
        screen: "noisy" (the paper), "public" (the same noised test with q in place of the mixture:
            no private value, no cost), or None.
        screen_weight: λ_s in [0, 1], weight of the private models in the screened mixture.
        sigma: standard deviation of the screening noise, > 0.
        threshold: T_s ≥ 0 in nats; a query whose divergence is above it is answered from q.
        top_k: number of public top tokens that are screened, ≥ 1.
        loss: "data-dependent" (the realised loss of every model, an ex-post statement) or "fixed"
            (the sound data-independent bound, zero-out, charged for every query: a charge that
            followed the screening's outcome would not be fixed).
        loss_orders: the orders at which losses are recorded, public and fixed beforehand; the
            accountant splits δ over them. Default: `order` alone, as in the paper.
        adjacency: "add_remove" (the paper; default of the data-dependent loss) or "zero_out" (the
            only one of the fixed loss).
    """

    name: ClassVar[str] = "adapmixed"

    order: float
    target_leakage: float
    screen: Screen | None = "noisy"
    screen_weight: float = 1e-4
    sigma: float = 1e-2
    threshold: float = 4.5
    top_k: int = 60
    loss: Loss = "data-dependent"
    loss_orders: tuple[float, ...] = ()
    adjacency: Literal["add_remove", "zero_out"] | None = None
    _orders: tuple[float, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        check_number("order", self.order, above=1.0)
        check_number("target_leakage", self.target_leakage, least=0.0)
        if self.screen not in ("noisy", "public", None):
            raise ValueError(
                f"screen must be one of ('noisy', 'public', None), got {self.screen!r}; noise is "
                "added before re-scaling: after it the stated sensitivity, √2 λ_s/N, would be too "
                "small by the mass of the screened tokens"
            )
        check_option("loss", self.loss, ("data-dependent", "fixed"))
        check_option("adjacency", self.adjacency, ("add_remove", "zero_out", None))
        check_number("screen_weight", self.screen_weight, least=0.0, most=1.0)
        check_number("sigma", self.sigma, above=0.0)
        check_number("threshold", self.threshold, least=0.0, infinite=True)
        check_count("top_k", self.top_k)
        if not isinstance(self.loss_orders, tuple):
            raise ValueError(f"loss_orders must be a tuple of orders, got {self.loss_orders!r}")
        for order in self.loss_orders:
            check_number("loss_orders", order, above=1.0)
        distinct = len(set(self.loss_orders)) == len(self.loss_orders)
        if not distinct or len(self.loss_orders) > MAX_ORDERS:
            raise ValueError(
                f"loss_orders must be at most {MAX_ORDERS} distinct orders, got "
                f"{self.loss_orders!r}"
            )
        if self.loss == "fixed" and self.loss_orders:
            raise ValueError(
                f"loss_orders must be empty with loss='fixed', got {self.loss_orders!r}: the "
                "fixed bound holds at the order of the ball alone"
            )
        if self.loss == "fixed" and self.adjacency == "add_remove":
            raise ValueError(
                "adjacency must be 'zero_out' with loss='fixed', got 'add_remove': the fixed bound "
                "is proved for zero-out alone"
            )
        if self.adjacency is None:
            default = "zero_out" if self.loss == "fixed" else "add_remove"
            object.__setattr__(self, "adjacency", default)
        object.__setattr__(self, "_orders", self.loss_orders or (float(self.order),))

    @property
    def radius(self) -> float:
        """R = βα in nats."""
        return self.target_leakage * self.order

    @classmethod
    def preset(cls, name: str) -> "AdaPMixED":
        """The paper's settings for a data set (its table of privacy parameters).

        Args:
            name: "wikitext-103", "one-billion-word", "pubmed" or "air-dialogue".
        """
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
        return PRESETS[name]

    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        targets: Tensor | None = None,
        rng: RandomSource,
        ranks: Ranks = ALONE,
    ) -> Proposal:
        """See :meth:`Mechanism.propose`; lines 1–18 of Algorithm 1 without the draws."""
        # First, since it also gives the log-sum-exps that the screening needs.
        inputs, projection = project_inputs(
            private_logits, public_logits, order=self.order, radius=self.radius
        )
        models, positions = ranks.slots(len(inputs.private)), len(inputs.public)
        events: list[Event] = []
        passed = torch.ones(positions, dtype=torch.bool, device=inputs.public.device)
        if self.screen is not None:
            passed = self._screened(inputs, rng, ranks)
            if self.screen == "noisy":
                events.append(GaussianScreening(models, positions, self.screen_weight, self.sigma))
        if not bool(passed.all()):
            # Line 8: answered from q, so every slot has weight 0 there.
            projection = ops.Projection(
                torch.where(passed, projection.weight, 0.0),
                torch.where(passed, projection.complement, 1.0),
                *inputs[2:],
            )
        charges = ratio = None
        slots = models if ranks.summed else None
        if self.loss == "fixed":
            bound = sound_bound(self.order, self.radius, models)
            events.append(RenyiBound(self.order, bound, models, positions, "zero_out"))
        else:
            assert self.adjacency is not None  # set in __post_init__
            if slots is not None:
                ratio = mean_ratio(inputs, projection, ranks, slots)
            losses = ops.leave_one_out(
                inputs.private,
                inputs.public,
                projection,
                orders=self._orders,
                adjacency=self.adjacency,
                num_models=slots,
                mean_excess=None if ratio is None else ratio - 1.0,
            )
            charges = ranks.gather(losses)
            # An event also when nothing passed: the order was fixed beforehand, not by the outcome.
            answered = charges[:, passed].cpu().numpy()
            events.append(LeaveOneOutLoss(self._orders, answered, self.adjacency, ops.loss_error))
            events.append(PublicAnswer(positions - answered.shape[1]))
        law = Law(inputs.private, inputs.public, projection, ranks=ranks, slots=slots, ratio=ratio)
        return proposal(
            law, inputs.public, models, ~passed, events, targets, rng, charges, ranks=ranks
        )

    def _screened(self, inputs: Inputs, rng: RandomSource, ranks: Ranks) -> Tensor:
        """Lines 1–8: (B,) bool, True where the query goes on to the private models."""
        positions, vocab = inputs.public.shape
        top_k = min(self.top_k, vocab)
        weight = self.screen_weight if self.screen == "noisy" else 0.0
        models, device = ranks.slots(len(inputs.private)), inputs.public.device
        elsewhere = screened_elsewhere(inputs, top_k, weight, models, ranks)

        def tested() -> Tensor:
            # One draw a position: decisions do not depend on how positions are grouped into calls.
            noise = torch.empty(positions, top_k, dtype=torch.float64)
            for position in range(positions):
                noise[position] = ops.gaussian(top_k, sigma=self.sigma, rng=rng)
            added = noise.to(device)
            result = screen_prepared(
                inputs,
                added if elsewhere is None else added + elsewhere,
                weight=weight,
                order=self.order,
                threshold=self.threshold,
                top_k=top_k,
                num_models=models,
            )
            return result.check().passed

        return ranks.decide(tested, (positions,), torch.bool, device)


def _paper(order: float, beta: float, sigma: float, weight: float) -> AdaPMixED:
    return AdaPMixED(
        order=order,
        target_leakage=beta,
        screen_weight=weight,
        sigma=sigma,
        threshold=4.5,
        top_k=60,
    )


# The paper's table of privacy parameters; N is 100 except 80 for one-billion-word.
PRESETS = {
    "wikitext-103": _paper(18.0, 0.2, 1e-2, 1e-4),
    "one-billion-word": _paper(18.0, 0.2, 1e-2, 1e-4),
    "pubmed": _paper(15.0, 0.3, 1e-1, 1e-3),
    "air-dialogue": _paper(15.0, 0.3, 1e-2, 1e-4),
}
