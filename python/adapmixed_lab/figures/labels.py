"""Placement of marks and names in the plane of perplexity and ε, without overlap."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from adapmixed.report.view import Method, format_perplexity

_GREY = "#555555"
_FONT_SIZE = 9
_NAME_LENGTH = 34
_POINT_RADIUS = 8.0  # pixels kept free around a point
# Offsets in points from a point to its label, with the alignments that go with them.
_PLACES = (
    ((9, 0), "left", "center"),
    ((-9, 0), "right", "center"),
    ((0, 9), "center", "bottom"),
    ((0, -9), "center", "top"),
    ((9, 14), "left", "bottom"),
    ((9, -14), "left", "top"),
    ((-9, 14), "right", "bottom"),
    ((-9, -14), "right", "top"),
    ((9, 30), "left", "bottom"),
    ((9, -30), "left", "top"),
)

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels of the canvas."""
Bar = tuple[float, float, float]
"""ε, and the least and the largest perplexity drawn there."""


def short(name: str) -> str:
    """Return a name on one line of bounded length."""
    name = "".join(c if c.isprintable() else " " for c in name)
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1] + "…"


def draw_references(axes: Any, methods: Sequence[Method]) -> list[Box]:
    """Draw named lines at the methods' perplexities, and return the boxes of the names."""
    texts = []
    ordered = sorted(methods, key=lambda method: method.perplexity)
    for rank, method in enumerate(ordered):
        axes.axhline(method.perplexity, color=_GREY, linewidth=1.2, linestyle=(0, (2, 2)))
        # Names point away from each other: the highest stands above its line, others below.
        above = rank == len(ordered) - 1
        words = short(method.name) + (", no guarantee" if method.kind == "none" else "")
        texts.append(
            axes.annotate(
                f"{words} ({format_perplexity(method.perplexity)})",
                (0.995, method.perplexity),
                (0, 3 if above else -3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="bottom" if above else "top",
                color=_GREY,
                fontsize=_FONT_SIZE,
            )
        )
    settle(axes.figure)
    return boxes_of(texts)


def boxes_of(texts: Sequence[Any]) -> list[Box]:
    """Return the boxes of texts in a settled figure, for `place_labels` to keep free."""
    return [_box(text) for text in texts]


def side_by_side(axes: Any, bars: Sequence[Bar], size: float) -> list[float]:
    """Return where to draw marks and their bars, at or near their ε, so that none is covered.

    Marks that would cover one another stand side by side around their middle, in their order and
    inside the axes.

    Args:
        axes: of a settled figure, with final limits.
        bars: one for each mark.
        size: of a mark, in points.
    """
    width = 1.2 * size * axes.figure.dpi / 72
    left, right = axes.bbox.x0, axes.bbox.x1
    ends = [[axes.transData.transform((x, y)) for y in (low, high)] for x, low, high in bars]
    places = [float(low[0]) for low, _ in ends]
    groups = [[index] for index in range(len(bars))]

    def touch(one: int, other: int) -> bool:
        (_, low), (_, high) = ends[one]
        (_, least), (_, most) = ends[other]
        beside = abs(places[one] - places[other]) >= 0.99 * width
        return not beside and low - width < most and least - width < high

    def touching() -> tuple[int, int] | None:
        pairs = combinations(range(len(groups)), 2)
        return next(
            (p for p in pairs if any(touch(i, j) for i in groups[p[0]] for j in groups[p[1]])), None
        )

    while (pair := touching()) is not None:
        first, second = pair
        groups[first] += groups.pop(second)
        groups[first].sort(key=lambda index: (ends[index][0][0], index))
        half = len(groups[first]) / 2 * width
        middle = math.fsum(ends[index][0][0] for index in groups[first]) / len(groups[first])
        middle = max(min(middle, right - half), left + half)
        for rank, index in enumerate(groups[first]):
            places[index] = middle + (rank - (len(groups[first]) - 1) / 2) * width
    back = axes.transData.inverted()
    return [float(back.transform((x, low[1]))[0]) for x, (low, _) in zip(places, ends, strict=True)]


def place_labels(
    axes: Any,
    points: Sequence[tuple[str, float, float]],
    taken: Sequence[Box] = (),
    *,
    font_size: float = _FONT_SIZE,
    colours: Sequence[str] = (),
) -> None:
    """Write words next to points (word, x, y), each at the place with the least overlap.

    Words are placed in their order. A place counts its overlaps with points, with the boxes in
    `taken` and with earlier words; leaving the axes counts 20. The first of the best places wins. A
    point without a word is only kept free.

    Args:
        axes: of a settled figure, finished except for the words.
        points: in data units.
        taken: boxes to keep free.
        font_size: in points.
        colours: of the words; empty: black.
    """
    boxes = list(taken)
    radius = _POINT_RADIUS * font_size / _FONT_SIZE
    for _, *at in points:
        x, y = axes.transData.transform(at)
        boxes.append((x - radius, y - radius, x + radius, y + radius))
    frame = _box(axes)
    for index, (word, *at) in enumerate(points):
        if not word:
            continue
        text = axes.annotate(
            word,
            at,
            (0, 0),
            textcoords="offset points",
            fontsize=font_size,
            color=colours[index] if colours else "black",
            bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.6},
        )
        best, least = _PLACES[0], math.inf
        for place in _PLACES:
            _put(text, place, font_size / _FONT_SIZE)
            box = _box(text)
            cost = sum(_overlap(box, other) for other in boxes) + 20 * (not _inside(box, frame))
            if cost < least:
                best, least = place, cost
        _put(text, best, font_size / _FONT_SIZE)
        boxes.append(_box(text))


def _put(text: Any, place: tuple[tuple[int, int], str, str], size: float) -> None:
    (right, up), horizontal, vertical = place
    offset = (right * size, up * size)
    text.set(position=offset, horizontalalignment=horizontal, verticalalignment=vertical)


def settle(figure: Any) -> None:
    """Run the layout, on which all pixel positions depend, and freeze it."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _box(artist: Any) -> Box:
    extent = artist.get_window_extent(artist.figure.canvas.get_renderer())
    return extent.x0, extent.y0, extent.x1, extent.y1


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _inside(box: Box, frame: Box) -> bool:
    return frame[0] <= box[0] and box[2] <= frame[2] and frame[1] <= box[1] and box[3] <= frame[3]
