"""What an evaluation can say of single models and of their weights, in bounded memory.

Everything here is a function of the private data without protection of its own: the operator's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from adapmixed.evaluation.curve import Curve
from adapmixed.evaluation.diagnosis import QUANTILES, Diagnosis, Utility, Weights
from adapmixed.privacy.events import Caveat, PublicAnswer
from adapmixed.privacy.fields import ARRAY, COUNT, optional, read_state, write_state

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from adapmixed.mechanisms import Answer, Law, Proposal
    from adapmixed_ext import Projection

FORMAT_VERSION = 1
BINS = 20
"""Of the weights strictly between 0 and 1, all of the same width; 0 and 1 are counted apart."""
POINTS = 64
MODELS = 128
"""Up to so many models the course of each is kept, of more their `QUANTILES`."""

_FIELDS = {
    "queries": COUNT,
    "screened": COUNT,
    "mixed": COUNT,
    "sums": ARRAY,
    "weights": ARRAY,
    "charged": ARRAY,
    "points": ARRAY,
    "step": COUNT,
    "calls": COUNT,
    "last": optional(ARRAY),
}


class Diagnostics:
    """Running totals of one mechanism's weights, charges and losses; memory O(N)."""

    def __init__(self) -> None:
        self.queries = 0
        self.screened = 0
        self.mixed = 0  # queries answered by a mixture with weights
        self._bound = -math.inf
        self._largest = self._loss = self._ensemble_loss = 0.0  # sums over queries
        self._weights = np.zeros(BINS + 2)  # exactly 0, the bins, exactly 1
        self._screened_pairs = 0.0  # of those at 0
        self._charged = np.zeros(0)  # (N,), empty where no single model is charged
        # Rows of queries, screened queries and what was charged.
        self._curve: Curve[NDArray[np.float64]] = Curve(POINTS)

    def add(
        self, proposal: Proposal, answer: Answer, active: Tensor | None, targets: Tensor
    ) -> None:
        """One call's answers.

        Args:
            proposal: of B queries, charged and released.
            answer: what it released: log-probabilities of the targets.
            active: the slots that a filter let contribute; None without a filter.
            targets: (B,) int64.

        Raises:
            ValueError: the proposal does not hold the rows of all N models.
        """
        self.queries += len(targets)
        self.screened += int(answer.public.sum())
        mixture = _mixture(proposal, active)
        if mixture is not None:
            self._add_mixture(*mixture, answer, targets)
        charges = _charges(proposal, active)
        if charges is not None:
            if not len(self._charged):
                self._charged = np.zeros(len(charges))
            self._charged = self._charged + charges.sum(1)
        self._curve.add(np.array([self.queries, self.screened, *self._kept()]))

    def _add_mixture(
        self, law: Law, projection: Projection, answer: Answer, targets: Tensor
    ) -> None:
        own, public = target_log_probs(law, targets)
        weight, complement = _array(projection.weight), _array(projection.complement)
        largest = utility_terms(own, public, complement).max(0)
        ensemble = np.logaddexp.reduce(own, 0) - math.log(len(own))
        assert answer.log_prob is not None  # targets were given
        self.mixed += len(targets)
        self._bound = max(self._bound, float(largest.max()))
        self._largest = _sum_up(self._largest, largest)
        self._loss -= math.fsum(answer.log_prob.tolist())
        self._ensemble_loss -= math.fsum(ensemble.tolist())
        counts = np.bincount(_bins(weight, complement).ravel(), minlength=BINS + 2)
        self._weights = self._weights + counts
        self._screened_pairs += float(len(own) * int(answer.public.sum()))

    def _kept(self) -> NDArray[np.float64]:
        if len(self._charged) <= MODELS:
            return self._charged
        kept: NDArray[np.float64] = np.quantile(self._charged, QUANTILES)
        return kept

    def diagnosis(self) -> Diagnosis:
        """What is known so far."""
        utility = weights = None
        if self.mixed:
            count = self.mixed
            utility = Utility(
                self._bound, self._largest / count, self._loss / count, self._ensemble_loss / count
            )
            zero, *bins, one = (int(value) for value in self._weights)
            weights = Weights(zero, int(self._screened_pairs), tuple(bins), one)
        rows = [row.tolist() for row in self._curve.all()]
        return Diagnosis(
            queries=self.queries,
            models=len(self._charged),
            utility=utility,
            weights=weights,
            screened=tuple((int(done), int(screened)) for done, screened, *_ in rows),
            charges=tuple((int(done), tuple(kept)) for done, _, *kept in rows if kept),
            quantiles=len(self._charged) > MODELS,
        )

    def state(self) -> dict[str, Any]:
        """Everything as strict JSON values, exact to the bit; private."""
        curve = self._curve
        width = 0 if curve.last is None else len(curve.last)
        sums = [
            self._bound, self._largest, self._loss, self._ensemble_loss, self._screened_pairs
        ]  # fmt: skip
        values = vars(self) | vars(curve)
        values |= {
            "sums": np.array(sums),
            "weights": self._weights,
            "charged": self._charged,
            "points": np.array(curve.points).reshape(len(curve.points), width),
        }
        return write_state("diagnostics", FORMAT_VERSION, _FIELDS, values)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Diagnostics:
        """The diagnostics that `state()` was asked of; ValueError where it can be none."""
        values = read_state("diagnostics", FORMAT_VERSION, _FIELDS, state)
        found = cls()
        width = 0 if values["last"] is None else len(values["last"])
        shapes = {"sums": (5,), "weights": (BINS + 2,), "points": (len(values["points"]), width)}
        for name, shape in shapes.items():
            if values[name].shape != shape:
                raise ValueError(f"diagnostics.{name} must have shape {shape}")
        if values["step"] < 1 or values["charged"].ndim != 1:
            raise ValueError("diagnostics: step must be >= 1 and charged a list")
        for name in ("queries", "screened", "mixed"):
            setattr(found, name, values[name])
        found._bound, found._largest, found._loss, found._ensemble_loss, found._screened_pairs = (
            values["sums"].tolist()
        )
        found._weights, found._charged = values["weights"], values["charged"]
        curve = found._curve
        curve.points, curve.last = list(values["points"]), values["last"]
        curve.step, curve.calls = values["step"], values["calls"]
        return found


