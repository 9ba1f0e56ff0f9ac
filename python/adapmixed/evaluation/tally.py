"""Running totals of one mechanism, in bounded memory, and how they are kept in a result file."""

import math
from collections.abc import Mapping
from typing import Any

from adapmixed.evaluation.curve import Curve
from adapmixed.evaluation.diagnosis import Diagnosis
from adapmixed.evaluation.result import Evaluation
from adapmixed.privacy import Accountant
from adapmixed.privacy.fields import (
    COUNT,
    REAL,
    WORD,
    Arrays,
    Kind,
    exactly,
    optional,
    read_fields,
    write_fields,
)

CURVE_POINTS = 512

Point = tuple[int, float | None, float]
"""Queries so far, their ε, their perplexity."""


def _read_point(written: Any) -> Point:
    queries, epsilon, perplexity = exactly(list, written)
    return COUNT.read(queries, _NONE), _EPSILON.read(epsilon, _NONE), REAL.read(perplexity, _NONE)


def _write_point(point: Point) -> list[Any]:
    return [point[0], _EPSILON.write(point[1], _NONE), REAL.write(point[2], _NONE)]


_NONE = Arrays()
_EPSILON = optional(REAL)
_POINT = Kind(lambda point, _: _write_point(point), lambda written, _: _read_point(written))
_POINTS = Kind(
    lambda points, _: [_write_point(point) for point in points],
    lambda written, _: [_read_point(point) for point in exactly(list, written)],
)
_OBJECT = Kind(lambda value, _: exactly(dict, value), lambda value, _: exactly(dict, value))
_CURVE = {"points": _POINTS, "step": COUNT, "calls": COUNT, "last": optional(_POINT)}
_FIELDS = {
    "name": WORD,
    "loss": REAL,
    "screened": COUNT,
    "seconds": REAL,
    "curve": _OBJECT,
    "accountant": _OBJECT,
}


class Tally:
    """What is known of one mechanism so far."""

    def __init__(self, name: str, accountant: Accountant) -> None:
        self.name = name
        self.accountant = accountant
        self.loss = 0.0  # Σ −log p(target)
        self.screened = 0
        self.seconds = 0.0
        self.curve: Curve[Point] = Curve(CURVE_POINTS)

    def add(self, log_probs: list[float], screened: int) -> None:
        """With the answers of one call, which the accountant has been charged with."""
        self.loss -= math.fsum(log_probs)
        self.screened += screened

    def mark(self) -> None:
        """A point of the curve."""
        done = self.accountant.queries
        self.curve.add((done, self.accountant.epsilon().epsilon, self._perplexity(done)))

    def result(self, forward_seconds: float, diagnosis: Diagnosis | None) -> Evaluation:
        """The evaluation, at least one query being answered."""
        guarantee, queries = self.accountant.epsilon(), self.accountant.queries
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
        """Everything as strict JSON values, exact to the bit; private."""
        values = vars(self) | {"accountant": self.accountant.state()}
        values["curve"] = write_fields("curve", _CURVE, vars(self.curve), Arrays())
        return write_fields("tally", _FIELDS, values, Arrays())

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Tally":
        """The tally that `state()` was asked of; ValueError where it can be none."""
        values = read_fields("tally", _FIELDS, state, Arrays())
        tally = cls(values["name"], Accountant.from_state(values["accountant"]))
        vars(tally.curve).update(read_fields("curve", _CURVE, values["curve"], Arrays()))
        for name in ("loss", "screened", "seconds"):
            setattr(tally, name, values[name])
        if tally.curve.step < 1 or tally.screened < 0:
            raise ValueError("tally: curve.step must be >= 1 and screened >= 0")
        return tally
