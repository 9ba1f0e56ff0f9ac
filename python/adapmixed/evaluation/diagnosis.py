"""Diagnostics of one mechanism in an evaluation, which are private and for the operator."""

import math
from dataclasses import dataclass

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Quantiles over models of their charges, kept if there are too many models for a curve each."""


@dataclass(frozen=True)
class Utility:
    """The paper's utility theorem (label util_analysis) on the answered queries, in nats.

    Let λ_j,t be the mixing weight of model j in query t, and p̄ = Σ_j p_j / N the unprotected
    ensemble. The theorem says that the answers' mean negative log-likelihood exceeds that of p̄ by
    at most max_t max_j (1 − λ_j,t) log(p_j(x_t)/p_0(x_t)). Its proof bounds every query by that
    query's largest term, so the mean of these terms is a bound, too.

    Attributes:
        bound: the theorem's right side, the largest term over all queries and models.
        mean_bound: the mean over queries of each query's largest term.
        loss: mean negative log-likelihood of the answers.
        ensemble_loss: mean negative log-likelihood of the unprotected ensemble, on the same queries
            and logits.
    """

    bound: float
    mean_bound: float
    loss: float
    ensemble_loss: float

    @property
    def gap(self) -> float | None:
        """The theorem's left side, loss − ensemble_loss; None if both are infinite."""
        if math.isinf(self.loss) and math.isinf(self.ensemble_loss):
            return None
        return self.loss - self.ensemble_loss


@dataclass(frozen=True)
class Weights:
    """Counts of the mixing weights λ_j,t by value.

    Attributes:
        zero: weights of exactly 0, with those of screened queries.
        screened: weights of screened queries.
        bins: weights strictly between 0 and 1, in bins of equal width.
        one: weights of exactly 1.
    """

    zero: int
    screened: int
    bins: tuple[int, ...]
    one: int


@dataclass(frozen=True)
class Diagnosis:
    """The diagnostics of one mechanism, beyond perplexity and ε.

    Attributes:
        queries: number of answered queries.
        models: number of models that are charged individually; 0 if none is.
        utility: the utility theorem on these queries; None for a mechanism without mixing weights
            for all models.
        weights: counts of the mixing weights; None for such a mechanism.
        screened: (queries so far, of these answered by the public model alone), at most 65 points
            with the last at the end.
        charges: (queries so far, each model's charges for them) at the same points. With
            `quantiles`, the `QUANTILES` over models stand for the single models. For AdaPMixED
            these are realised Rényi divergences in nats at the first order, without the price of
            screening, which all models pay. With a budget of every shard they are the charges to
            it.
        quantiles: whether `charges` holds quantiles.
    """

    queries: int
    models: int
    utility: Utility | None
    weights: Weights | None
    screened: tuple[tuple[int, int], ...]
    charges: tuple[tuple[int, tuple[float, ...]], ...]
    quantiles: bool