def target_log_probs(law: Law, targets: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """log p_j(x_t), (N, B), and log q(x_t), (B,), of the rows that are mixed."""
    private, public, sums = law.private_logits, law.public_logits, law.projection
    index = targets.expand(len(private), -1).unsqueeze(-1)
    own = private.gather(2, index).squeeze(2).double() - sums.private_lse
    return _array(own), _array(
        public.gather(1, targets.unsqueeze(1)).squeeze(1).double() - sums.public_lse
    )


def utility_terms(
    own: NDArray[np.float64], public: NDArray[np.float64], complement: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(1 − λ_j) log(p_j(x_t)/p_0(x_t)) of theorem util_analysis, (N, B), in nats.

    At the edges: p_j = 0 gives −inf, also where λ_j = 1 or p_0 = 0, since such a model has no part
    in what the ensemble gives the token; λ_j = 1 gives 0, also where p_0 = 0; and +inf where
    p_0 = 0 < p_j and λ_j < 1. With these the theorem holds wherever its left side is defined.
    """
    with np.errstate(invalid="ignore"):
        terms = complement * (own - public)
    terms = np.where(complement == 0.0, 0.0, terms)
    return np.where(np.isneginf(own), -np.inf, terms)


def _mixture(proposal: Proposal, active: Tensor | None) -> tuple[Law, Projection] | None:
    """The law and its weights where it is Σ_i [λ_i p_i + (1−λ_i) q]/N; else None."""
    from adapmixed.mechanisms import Law
    from adapmixed_ext import Projection

    law = proposal.law
    if not isinstance(law, Law) or not isinstance(law.projection, Projection):
        return None
    if not law.public_support:  # the unprotected ensemble itself
        return None
    if all(isinstance(event, PublicAnswer | Caveat) for event in proposal.events(active)):
        return None  # reads no private model
    if len(law.projection.weight) != proposal.num_models:
        raise ValueError(
            f"diagnostics need the rows of all {proposal.num_models} models, got "
            f"{len(law.projection.weight)}"
        )
    return law, law.projection


def _charges(proposal: Proposal, active: Tensor | None) -> NDArray[np.float64] | None:
    """(N, B), what single models are charged, at the first order; None where they are not."""
    charges = proposal.charges
    if charges is None:
        return None
    if proposal.individual_charges is None:  # realised losses
        realised: NDArray[np.float64] = _array(charges[..., 0])
        return realised
    if active is None:  # the guarantee is fixed for all
        return None
    return np.where(_array(active), _array(charges[..., 0]), 0.0)


def _bins(weight: NDArray[np.float64], complement: NDArray[np.float64]) -> NDArray[np.intp]:
    """0 for a weight of exactly 0, BINS + 1 for exactly 1, else 1 + ⌊BINS · weight⌋."""
    inner = np.minimum((BINS * weight).astype(np.intp), BINS - 1) + 1
    return np.where(weight == 0.0, 0, np.where(complement == 0.0, BINS + 1, inner))


def _sum_up(total: float, values: NDArray[np.float64]) -> float:
    """A sum in which +inf outweighs −inf: an upper bound stays one."""
    if total == math.inf or bool(np.isposinf(values).any()):
        return math.inf
    return total + math.fsum(values.tolist())


def _array(values: Tensor) -> Any:
    return values.cpu().numpy()
