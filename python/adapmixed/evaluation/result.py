"""Running totals of mechanisms in bounded memory, their results, comparisons, and the result file.

The file holds the state of an evaluation, from which it continues after an interruption. It is one
JSON object, which is replaced atomically. It is private, since it has each model's charges. Of the
randomness it has only a seed, if there is one, and how many random numbers were drawn from it.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adapmixed.ensemble.members import read_versioned
from adapmixed.files import write_file
from adapmixed.mechanisms import Answer, Ticket
from adapmixed.privacy import Accountant, Guarantee
from adapmixed.privacy.encoding import READERS, canonical, from_json

if TYPE_CHECKING:
    from adapmixed.evaluation.diagnostics import Diagnostics

CURVE_POINTS = 512
BLOCK, MOST_BLOCKS, LEAST_BLOCKS = 64, 64, 8
"""Least queries of a block, most blocks of a run, and least blocks of an interval."""
_RESAMPLES = 4000

FORMAT_VERSION = 10
"""Of a result file; increases if an entry changes its meaning, or if a required one is new."""

_ENTRIES = (
    "name perplexity change difference kept queries planned epsilon delta kind guarantee unit "
    "adjacency method order screened tokens_per_second breakdown curve perplexities"
)
_TOLERANCE = 1e-3  # of a probe: more than rounding on other machines, less than other ensembles


@dataclass
class Curve:
    """At most `most` points, evenly spaced over the calls, always with the last one.

    If there would be more, every second point is dropped, and from then on only half as many calls
    are kept. The choice of points depends only on the number of calls.

    Attributes:
        most: the largest number of points, even.
        step: every how many calls a point is kept.
        calls: number of calls so far.
        points: (n, width), the kept points.
        last: (1, width), the point of the last call; empty before the first.
    """

    most: int
    step: int = 1
    calls: int = 0
    points: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    last: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))

    def add(self, point: Sequence[float]) -> None:
        """Add the point of the next call."""
        self.calls += 1
        self.last = np.array([point])
        if self.calls % self.step:
            return
        self.points = np.concatenate([self.points.reshape(-1, len(point)), self.last])
        if len(self.points) > self.most:
            self.points = self.points[1::2]
            self.step *= 2

    def all(self) -> NDArray[np.float64]:
        """Return the points, in order."""
        # Because `most` is even, the points belong to the calls that `step` divides.
        ended = self.calls % self.step == 0
        return self.points if ended else np.concatenate([self.points, self.last])


@dataclass
class Tally:
    """The running totals of one mechanism in one run, which a result file holds as JSON.

    Attributes:
        name: the name of the mechanism in the evaluation.
        accountant: is charged for every answer.
        diagnostics: diagnostics to collect, or None.
        loss: Σ −log p(target).
        screened: queries that the public model alone answered.
        seconds: time spent in the mechanism.
        curve: its points hold the queries so far, their ε, which is NaN without a guarantee, and
            their perplexity.
    """

    name: str
    accountant: Accountant
    diagnostics: Diagnostics | None = None
    loss: float = 0.0
    screened: int = 0
    seconds: float = 0.0
    curve: Curve = field(default_factory=lambda: Curve(CURVE_POINTS))

    def add(self, ticket: Ticket, answer: Answer, targets: Tensor) -> None:
        """Count the answers of one call.

        Args:
            ticket: the ticket of B queries, charged and released.
            answer: its answer, with log-probabilities of the targets.
            targets: (B,) int64 token ids.
        """
        assert answer.log_prob is not None  # targets were given
        self.loss -= math.fsum(answer.log_prob.tolist())
        self.screened += int(answer.public.sum())
        done, epsilon = self.accountant.queries, self.accountant.guarantee().epsilon
        self.curve.add((done, math.nan if epsilon is None else epsilon, self._perplexity(done)))
        if self.diagnostics is not None:
            self.diagnostics.add(ticket, answer, targets)

    def result(self, forward_seconds: float) -> Evaluation:
        """Return the results so far, after at least one query.

        Args:
            forward_seconds: time of the models' forward passes, shared by all mechanisms.
        """
        guarantee, queries = self.accountant.guarantee(), self.accountant.queries
        points = [(int(done), *values) for done, *values in self.curve.all().tolist()]
        return Evaluation(
            name=self.name,
            perplexity=self._perplexity(queries),
            queries=queries,
            guarantee=guarantee,
            screened=0.0 if guarantee.kind == "public" else self.screened / queries,
            tokens_per_second=queries / (self.seconds + forward_seconds),
            curve=tuple((done, None if math.isnan(cost) else cost) for done, cost, _ in points),
            perplexities=tuple((done, perplexity) for done, _, perplexity in points),
            breakdown=self.accountant.breakdown(),
            diagnosis=self.diagnostics,
        )

    def _perplexity(self, queries: int) -> float:
        mean = self.loss / queries
        return math.exp(mean) if mean < 700.0 else math.inf


READERS["Accountant"] = Accountant.from_state
READERS["Curve"] = partial(from_json, Curve)


@dataclass(frozen=True)
class Evaluation:
    """The results of one mechanism on the text; with several runs, those of the first.

    Every run has its own part of the text, its own randomness and its own accountant. As in the
    paper, a guarantee covers its run alone. All runs query the same models, so the privacy costs of
    all answers *together* are the sum over runs.

    Attributes:
        name: the name given in ``mechanisms``.
        perplexity: exp of the mean negative log-likelihood over all queries; inf if a target has
            probability 0.
        queries: number of scored tokens, each of which is one query.
        guarantee: the accountant's guarantee after all queries.
        screened: share of queries that screening answered with the public model; 0 for a mechanism
            that never reads the private models.
        tokens_per_second: queries divided by the time of the mechanism and the shared forward pass;
            None if it is not shown.
        curve: (queries, ε) after each call of the mechanism and at the end. Long evaluations keep
            every 2nd, 4th, ... call, so that there are at most 513 points. ε is None without a
            guarantee.
        perplexities: (queries, perplexity over the queries so far) at the same points. With a
            budget of every shard it approaches the public model's as shards spend their budgets.
        breakdown: the parts of ε in nats: "mixing", "screening", "conversion" and "total".
        diagnosis: the totals of `evaluate(..., diagnostics=True)`, or None.
        further: the results of the other runs.
        change: relative change of perplexity against the public model, the first result whose
            guarantee is of kind "public"; None without one, if its perplexity is infinite, or with
            several runs.
        difference: of log-perplexity to the public model over all runs, from `paired_difference`;
            None for the public model and without one.
        kept: the share of the gain without protection: {"of", "share", "error"}, the name of the
            best method without protection whose gain can be told from zero, and the result of
            `gain_kept`. Share and error are None if there is none. None for the public model, and
            without something to compare.
    """

    name: str
    perplexity: float
    queries: int
    guarantee: Guarantee
    screened: float
    tokens_per_second: float | None
    curve: tuple[tuple[int, float | None], ...]
    perplexities: tuple[tuple[int, float], ...]
    breakdown: Mapping[str, float]
    diagnosis: Diagnostics | None = None
    further: tuple[Evaluation, ...] = ()
    change: float | None = None
    difference: Mapping[str, Any] | None = None
    kept: Mapping[str, Any] | None = None

    @property
    def runs(self) -> tuple[Evaluation, ...]:
        """The results of all runs."""
        return (self, *self.further)

    @property
    def perplexity_mean(self) -> float:
        """The mean over runs of the perplexity."""
        return statistics.fmean(one.perplexity for one in self.runs)

    @property
    def perplexity_deviation(self) -> float | None:
        """The sample standard deviation (n − 1) of the perplexity over runs.

        None for one run, or if a perplexity is infinite.
        """
        return _deviation(one.perplexity for one in self.runs)

    @property
    def epsilon_mean(self) -> float | None:
        """The mean over runs of ε, or None without a guarantee."""
        found = [one.guarantee.epsilon for one in self.runs]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if len(known) == len(found) else None

    @property
    def epsilon_deviation(self) -> float | None:
        """The sample standard deviation (n − 1) of ε over runs.

        None for one run, or if an ε is missing or infinite.
        """
        return _deviation(one.guarantee.epsilon for one in self.runs)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of report.json for the first run; infinities are still floats."""
        known = vars(self.guarantee) | vars(self)
        known |= {"planned": self.guarantee.budget, "guarantee": str(self.guarantee)}
        entry = {name: known[name] for name in _ENTRIES.split()}
        return entry | ({} if self.diagnosis is None else {"diagnostics": self.diagnosis.report()})

    def runs_to_json(self) -> dict[str, Any]:
        """Return the entry of report.json for all runs; infinities are still floats."""
        first = self.to_json()
        names = "name queries planned kind adjacency method"
        return {name: first[name] for name in names.split()} | {
            "perplexity": [one.perplexity for one in self.runs],
            "perplexity_mean": self.perplexity_mean,
            "perplexity_deviation": self.perplexity_deviation,
            "difference": self.difference,
            "kept": self.kept,
            "epsilon": [one.guarantee.epsilon for one in self.runs],
            "epsilon_mean": self.epsilon_mean,
            "epsilon_deviation": self.epsilon_deviation,
            "guarantees": [str(one.guarantee) for one in self.runs],
        }


