"""Running totals of one mechanism in bounded memory, and their form in a result file."""

import math
from collections.abc import Mapping
from typing import Any

from adapmixed.evaluation.curve import Curve
from adapmixed.evaluation.diagnosis import Diagnosis
from adapmixed.evaluation.result import Evaluation
from adapmixed.privacy import Accountant
from adapmixed.privacy.encoding import check_keys, exactly, read_real, write_real

CURVE_POINTS = 512

Point = tuple[int, float | None, float]
"""(queries so far, their ε, their perplexity)."""

_FIELDS = ("name", "loss", "screened", "seconds", "curve", "accountant")
_CURVE = ("points", "step", "calls", "last")


def _write_point(point: Point | None) -> list[Any] | None:
    if point is None:
        return None
    epsilon = None if point[1] is None else write_real(point[1])
    return [point[0], epsilon, write_real(point[2])]


def _read_point(written: Any) -> Point:
    queries, epsilon, perplexity = exactly(list, written)
    found = None if epsilon is None else read_real(epsilon)
    return exactly(int, queries), found, read_real(perplexity)


class Tally:
    """The running totals of one mechanism."""

    def __init__(self, name: str, accountant: Accountant) -> None:
        self.name = name
        self.accountant = accountant
        self.loss = 0.0  # Σ −log p(target)
        self.screened = 0
        self.seconds = 0.0
        self.curve: Curve[Point] = Curve(CURVE_POINTS)

    def add(self, log_probs: list[float], screened: int) -> None:
        """Add the answers of one call, after the accountant was charged.

        Args:
            log_probs: log p(target) of every query.
            screened: how many of the queries the public model alone answered.
        """
        self.loss -= math.fsum(log_probs)
        self.screened += screened

    def mark(self) -> None:
        """Add a point of the curve."""
        done = self.accountant.queries
        self.curve.add((done, self.accountant.guarantee().epsilon, self._perplexity(done)))

    def result(self, forward_seconds: float, diagnosis: Diagnosis | None) -> Evaluation:
        """Return the results so far, after at least one query."""
        guarantee, queries = self.accountant.guarantee(), self.accountant.queries
        points = self.curve.all()
        return Evaluation(
            name=self.name,
            perplexity=self._perplexity(queries),
            queries=queries,
            guarantee=guarantee,
            screened=0.0 if guarantee.kind == "public" else self.screened / queries,
            seconds=self.seconds,
            tokens_per_second=queries / (self.seconds + forward_seconds),
            curve=tuple((done, epsilon) for done, epsilon, _ in points),
            perplexities=tuple((done, perplexity) for done, _, perplexity in points),
            breakdown=self.accountant.breakdown(),
            diagnosis=diagnosis,
        )

    def _perplexity(self, queries: int) -> float:
        mean = self.loss / queries
        return math.exp(mean) if mean < 700.0 else math.inf

    def state(self) -> dict[str, Any]:
        """Return the whole private state as strict JSON values, exact to the bit."""
        curve = self.curve
        return {
            "name": self.name,
            "loss": write_real(self.loss),
            "screened": self.screened,
            "seconds": self.seconds,
            "curve": {
                "points": [_write_point(point) for point in curve.points],
                "step": curve.step,
                "calls": curve.calls,
                "last": _write_point(curve.last),
            },
            "accountant": self.accountant.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Tally":
        """Return a tally with the state that `state()` returned.

        Raises:
            ValueError: if it is no such state.
        """
        values = check_keys("tally", state, set(_FIELDS))
        kept = check_keys("curve", values["curve"], set(_CURVE))
        tally = cls(exactly(str, values["name"]), Accountant.from_state(values["accountant"]))
        tally.loss = read_real(values["loss"])
        tally.screened = exactly(int, values["screened"])
        tally.seconds = read_real(values["seconds"])
        curve = tally.curve
        curve.points = [_read_point(point) for point in exactly(list, kept["points"])]
        curve.last = None if kept["last"] is None else _read_point(kept["last"])
        curve.step, curve.calls = exactly(int, kept["step"]), exactly(int, kept["calls"])
        if curve.step < 1 or tally.screened < 0:
            raise ValueError("tally: curve.step must be >= 1 and screened >= 0")
        return tally
