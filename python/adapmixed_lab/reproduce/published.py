"""The paper's own analysis, to reproduce its numbers: no guarantee (docs/theory/errata.md).

`FixedLoss` alone is sound: PMixED with a given β.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import scipy  # it loads scipy.special and scipy.stats on their first use
import torch

import adapmixed_ext as ops
from adapmixed.limits import check_count, check_number, check_optional_count
from adapmixed.mechanisms import AdaPMixED, NextToken, PMixED, ShapedLogits
from adapmixed.mechanisms.mechanism import public_token
from adapmixed.privacy import GaussianScreening, LeaveOneOutLoss, RenyiBound
from adapmixed.privacy.costs import sound_bound
from adapmixed_ext.types import RandomSource
from adapmixed_lab.audit.search import last
from adapmixed_lab.baselines import GivenToken, unprotected


def published_bound(order: float, target_leakage: float, num_models: int) -> float:
    """Return the paper's data-independent bound, log((N-1+e^{4βα(α-1)})/N)/(α-1). NOT VALID.

    Its triangle-like lemma needs Rényi bounds at every order, but the projection gives one. The
    true add/remove loss can exceed this value without limit (docs/theory/errata.md). Use it only to
    reproduce published numbers. For N = 1 it is βα.
    """
    check_number("order", order, above=1.0)
    check_number("target_leakage", target_leakage, least=0.0, infinite=True)
    check_count("num_models", num_models, 1)
    return sound_bound(order, (4 if num_models > 1 else 1) * target_leakage * order, num_models)


@lru_cache(maxsize=4096)
def published_target_leakage(
    order: float, epsilon: float, models: int, sample_rate: float = 1.0
) -> float:
    """Return the paper's β of a per-query budget (Algorithm 2, line 3; eq. opt_beta). NOT VALID.

    This is the largest β, by bisection, such that `published_bound` is at most `epsilon`. If
    `sample_rate` < 1, the bound is first amplified by `subsampled_rdp`.

    Args:
        order: α > 1; an integer >= 2 if `sample_rate` < 1.
        epsilon: ε_G / T, finite and >= 0.
        models: N, or the size |S_t| >= 1 of the drawn subset.
        sample_rate: in (0, 1].
    """
    check_number("epsilon", epsilon, least=0.0)
    check_number("sample_rate", sample_rate, above=0.0, most=1.0)
    if sample_rate < 1 and order != int(order):
        raise ValueError(f"order must be an integer with sample_rate < 1, got {order!r}")

    def admissible(beta: float) -> bool:
        if sample_rate == 1:
            return published_bound(order, beta, models) <= epsilon
        bounds = [published_bound(k, beta, models) for k in range(2, int(order) + 1)]
        return subsampled_rdp(sample_rate, bounds) <= epsilon

    return last(admissible)


def subsampled_rdp(rate: float, costs: Sequence[float]) -> float:
    """Return the cost under Poisson subsampling at the last order (the paper's eq. subsam_eps).

    Why the ball does not give what it needs: docs/theory/errata.md, "The subsampling formula is
    given too little".

    ε'(α) = log((1-s)^{α-1}(1+(α-1)s) + Σ_{k=2}^α C(α,k)(1-s)^{α-k} s^k e^{(k-1)ε(k)}) / (α-1)

    The binomial weights sum to 1, so this is log1p of the same sum over k >= 2 with expm1 in place
    of exp. Small costs then do not cancel. The sum is formed from logarithms and does not overflow.

    Args:
        rate: s in [0, 1].
        costs: ε(k) >= 0 for k = 2, ..., α. The mechanism must satisfy (k, ε(k))-RDP at every one of
            these orders, not only at the last.
    """
    order = len(costs) + 1
    k = np.arange(2, order + 1)
    grown = (k - 1) * np.asarray(costs, dtype=np.float64)
    with np.errstate(divide="ignore"):  # a cost of 0 has no weight
        logs = scipy.stats.binom.logpmf(k, order, rate) + grown + np.log(-np.expm1(-grown))
    return float(np.logaddexp(0.0, scipy.special.logsumexp(logs)) / (order - 1))


@dataclass(frozen=True)
class PublishedPMixED(PMixED):
    """PMixED by the paper's rule: β from |S_t|, amplification by equation 4, integer order.

    Its bound is not valid: the true loss can exceed it without limit, as its guarantee says. The
    members that take part are drawn (Algorithm 2, lines 2-8), and the mean is over them alone.

    Attributes are as in PMixED; `order` must be an integer if `sample_rate` < 1.

    Attributes:
        sample_rate: s in (0, 1], probability that a member takes part in a query.
    """

    name: ClassVar[str] = "pmixed-published"

    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.radius(1)  # checks the rate, and the order with it

    def radius(self, num_models: int) -> float:
        """Return R = βα for a subset of this size."""
        beta = published_target_leakage(self.order, self.per_query, num_models, self.sample_rate)
        return beta * self.order

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        models, positions = rows.private.shape[:2]
        event = RenyiBound(
            self.order, self.per_query, models, positions, published=True, budget=self.queries
        )
        if self.sample_rate == 1.0 or not positions:
            return NextToken(rows, self._projection(rows, models), (event,))
        # One draw for each position, so that subsets do not depend on the grouping into calls.
        draws = [ops.gaussian(models, sigma=1.0, rng=rng) for _ in range(positions)]
        taken = (torch.special.ndtr(torch.stack(draws, 1)) < self.sample_rate).to(
            rows.public.device
        )
        sizes, q = taken.sum(0), public_token(rows).probabilities()
        shares = q.clone()
        for size in filter(None, sizes.unique().tolist()):
            # The mean over all with weight 0 for the others is |S|/N of the subset's, the rest q.
            projection = self._projection(rows, size)
            projection = replace(projection, weight=projection.weight.where(taken, 0.0))
            mixed = ops.mixture(rows.private, rows.public, projection)
            of_subset = (models * mixed - (models - size) * q) / size
            shares[sizes == size] = of_subset.clamp(min=0.0)[sizes == size]
        return GivenToken(rows, unprotected(rows)[1], (event,), given=shares)

    def _projection(self, rows: ShapedLogits, size: int) -> ops.Projection:
        """Return the projection of all members onto the ball for a subset of this size."""
        return ops.project(rows.private, rows.public, order=self.order, radius=self.radius(size))


@dataclass(frozen=True)
class PaperRule(AdaPMixED):
    """AdaPMixED charged by the paper's rule, Σ_t max_i of the losses, at one order.

    The first members of an ensemble give many sizes from one forward pass. Shards keep their size,
    so a smaller ensemble has seen less text. The paper distributes all text over fewer and larger
    shards instead.

    Attributes are as in AdaPMixED.

    Attributes:
        count: number of members that answer, the first ones, and the N of the costs; None: all.
    """

    count: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optional_count("count", self.count)
        if len(self.loss_orders) > 1:
            raise ValueError(
                f"loss_orders must be one order, got {self.loss_orders!r}, because the paper's "
                "rule has no more"
            )

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        if self.count is not None:
            if len(rows.private) < self.count:
                raise ValueError(
                    f"count must be at most the ensemble's {len(rows.private)} models, got "
                    f"{self.count}"
                )
            rows = replace(rows, private=rows.private[: self.count])
        prepared = super()._prepare(rows, rng)
        events = tuple(
            replace(event, loss=np.broadcast_to(event.loss.max(0), event.loss.shape).copy())
            if isinstance(event, LeaveOneOutLoss)
            else event
            for event in prepared.events
        )
        return replace(prepared, events=events)


@dataclass(frozen=True)
class FixedLoss(AdaPMixED):
    """AdaPMixED's answers at PMixED's sound, fixed price under zero-out; screened or not.

    Every query is charged, since a charge that follows the screening's outcome is not fixed.
    Attributes are as in AdaPMixED.
    """

    no_replacement: ClassVar[str] = ""

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        prepared, (models, positions) = super()._prepare(rows, rng), rows.private.shape[:2]
        bound = sound_bound(self.order, self.radius, models)
        screening = tuple(cost for cost in prepared.events if isinstance(cost, GaussianScreening))
        event = RenyiBound(self.order, bound, models, positions)
        return replace(prepared, events=(*screening, event), losses=None)
