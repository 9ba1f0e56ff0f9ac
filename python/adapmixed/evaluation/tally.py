"""Running totals of one mechanism in bounded memory, and their form in a result file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from adapmixed.evaluation.diagnostics import Curve, Diagnostics
from adapmixed.evaluation.result import Evaluation, compared
from adapmixed.privacy import Accountant
from adapmixed.privacy.encoding import from_json, read_real, to_json, write_real

if TYPE_CHECKING:
    from torch import Tensor

    from adapmixed.mechanisms import Answer, Ticket

CURVE_POINTS = 512


class Tally:
    """The running totals of one mechanism.

    Args:
        name: the name of the mechanism in the evaluation.
        accountant: is charged for every answer.
        diagnostics: diagnostics to collect, or None.
    """

    def __init__(
        self, name: str, accountant: Accountant, diagnostics: Diagnostics | None = None
    ) -> None:
        self.name, self.accountant, self.diagnostics = name, accountant, diagnostics
        self.loss = 0.0  # Σ −log p(target)
        self.screened = 0  # queries that the public model alone answered
        self.seconds = 0.0
        # Each point: queries so far, their ε, which is NaN without a guarantee, their perplexity.
        self.curve = Curve(CURVE_POINTS)

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
            seconds=self.seconds,
            tokens_per_second=queries / (self.seconds + forward_seconds),
            curve=tuple((done, None if math.isnan(cost) else cost) for done, cost, _ in points),
            perplexities=tuple((done, perplexity) for done, _, perplexity in points),
            breakdown=self.accountant.breakdown(),
            diagnosis=None if self.diagnostics is None else self.diagnostics.diagnosis(),
        )

    def _perplexity(self, queries: int) -> float:
        mean = self.loss / queries
        return math.exp(mean) if mean < 700.0 else math.inf

    def state(self) -> dict[str, Any]:
        """Return the whole private state as strict JSON values, exact to the bit."""
        return {
            "name": self.name,
            "loss": write_real(self.loss),
            "screened": self.screened,
            "seconds": self.seconds,
            "curve": to_json(self.curve),
            "accountant": self.accountant.state(),
            "diagnostics": None if self.diagnostics is None else self.diagnostics.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Tally:
        """Return a tally with the state that `state()` returned."""
        kept = state["diagnostics"]
        diagnostics = None if kept is None else Diagnostics.from_state(kept)
        tally = cls(state["name"], Accountant.from_state(state["accountant"]), diagnostics)
        tally.loss, tally.curve = read_real(state["loss"]), from_json(Curve, state["curve"])
        tally.screened, tally.seconds = state["screened"], state["seconds"]
        return tally


def results(
    tallies: Sequence[Sequence[Tally]], forward_seconds: Sequence[float]
) -> list[Evaluation]:
    """Return the compared results of every mechanism over the runs that have begun.

    Args:
        tallies: those of each run, in the order of the mechanisms.
        forward_seconds: time of the models' forward passes in each run.
    """
    found = [
        [one.result(seconds) for one in run]
        for run, seconds in zip(tallies, forward_seconds, strict=True)
    ]
    first = zip(*found, strict=True)
    return compared([replace(one, further=tuple(further)) for one, *further in first])
