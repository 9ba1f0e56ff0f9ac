"""A course over time in bounded memory."""

from typing import Generic, TypeVar

Point = TypeVar("Point")


class Curve(Generic[Point]):
    """At most `most` points, evenly spaced in the calls, and always the last one.

    If there would be more, every other one is dropped, and from then on only every other call is
    kept. Which points are there depends on their number alone.

    Args:
        most: even.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.points: list[Point] = []
        self.step = 1
        self.calls = 0
        self.last: Point | None = None

    def add(self, point: Point) -> None:
        """Add the point of one call."""
        self.calls += 1
        self.last = point
        if self.calls % self.step:
            return
        self.points.append(point)
        if len(self.points) > self.most:
            self.points = self.points[1::2]
            self.step *= 2

    def all(self) -> list[Point]:
        """Return the points, in order."""
        # With `most` even the points are those of the calls that `step` divides.
        ended = self.last is None or self.calls % self.step == 0
        return self.points if ended or self.last is None else [*self.points, self.last]
