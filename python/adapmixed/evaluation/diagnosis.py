"""The diagnostics of one mechanism in an evaluation: private, for the operator."""

import math
from dataclasses import dataclass

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Over models, of what they were charged, where there are too many to keep the course of each."""


@dataclass(frozen=True)
class Utility:
    """The paper's utility theorem (util_analysis) on the queries that were answered, in nats.

    With mixing weights λ the answers' mean negative log-likelihood exceeds that of the unprotected
    ensemble, p̄ = Σ_j p_j / N, by at most max_t max_j (1 − λ_j,t) log(p_j(x_t)/p_0(x_t)). Its proof
    bounds every query by its own largest term, so that their mean is a bound, too.

    Attributes:
        bound: the theorem's right side: the largest term over all queries and models.
        mean_bound: mean over queries of each one's largest term.
        loss: mean negative log-likelihood of the answers.
        ensemble_loss: of the unprotected ensemble, on the same queries and logits.
    """

    bound: float
    mean_bound: float
    loss: float
    ensemble_loss: float

    @property
    def gap(self) -> float | None:
        """The theorem's left side, loss − ensemble_loss; None where both are infinite."""
        if math.isinf(self.loss) and math.isinf(self.ensemble_loss):
            return None
        return self.loss - self.ensemble_loss


@dataclass(frozen=True)
class Weights:
    """Counts of the weights λ_j,t of models in queries, by value.

    Attributes:
        zero: exactly 0, those of screened queries included.
        screened: those of screened queries alone.
        bins: strictly between 0 and 1, in bins of the same width.
        one: exactly 1.
    """

    zero: int
    screened: int
    bins: tuple[int, ...]
    one: int


@dataclass(frozen=True)
class Diagnosis:
    """The findings besides perplexity and ε.

    Attributes:
        queries: that were answered.
        models: that are charged one by one; 0 where none is.
        utility, weights: None for a mechanism that has no mixing weights for all of its models.
        screened: (queries so far, of these answered from the public model alone), at most 65
            points, the last at the end.
        charges: (queries so far, what each model has been charged for them) at the same points, by
            model or, with `quantiles`, their `QUANTILES` over models. Realised losses (AdaPMixED)
            are Rényi divergences in nats at the first of the mechanism's orders, without the
            screening's price, which is the same for all. Under a budget of every shard they are
            what it was charged.
    """

    queries: int
    models: int
    utility: Utility | None
    weights: Weights | None
    screened: tuple[tuple[int, int], ...]
    charges: tuple[tuple[int, tuple[float, ...]], ...]
    quantiles: bool
