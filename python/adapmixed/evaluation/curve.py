"""A curve over time in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


def _no_points() -> NDArray[np.float64]:
    return np.zeros((0, 0))


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
    points: NDArray[np.float64] = field(default_factory=_no_points)
    last: NDArray[np.float64] = field(default_factory=_no_points)

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
