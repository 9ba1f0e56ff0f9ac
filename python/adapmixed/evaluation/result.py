"""The results of an evaluation for one mechanism, in one run or several."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from adapmixed.evaluation.diagnosis import Diagnosis
from adapmixed.privacy import Guarantee


@dataclass(frozen=True)
class Evaluation:
    """One mechanism over the corpus, or over the stretch of one run.

    Attributes:
        name: as given in ``mechanisms``.
        perplexity: exp of the mean negative log-likelihood over all queries; inf if a target has
            probability 0.
        queries: number of scored tokens, each one query.
        guarantee: what the accountant states after all queries.
        screened: share of queries answered from the public model by screening (not for a mechanism
            that never reads the private models).
        seconds: time in the mechanism, without the models' forward pass.
        tokens_per_second: queries over mechanism time plus the shared forward pass.
        curve: (queries, ε) after each call of the mechanism, of long evaluations after every 2nd,
            4th, ... so that at most 512 are kept, and at the end; ε is None where there is no
            guarantee.
        perplexities: (queries, perplexity over the queries so far) at the same queries. Under a
            budget of every shard it tends to the public model's as shards spend theirs.
        breakdown: "mixing", "screening", "conversion", "total" of ε.
        diagnosis: what `evaluate(..., diagnostics=True)` found besides; else None.
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
    """One mechanism in several runs, each on a stretch of text, with randomness and an accountant
    of its own.

    As in the paper, every run stands for one service life: a guarantee is that of its run alone.
    All runs ask the same models; their answers *together* cost what the runs cost in sum.

    Attributes:
        name: as given in ``mechanisms``.
        evaluations: one per run.
    """

    name: str
    evaluations: tuple[Evaluation, ...]

    @property
    def queries(self) -> int:
        """Of each run."""
        return self.evaluations[0].queries

    @property
    def perplexity_mean(self) -> float:
        """Mean over runs of their perplexities."""
        return statistics.fmean(one.perplexity for one in self.evaluations)

    @property
    def perplexity_deviation(self) -> float | None:
        """Sample standard deviation (n − 1) over runs; None for one run or where one is inf."""
        return _deviation([one.perplexity for one in self.evaluations])

    @property
    def epsilon_mean(self) -> float | None:
        """Mean over runs of their ε; None where there is no guarantee."""
        epsilons = self._epsilons()
        return None if epsilons is None else statistics.fmean(epsilons)

    @property
    def epsilon_deviation(self) -> float | None:
        """Sample standard deviation (n − 1) over runs; None for one run, or without finite ε."""
        epsilons = self._epsilons()
        return None if epsilons is None else _deviation(epsilons)

    @property
    def guarantees(self) -> tuple[Guarantee, ...]:
        """One per run, of that run alone."""
        return tuple(one.guarantee for one in self.evaluations)

    def _epsilons(self) -> list[float] | None:
        found = [one.guarantee.epsilon for one in self.evaluations]
        return None if None in found else [value for value in found if value is not None]


def _deviation(values: list[float]) -> float | None:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return statistics.stdev(values)