def _deviation(values: Iterable[float | None]) -> float | None:
    found = list(values)
    finite = [value for value in found if value is not None and math.isfinite(value)]
    return statistics.stdev(finite) if 1 < len(finite) == len(found) else None


def compared(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the results with `change`, `difference` and `kept`, from these results alone."""
    public = next((one for one in evaluations if one.guarantee.kind == "public"), None)
    if public is None:
        return [replace(one, change=None, difference=None, kept=None) for one in evaluations]
    free = [one for one in evaluations if one.guarantee.kind == "none"]
    told = [one for one in free if gain_kept(one, public, one) is not None] or free
    losses = [math.fsum(math.log(run.perplexity) for run in one.runs) for one in told]
    best = told[losses.index(min(losses))] if told else None
    found = []
    for one in evaluations:
        change, difference, kept = None, None, None
        if not one.further and math.isfinite(public.perplexity):
            change = one.perplexity / public.perplexity - 1.0
        if one.guarantee.kind != "public":
            difference = paired_difference(one, public)
        if best is not None and one is not public:
            share, error = gain_kept(one, public, best) or (None, None)
            kept = {"of": best.name, "share": share, "error": error}
        found.append(replace(one, change=change, difference=difference, kept=kept))
    return found


def paired_difference(
    method: Evaluation, public: Evaluation
) -> dict[str, float | int | None] | None:
    """Return how far a method's log-perplexity lies above the public model's on the same tokens.

    The runs are cut into at most `MOST_BLOCKS` stretches of at least `BLOCK` queries. The interval
    is a seeded block bootstrap's: the 2.5 % and 97.5 % quantiles of the mean over blocks that are
    drawn with replacement. It is about other text like this, for the same models.

    Args:
        method: its results, of one run or several.
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
    method: Evaluation, public: Evaluation, reference: Evaluation
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


def _gaps(method: Evaluation, public: Evaluation) -> NDArray[np.float64] | None:
    """Return (2, blocks): the queries of each, and the method's loss above the public model's."""
    values = [value for one in (*method.runs, *public.runs) for _, value in one.perplexities]
    if not all(map(math.isfinite, values)):
        return None
    pairs = [(_losses(m), _losses(p)) for m, p in zip(method.runs, public.runs, strict=True)]
    counts = np.concatenate([own[:, 0] for own, _ in pairs])
    return np.stack([counts, np.concatenate([own[:, 1] - other[:, 1] for own, other in pairs])])


def _losses(one: Evaluation) -> NDArray[np.float64]:
    """Return (queries, loss in nats) of every block, from the perplexities so far."""
    points = np.array([(0, 0.0), *((n, n * math.log(value)) for n, value in one.perplexities)])
    count = min(MOST_BLOCKS, max(1, one.queries // BLOCK))
    wanted = np.arange(count + 1) * one.queries / count
    return np.diff(points[np.unique(np.searchsorted(points[:, 0], wanted))], axis=0)


def read_state(path: Path, configuration: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state that a result file holds, or None if there is no file.

    Args:
        path: path of the file, which this process holds.
        configuration: strict JSON values that describe the evaluation. The numbers of "probe" may
            differ by rounding.

    Raises:
        ValueError: the file has another configuration or version, or is damaged.
    """
    if not path.exists():
        return None
    content = read_versioned(path, FORMAT_VERSION, "configuration", "state", "checksum")
    if _written(content["configuration"], content["state"]) != path.read_bytes():
        raise ValueError(f"{path} must be as evaluate wrote it (--result), its checksum differs")
    mine, found = dict(configuration), content["configuration"]
    far = [abs(a - b) > _TOLERANCE for a, b in zip(mine["probe"], found["probe"], strict=False)]
    if not any(far):
        mine["probe"] = found["probe"]
    for name in [*mine, *found]:
        now, then = canonical(mine.get(name)), canonical(found.get(name))
        if now != then:
            raise ValueError(
                f"{path} must be of the same evaluation to be resumed: {name} is {now}, but the "
                f"file was begun with {then}"
            )
    return dict(content["state"])


def save_state(path: Path, configuration: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Replace a result file atomically; it is on the device when this returns."""
    write_file(path, _written(configuration, state), mode=0o600)


def _written(configuration: Mapping[str, Any], state: Mapping[str, Any]) -> bytes:
    """Return the file's bytes, with a checksum over all entries."""
    content = {"format_version": FORMAT_VERSION, "configuration": configuration, "state": state}
    checksum = hashlib.sha256(canonical(content).encode("ascii")).hexdigest()
    return f"{canonical(content | {'checksum': f'sha256:{checksum}'})}\n".encode("ascii")
