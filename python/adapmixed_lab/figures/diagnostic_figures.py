"""Figures of diagnostics: weights, charges of single models, screened queries, and losses.

All of them show functions of the private data without protection, and are for the operator only.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from adapmixed.evaluation import Evaluation, Weights
from adapmixed_lab.figures.style import COLOURS, GREY, DrawnFigure, canvas, number_axis, wrapped

_OPERATOR = "For the operator only."
_DASHES = ("-", (0, (4, 1.6)), (0, (1, 1.6)))
_ROW = 1.75  # inches of one method's axes
_EDGE = 0.055  # how far outside [0, 1] the bars of exactly 0 and 1 stand


@contextmanager
def _rows(found: Sequence[tuple[Evaluation, Any]], label: str) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure and its axes, one below the other, each with the name of a method."""
    with canvas(0.9 + _ROW * len(found), len(found)) as (figure, grid):
        each = list(getattr(grid, "flat", [grid]))
        for axes, (method, _) in zip(each, found, strict=True):
            axes.set_title(wrapped(method.name), fontsize=10, fontweight="normal")
            axes.set_ylabel(label)
        yield figure, each


def draw_weights(methods: Sequence[Evaluation]) -> DrawnFigure | None:
    """Draw the distribution of the weights λ, for every method that has weights."""
    found = [(m, w) for m in methods if m.diagnosis and (w := m.diagnosis.weights) is not None]
    if not found:
        return None
    with _rows(found, "share (%)") as (figure, each):
        for axes, (_, weights) in zip(each, found, strict=True):
            _plot_weights(axes, weights)
        each[-1].set_xlabel("weight λ: exactly 0, in bins between, exactly 1")
        if any(weights.screened for _, weights in found):
            handles, labels = each[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower right", ncols=2, handlelength=1.4)
    caption = (
        "Bars are shares of all (model, query) pairs. At a weight of 1 a model answers unchanged, "
        "and at 0 it answers as the public model. Hatched bars are queries that screening sent to "
        f"the public model, for which all weights are 0. {_OPERATOR}"
    )
    return DrawnFigure("weights", "Mixing weights λ of the models", caption, figure)


def _plot_weights(axes: Any, weights: Weights) -> None:
    bins = weights.bins
    percent = 100 / max(weights.zero + sum(bins) + weights.one, 1)
    width = 1 / len(bins)
    centres = [(place + 0.5) * width for place in range(len(bins))]
    own = [(weights.zero - weights.screened) * percent, weights.one * percent]
    axes.bar(
        [-_EDGE, *centres, 1 + _EDGE], [own[0], *(count * percent for count in bins), own[1]],
        0.9 * width, color=COLOURS[0], label="not screened",
    )  # fmt: skip
    axes.bar(
        [-_EDGE], [weights.screened * percent], 0.9 * width, [own[0]],
        color=COLOURS[1], edgecolor="white", hatch="////", label="screened",
    )  # fmt: skip
    axes.set_xticks([-_EDGE, 0.2, 0.4, 0.6, 0.8, 1 + _EDGE], ["0", "0.2", "0.4", "0.6", "0.8", "1"])
    axes.set_xlim(-0.11, 1.11)
    axes.grid(False, axis="x")


def draw_charges(methods: Sequence[Evaluation]) -> DrawnFigure | None:
    """Draw the charges of each model so far, for every method that charges models one by one."""
    found = [(m, m.diagnosis.charges) for m in methods if m.diagnosis and m.diagnosis.charges]
    if not found:
        return None
    with _rows(found, "charged so far") as (figure, each):
        for axes, (_, charges) in zip(each, found, strict=True):
            _plot_charges(axes, charges)
            _queries_axis(axes)
            number_axis(axes.yaxis)
        each[-1].set_xlabel("queries answered")
    caption = (
        "Thin lines are single models, or quantiles over more than 128 models. Dark lines are the "
        "median and the largest. Values are realised losses: Rényi divergences in nats at the "
        "mechanism’s first order, without the cost of screening, which is the same for all models. "
        "Under a budget of every shard, values are the charges of each shard. "
        f"{_OPERATOR}"
    )
    return DrawnFigure("charges", "Privacy loss of each model over time", caption, figure)


def _plot_charges(axes: Any, charges: Sequence[tuple[int, Sequence[float]]]) -> None:
    """Draw a line for each model, or each quantile of them."""
    queries = [0, *(done for done, _ in charges)]
    rows = [[0.0] * len(charges[0][1]), *(row for _, row in charges)]
    axes.plot(queries, rows, color=COLOURS[5], linewidth=0.6)
    last = sorted(rows[-1])
    for value, style, word in (
        (last[-1], "-", "largest"), (last[(len(last) - 1) // 2], (0, (4, 1.6)), "median")
    ):  # fmt: skip
        course = [row[rows[-1].index(value)] for row in rows]
        axes.plot(queries, course, color=COLOURS[0], linestyle=style, linewidth=1.6)
        if word == "largest" or value < 0.9 * last[-1]:  # else the words would overlap
            axes.annotate(
                f"{word} {value:.3g}", (queries[-1], value), (4, 0), fontsize=8,
                textcoords="offset points", va="center", annotation_clip=False,
            )  # fmt: skip


def _queries_axis(axes: Any) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def draw_screened(methods: Sequence[Evaluation]) -> DrawnFigure | None:
    """Draw the share of queries answered from the public model, over the course of a run."""
    found = [m for m in methods if m.guarantee.kind != "public" and m.diagnosis is not None]
    found = [m for m in found if m.screened > 0 or m.breakdown.get("screening", 0.0) > 0]
    if not found:
        return None
    with canvas(2.9) as (figure, axes):
        for index, method in enumerate(found):
            points = [(0, 0), *(method.diagnosis.screened if method.diagnosis else ())]
            shares = [
                100 * (now - before) / (end - start)
                for (start, before), (end, now) in zip(points[:-1], points[1:], strict=True)
            ]
            axes.stairs(
                shares, [queries for queries, _ in points], baseline=None, linewidth=1.6,
                color=COLOURS[index % len(COLOURS)], linestyle=_DASHES[index % len(_DASHES)],
                label=wrapped(method.name),
            )  # fmt: skip
        _queries_axis(axes)
        axes.set(xlabel="queries answered", ylabel="share of a stretch (%)")
        figure.legend(loc="outside lower left", ncols=2, handlelength=3)
    caption = (
        "Queries that screening, or a rule of the public distribution, sent to the public model, "
        f"as a share of each stretch between two recorded points. {_OPERATOR}"
    )
    return DrawnFigure("screened", "Queries answered from the public model", caption, figure)


def draw_validation(training: Sequence[Mapping[str, Any]]) -> DrawnFigure | None:
    """Draw every member's validation loss and the public model's."""
    ordered = sorted((one for one in training if "loss" in one), key=lambda one: one["loss"])
    if not ordered:
        return None
    places = range(1, len(ordered) + 1)
    with canvas(3.4) as (figure, axes):
        loss = [one["loss"] for one in ordered]
        public = [one["public_loss"] for one in ordered]
        axes.vlines(places, loss, public, color="#CCCCCC", linewidth=0.8)
        axes.plot(places, public, "o", color=GREY, fillstyle="none", label="public model")
        axes.plot(places, loss, "o", color=COLOURS[0], label="member")
        axes.set_xlim(left=0)
        _losses(figure, axes, "members, sorted by loss", "nats per held-out token")
    caption = (
        "Losses at the end of training, on the text that was held out of each member’s own shard. "
        f"The public model’s loss is on the same text. {_OPERATOR}"
    )
    return DrawnFigure("validation", "Validation loss of the members", caption, figure)


def draw_training(training: Sequence[Mapping[str, Any]]) -> DrawnFigure | None:
    """Draw every member's training loss over the epochs."""
    members = [one for one in training if "losses" in one]
    if not members:
        return None
    with canvas(3.4) as (figure, axes):
        curves = sorted((one["losses"] for one in members), key=lambda losses: losses[-1])
        for losses in curves:
            axes.plot(range(1, len(losses) + 1), losses, color="#BBBBBB", linewidth=0.8)
        middle = curves[len(curves) // 2]
        axes.plot(
            range(1, len(middle) + 1), middle, "o-", color=COLOURS[0], markersize=3.5,
            label="member with the median final loss",
        )  # fmt: skip
        words = "epochs, or quarters of the steps", "nats per token of the own shard"
        _losses(figure, axes, *words)
    caption = (
        "Mean loss on the training text of each epoch, or each quarter of a small shard's steps, "
        f"with one line for each member. {_OPERATOR}"
    )
    return DrawnFigure("training", "Training curves of the members", caption, figure)


def _losses(figure: Any, axes: Any, across: str, upwards: str) -> None:
    axes.set(xlabel=across, ylabel=upwards)
    axes.xaxis.get_major_locator().set_params(integer=True)
    number_axis(axes.yaxis)
    figure.legend(loc="outside lower left", ncols=2, handlelength=1.4)
