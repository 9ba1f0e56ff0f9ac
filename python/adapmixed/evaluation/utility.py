"""The paper's utility theorem on the answers of an evaluation.

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

from adapmixed.mechanisms import Answer, NextToken, Ticket
from adapmixed.privacy.events import READERS, from_json
from adapmixed_ext import Projection

UNPROTECTED = ("public", "unprotected")


@dataclass
class Utility:
    """Running totals of one mechanism for the paper's utility theorem (label util_analysis).

    Attributes:
        queries: number of answers that mix all models; 0 for a mechanism without mixing weights.
        sums: (4,) the theorem's bound, and over queries the sums of the largest terms, of the
            losses and of the unprotected ensemble's losses, in nats.
    """

    queries: int = 0
    sums: NDArray[np.float64] = field(default_factory=lambda: np.array([-math.inf, 0.0, 0.0, 0.0]))

    def add(self, ticket: Ticket, answer: Answer, targets: Tensor) -> None:
        """Add the answers of one call.

        Args:
            ticket: the ticket of B queries, charged and released.
            answer: its answer, with log-probabilities of the targets.
            targets: (B,) int64 token ids.
        """
        distribution = ticket._distribution
        rows, mixed = distribution.rows, distribution.projection
        # Others are no mixture Σ_i [λ_i p_i + (1−λ_i) q]/N, or one over a subset of the members.
        if type(distribution) is not NextToken or not isinstance(mixed, Projection):
            return
        if ticket.mechanism.name in UNPROTECTED:
            return
        places, share = rows.places(targets)
        index = places.unsqueeze(-1)
        at = rows.private.gather(2, index.expand(len(rows.private), -1, 1)).squeeze(2).double()
        private = _array(at - mixed.private_lse + share)
        public = _array(rows.public.gather(1, index).squeeze(1).double() - mixed.public_lse + share)
        largest = utility_terms(private, public, 1.0 - _array(mixed.weight)).max(0)
        ensemble = np.logaddexp.reduce(private, 0) - math.log(len(private))
        assert answer.log_prob is not None  # targets were given
        bound, terms, loss, ensemble_loss = self.sums.tolist()
        bound, terms = max(bound, float(largest.max())), _sum_up(terms, largest)
        loss -= math.fsum(answer.log_prob.tolist())
        ensemble_loss -= math.fsum(ensemble.tolist())
        self.sums = np.array([bound, terms, loss, ensemble_loss])
        self.queries += len(targets)

    def report(self) -> dict[str, float | None] | None:
        """Return both sides of the theorem on the answered queries, in nats per query.

        Let λ_j,t be the mixing weight of model j in query t, and p̄ = Σ_j p_j / N the unprotected
        ensemble. The theorem says that the answers' mean negative log-likelihood, "loss", exceeds
        that of p̄, "ensemble_loss", by at most max_t max_j (1 − λ_j,t) log(p_j(x_t)/p_0(x_t)), the
        "bound". Its proof bounds every query by that query's largest term, so the mean of these
        terms is a bound, too, "mean_bound". "gap" is the left side, loss − ensemble_loss, or None
        if both are infinite. None for a mechanism without mixing weights for all models.
        """
        if not self.queries:
            return None
        bound, *sums = self.sums.tolist()
        mean_bound, loss, ensemble_loss = (total / self.queries for total in sums)
        gap = None if math.isinf(loss) and math.isinf(ensemble_loss) else loss - ensemble_loss
        sides = {"bound": bound, "mean_bound": mean_bound, "loss": loss}
        return sides | {"ensemble_loss": ensemble_loss, "gap": gap}


def utility_terms(
    private: NDArray[np.float64], public: NDArray[np.float64], complement: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the terms of the paper's theorem util_analysis, (N, B), in nats.

    A term is (1 − λ_j) log(p_j(x_t)/p_0(x_t)). If p_j = 0 it is −inf, even if λ_j = 1 or p_0 = 0,
    because such a model adds nothing to the ensemble's probability of the token. Otherwise λ_j = 1
    gives 0, even if p_0 = 0, and p_0 = 0 with λ_j < 1 gives +inf. With these values the theorem
    holds wherever its left side is defined.

    Args:
        private: (N, B) log p_j(x_t).
        public: (B,) log p_0(x_t).
        complement: (N, B) 1 − λ_j.
    """
    with np.errstate(invalid="ignore"):
        terms = complement * (private - public)
    terms = np.where(complement == 0.0, 0.0, terms)
    return np.where(np.isneginf(private), -np.inf, terms)


def _sum_up(total: float, values: NDArray[np.float64]) -> float:
    """Return a sum in which +inf outweighs −inf, so that an upper bound stays one."""
    if total == math.inf or bool(np.isposinf(values).any()):
        return math.inf
    return total + math.fsum(values.tolist())


def _array(values: Tensor) -> Any:
    return values.cpu().numpy()


READERS["Utility"] = partial(from_json, Utility)
