"""Names in the plane of perplexity and ε: beside points and on lines, without overlap."""

import math
from collections.abc import Sequence
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


def short(name: str) -> str:
    """A name on one line of bounded length."""
    name = "".join(c if c.isprintable() else " " for c in name)
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1] + "…"


def draw_references(axes: Any, methods: Sequence[Method]) -> list[Box]:
    """Horizontal lines at the methods' perplexities with their names; returns the names' boxes."""
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
    """Of words in a settled figure, for `place_labels` to keep free."""
    return [_box(text) for text in texts]


def label_points(axes: Any, methods: Sequence[Method], taken: Sequence[Box]) -> None:
    """The methods' names beside their points (ε, perplexity); see :func:`place_labels`."""
    points = [(short(m.name), m.epsilon, m.perplexity) for m in methods if m.epsilon is not None]
    settle(axes.figure)
    place_labels(axes, points, taken)


def place_labels(
    axes: Any,
    points: Sequence[tuple[str, float, float]],
    taken: Sequence[Box] = (),
    *,
    font_size: float = _FONT_SIZE,
    colours: Sequence[str] = (),
) -> None:
    """Words beside points (word, x, y), each at the place that collides least.

    Greedy in their order: a place counts its overlaps with points, lines' names (`taken`) and
    earlier words, and 20 times for leaving the axes; the first of the least wins. A point without a
    word is kept free only.

    Args:
        axes: of a settled figure, finished but for the words.
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
    """Runs the layout, on which all pixel positions depend, and lets it stay as it is."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _box(artist: Any) -> Box:
    extent = artist.get_window_extent(artist.figure.canvas.get_renderer())
    return extent.x0, extent.y0, extent.x1, extent.y1


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _inside(box: Box, frame: Box) -> bool:
    return frame[0] <= box[0] and box[2] <= frame[2] and frame[1] <= box[1] and box[3] <= frame[3]
