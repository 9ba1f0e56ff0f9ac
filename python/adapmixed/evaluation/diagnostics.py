"""Diagnostics of single models and their weights during an evaluation.

Everything here is an unprotected function of the private data, so it is for the operator only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adapmixed.evaluation.report import Curve
from adapmixed.mechanisms import Answer, NextToken, Rows, Ticket
from adapmixed.privacy.encoding import READERS, from_json
from adapmixed_ext import Projection

BINS = 20
"""Number of bins for weights strictly between 0 and 1; weights of 0 and 1 are counted apart."""
POINTS = 64
UNPROTECTED = ("public", "unprotected")


@dataclass
class Diagnostics:
    """Running totals of one mechanism's weights, charges and losses, in O(N) memory.

    Attributes:
        queries: number of answered queries.
        screened: number of weights of screened queries, which are zero.
        sums: (4,) the bound of the utility theorem, and over queries the sums of the largest terms,
            of the losses and of the unprotected ensemble's losses.
        weights: (BINS + 2,) counts of weights of exactly 0, in bins of equal width, and of
            exactly 1; zeros for a mechanism without mixing weights for all models.
        charged: (N,) charges of single models; empty if no single model is charged. For AdaPMixED
            these are realised Rényi divergences in nats at the first order, without the price of
            screening, which all models pay. With a budget of every shard they are the charges to
            it.
        curve: its points hold the queries so far, and the charges for them.
    """

    queries: int = 0
    screened: int = 0
    sums: NDArray[np.float64] = field(default_factory=lambda: np.array([-math.inf, 0.0, 0.0, 0.0]))
    weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS + 2))
    charged: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    curve: Curve = field(default_factory=lambda: Curve(POINTS))

    def add(self, ticket: Ticket, answer: Answer, targets: Tensor) -> None:
        """Add the answers of one call.

        Args:
            ticket: the ticket of B queries, charged and released.
            answer: its answer, with log-probabilities of the targets.
            targets: (B,) int64 token ids.
        """
        self.queries += len(targets)
        found, protects = ticket._distribution, ticket.mechanism.name not in UNPROTECTED
        # Others are no mixture Σ_i [λ_i p_i + (1−λ_i) q]/N, or one over a subset of the members.
        if protects and type(found) is NextToken and isinstance(found.projection, Projection):
            self._add_mixture(found.rows, found.projection, answer, targets)
        charges = _charges(ticket)
        if charges is not None:
            self.charged = (self.charged if len(self.charged) else 0.0) + charges.sum(1)
        self.curve.add((self.queries, *self.charged))

    def _add_mixture(self, rows: Rows, sums: Projection, answer: Answer, targets: Tensor) -> None:
        places, share = rows.places(targets)
        index = places.unsqueeze(-1)
        at = rows.private.gather(2, index.expand(len(rows.private), -1, 1)).squeeze(2).double()
        own = _array(at - sums.private_lse + share)
        public = _array(rows.public.gather(1, index).squeeze(1).double() - sums.public_lse + share)
        weight = _array(sums.weight)
        largest = utility_terms(own, public, 1.0 - weight).max(0)
        ensemble = np.logaddexp.reduce(own, 0) - math.log(len(own))
        assert answer.log_prob is not None  # targets were given
        bound, terms, loss, ensemble_loss = self.sums.tolist()
        bound, terms = max(bound, float(largest.max())), _sum_up(terms, largest)
        loss -= math.fsum(answer.log_prob.tolist())
        ensemble_loss -= math.fsum(ensemble.tolist())
        self.sums = np.array([bound, terms, loss, ensemble_loss])
        self.weights = self.weights + np.bincount(_bins(weight).ravel(), minlength=BINS + 2)
        self.screened += len(own) * int(answer.public.sum())

    @property
    def utility(self) -> dict[str, float | None] | None:
        """The paper's utility theorem (label util_analysis) on the answered queries, in nats.

        Let λ_j,t be the mixing weight of model j in query t, and p̄ = Σ_j p_j / N the unprotected
        ensemble. The theorem says that the answers' mean negative log-likelihood, "loss", exceeds
        that of p̄, "ensemble_loss", by at most max_t max_j (1 − λ_j,t) log(p_j(x_t)/p_0(x_t)), the
        "bound". Its proof bounds every query by that query's largest term, so the mean of these
        terms is a bound, too, "mean_bound". "gap" is the left side, loss − ensemble_loss, or None
        if both are infinite. None for a mechanism without mixing weights for all models.
        """
        if not self.weights.any():
            return None
        bound, *sums = self.sums.tolist()
        mean_bound, loss, ensemble_loss = (one / self.queries for one in sums)
        gap = None if math.isinf(loss) and math.isinf(ensemble_loss) else loss - ensemble_loss
        told = {"bound": bound, "mean_bound": mean_bound, "loss": loss}
        return told | {"ensemble_loss": ensemble_loss, "gap": gap}

    @property
    def charges(self) -> list[tuple[int, list[float]]]:
        """(queries so far, each model's charges for them), at most 65 points, the last at the end.

        Empty if no single model is charged.
        """
        return [(int(done), kept) for done, *kept in self.curve.all().tolist() if kept]

    def report(self) -> dict[str, Any]:
        """Return the entry of report.json, in nats and counts; infinities are still floats."""
        utility, (zero, *bins, one) = self.utility, map(int, self.weights.tolist())
        weights = {"zero": zero, "screened": self.screened, "bins": bins, "one": one}
        told = {"utility": utility, "weights": None if utility is None else weights}
        return told | {"charges": self.charges}


def utility_terms(
    own: NDArray[np.float64], public: NDArray[np.float64], complement: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the terms of the paper's theorem util_analysis, (N, B), in nats.

    A term is (1 − λ_j) log(p_j(x_t)/p_0(x_t)). If p_j = 0 it is −inf, even if λ_j = 1 or p_0 = 0,
    because such a model adds nothing to the ensemble's probability of the token. Otherwise λ_j = 1
    gives 0, even if p_0 = 0, and p_0 = 0 with λ_j < 1 gives +inf. With these values the theorem
    holds wherever its left side is defined.

    Args:
        own: (N, B) log p_j(x_t).
        public: (B,) log p_0(x_t).
        complement: (N, B) 1 − λ_j.
    """
    with np.errstate(invalid="ignore"):
        terms = complement * (own - public)
    terms = np.where(complement == 0.0, 0.0, terms)
    return np.where(np.isneginf(own), -np.inf, terms)


def _charges(ticket: Ticket) -> NDArray[np.float64] | None:
    """Return the charges of single models at the first order, (N, B), or None."""
    prepared, active = ticket._proposed, ticket._active
    if prepared.losses is not None:
        realised: NDArray[np.float64] = _array(prepared.losses[..., 0])
        return realised
    if prepared.charges is None or active is None:  # the guarantee is fixed for all
        return None
    return np.where(_array(active), _array(prepared.charges), 0.0)


def _bins(weight: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return each weight's bin: 0 for exactly 0, BINS + 1 for exactly 1, else 1 + ⌊BINS · λ⌋."""
    inner = np.minimum((BINS * weight).astype(np.intp), BINS - 1) + 1
    return np.where(weight == 0.0, 0, np.where(weight == 1.0, BINS + 1, inner))


def _sum_up(total: float, values: NDArray[np.float64]) -> float:
    """Return a sum in which +inf outweighs −inf, so that an upper bound stays one."""
    if total == math.inf or bool(np.isposinf(values).any()):
        return math.inf
    return total + math.fsum(values.tolist())


def _array(values: Tensor) -> Any:
    return values.cpu().numpy()


READERS["Diagnostics"] = partial(from_json, Diagnostics)
