"""A curve over time in bounded memory."""

from typing import Generic, TypeVar

Point = TypeVar("Point")


class Curve(Generic[Point]):
    """At most `most` points, evenly spaced over the calls, always with the last one.

    If there would be more, every second point is dropped, and from then on only half as many calls
    are kept. The choice of points depends only on the number of calls.

    Args:
        most: the largest number of points, even.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.points: list[Point] = []
        self.step = 1
        self.calls = 0
        self.last: Point | None = None

    def add(self, point: Point) -> None:
        """Add the point of the next call."""
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
        # Because `most` is even, the points belong to the calls that `step` divides.
        ended = self.last is None or self.calls % self.step == 0
        return self.points if ended or self.last is None else [*self.points, self.last]
