"""Results of an evaluation for one mechanism, of one run or several."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adapmixed.evaluation.diagnosis import Diagnosis
from adapmixed.privacy import Guarantee

BLOCK, MOST_BLOCKS, LEAST_BLOCKS = 64, 64, 8
"""Least queries of a block, most blocks of a run, and least blocks of an interval."""
_RESAMPLES = 4000


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


def paired_difference(
    method: Sequence[Evaluation], public: Sequence[Evaluation]
) -> dict[str, float | int | None] | None:
    """Return how far a method's log-perplexity lies above the public model's on the same tokens.

    The runs are cut into at most `MOST_BLOCKS` stretches of at least `BLOCK` queries. The interval
    is a seeded block bootstrap's: the 2.5 % and 97.5 % quantiles of the mean over blocks that are
    drawn with replacement. It is about other text like this, for the same models.

    Args:
        method: its evaluations, one per run.
        public: the public model's, of the same runs.

    Returns:
        "mean", "low" and "high" in nats per token, and "blocks". "low" and "high" are None with
        fewer than `LEAST_BLOCKS` blocks. None if a perplexity is infinite.
    """
    found = _gaps(method, public)
    if found is None:
        return None
    counts, gaps = found
    result: dict[str, float | int | None] = {"mean": float(gaps.sum() / counts.sum())}
    result |= {"low": None, "high": None, "blocks": len(gaps)}
    if len(gaps) >= LEAST_BLOCKS:
        drawn = np.random.default_rng(0).integers(len(gaps), size=(_RESAMPLES, len(gaps)))
        means = gaps[drawn].sum(1) / counts[drawn].sum(1)
        result["low"], result["high"] = map(float, np.quantile(means, (0.025, 0.975)))
    return result


def gain_kept(
    method: Sequence[Evaluation], public: Sequence[Evaluation], reference: Sequence[Evaluation]
) -> tuple[float, float] | None:
    """Return which share of a reference's gain over the public model a method keeps.

    Gains are in log-perplexity, on the same tokens and in the blocks of :func:`paired_difference`.

    Returns:
        (share, its standard error by a jackknife over the blocks). None unless the interval of the
        reference's gain lies above zero, or if a perplexity is infinite.
    """
    gain = paired_difference(reference, public)
    own, whole = _gaps(method, public), _gaps(reference, public)
    if gain is None or own is None or whole is None or gain["high"] is None or gain["high"] >= 0:
        return None
    mine, theirs = own[1], whole[1]
    without = (mine.sum() - mine) / (theirs.sum() - theirs)
    squares = ((without - without.mean()) ** 2).sum() * (len(mine) - 1) / len(mine)
    return float(mine.sum() / theirs.sum()), math.sqrt(squares)


_Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def _gaps(
    method: Sequence[Evaluation], public: Sequence[Evaluation]
) -> tuple[_Floats, _Floats] | None:
    """Return the queries of every block and the method's loss above the public model's there."""
    values = [value for one in (*method, *public) for _, value in one.perplexities]
    if not all(map(math.isfinite, values)):
        return None
    pairs = [(_losses(m), _losses(p)) for m, p in zip(method, public, strict=True)]
    gaps = np.concatenate([own[:, 1] - other[:, 1] for own, other in pairs])
    return np.concatenate([own[:, 0] for own, _ in pairs]), gaps


def _losses(one: Evaluation) -> _Floats:
    """Return (queries, loss in nats) of every block, from the perplexities so far."""
    points = np.array([(0, 0.0), *((n, n * math.log(value)) for n, value in one.perplexities)])
    count = min(MOST_BLOCKS, max(1, one.queries // BLOCK))
    wanted = np.arange(count + 1) * one.queries / count
    return np.diff(points[np.unique(np.searchsorted(points[:, 0], wanted))], axis=0)
