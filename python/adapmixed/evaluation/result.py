"""Results of an evaluation for one mechanism, of one run or several."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from adapmixed.evaluation.diagnosis import Diagnosis
from adapmixed.privacy import Guarantee


@dataclass(frozen=True)
class Evaluation:
    """The results of one mechanism on the text, or on the part of one run.

    Attributes:
        name: the name given in ``mechanisms``.
        perplexity: exp of the mean negative log-likelihood over all queries; inf if a target has
            probability 0.
        queries: number of scored tokens, each of which is one query.
        guarantee: the accountant's guarantee after all queries.
        screened: share of queries that screening answered with the public model; 0 for a mechanism
            that never reads the private models.
        seconds: time spent in the mechanism, without the models' forward pass.
        tokens_per_second: queries divided by the time of the mechanism and the shared forward pass.
        curve: (queries, ε) after each call of the mechanism and at the end. Long evaluations keep
            every 2nd, 4th, ... call, so that there are at most 512 points. ε is None without a
            guarantee.
        perplexities: (queries, perplexity over the queries so far) at the same points. With a
            budget of every shard it approaches the public model's as shards spend their budgets.
        breakdown: the parts of ε in nats: "mixing", "screening", "conversion" and "total".
        diagnosis: the diagnostics of `evaluate(..., diagnostics=True)`, or None.
    """

    name: str
    perplexity: float
    queries: int
    guarantee: Guarantee
    screened: float
    seconds: float
    tokens_per_second: float
    curve: tuple[tuple[int, float | None], ...]
    perplexities: tuple[tuple[int, float], ...]
    breakdown: Mapping[str, float]
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True)
class Runs:
    """The results of one mechanism in several runs.

    Every run has its own part of the text, its own randomness and its own accountant. As in the
    paper, a guarantee covers its run alone. All runs query the same models, so the privacy costs of
    all answers *together* are the sum over runs.

    Attributes:
        name: the name given in ``mechanisms``.
        evaluations: one :class:`Evaluation` per run.
    """

    name: str
    evaluations: tuple[Evaluation, ...]

    @property
    def queries(self) -> int:
        """The number of queries of each run."""
        return self.evaluations[0].queries

    @property
    def perplexity_mean(self) -> float:
        """The mean over runs of the perplexity."""
        return statistics.fmean(one.perplexity for one in self.evaluations)

    @property
    def perplexity_deviation(self) -> float | None:
        """The sample standard deviation (n − 1) of the perplexity over runs.

        None for one run, or if a perplexity is infinite.
        """
        return _deviation([one.perplexity for one in self.evaluations])

    @property
    def epsilon_mean(self) -> float | None:
        """The mean over runs of ε, or None without a guarantee."""
        epsilons = self._epsilons()
        return None if epsilons is None else statistics.fmean(epsilons)

    @property
    def epsilon_deviation(self) -> float | None:
        """The sample standard deviation (n − 1) of ε over runs.

        None for one run, or if an ε is missing or infinite.
        """
        epsilons = self._epsilons()
        return None if epsilons is None else _deviation(epsilons)

    @property
    def guarantees(self) -> tuple[Guarantee, ...]:
        """The guarantees, one per run, each of which covers its run alone."""
        return tuple(one.guarantee for one in self.evaluations)

    def _epsilons(self) -> list[float] | None:
        found = [one.guarantee.epsilon for one in self.evaluations]
        return None if None in found else [value for value in found if value is not None]


def _deviation(values: list[float]) -> float | None:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return statistics.stdev(values)
