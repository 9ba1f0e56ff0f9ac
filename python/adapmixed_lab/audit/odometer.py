"""AdaPMixED's running ε(D), an ex-post statement, on enumerated adaptive trees.

The attacks take the statement of docs/theory/adapmixed.md word for word. Let P and Q be the
distributions of all transcripts with and without a member. Then P(S) - ∫_S e^ε(D) dQ is at most δ
for every S, and so is the same with P and Q exchanged. AdaPMixED answers every query, and the
accountant states ε on every branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from adapmixed.mechanisms import AdaPMixED
from adapmixed_lab.audit.finding import SLACK, Effort, Finding
from adapmixed_lab.audit.odometer_trees import Adjacency, Odometer, Queries, extremal

STEPS_PER_SECOND = 6.0  # of each search
CLAIM = "sup P(S) - ∫_S e^ε(D) dQ"
DELTA = 1e-5
SEARCHED_DELTA = 0.05  # so large that a search meets such branches by chance

_THREE = (8.0,) * 3, (0.4,) * 3
_EDGE = " at the edge of the ball"
# A suffix of the name, and what makes the tree: N, neighbours, the order of each answer, its loss.
Extremal = tuple[str, Callable[..., tuple[Odometer, Queries]]]
EXTREMAL: list[Extremal] = [
    ("", partial(extremal, 1, "add_remove", (8.0,) * 4, (0.25,) * 4)),
    ("", partial(extremal, 2, "add_remove", (8.0,) * 4, (0.25,) * 4)),
    ("", partial(extremal, 3, "zero_out", (18.0,) * 3, (0.2,) * 3, vocab=3)),
    (f",{_EDGE}", partial(extremal, 2, "add_remove", *_THREE, edge=True)),
    (f",{_EDGE}", partial(extremal, 3, "zero_out", *_THREE, edge=True)),
    (f", Q over P{_EDGE}", partial(extremal, 1, "zero_out", *_THREE, edge=True, backwards=True)),
    (", Q over P", partial(extremal, 3, "zero_out", *_THREE, backwards=True)),
]
SEVERAL: list[Extremal] = [
    (", δ split", partial(extremal, 1, "zero_out", (8.0, 2.0), (0.6, 4.0))),
    (", δ split", partial(extremal, 2, "add_remove", (8.0, 2.0), (0.6, 4.0))),
    (", δ split", partial(extremal, 3, "add_remove", (16.0, 4.0, 2.0), (0.3, 1.2, 3.0))),
]


def _finding(name: str, delta: float, measured: float, control: bool = False) -> Finding:
    return Finding("odometer", name, CLAIM, delta * (1 + SLACK), measured, 1.0, control)


def _called(tree: Odometer, kind: str = "an extremal tree") -> str:
    """Return a name from the mechanism's orders and the tree."""
    orders = tree.mechanism.loss_orders or (tree.mechanism.order,)
    return (
        f"adapmixed α = {', '.join(f'{order:g}' for order in orders)}, {kind} of {tree.depth} "
        f"answers, {tree.vocab} tokens, N = {tree.models}, {tree.mechanism.adjacency}"
    )


def _extremal_trees() -> Iterator[Finding]:
    """Attack trees on which the statement is nearly tight, so that too small an ε shows."""
    for what, setting in (*EXTREMAL, *SEVERAL):
        tree, queries = setting(delta=DELTA)
        yield _finding(_called(tree) + what, DELTA, tree.measured(queries))


def _extremal_controls() -> Iterator[Finding]:
    """Attack the same trees with the ε of another statement, or with too small charges."""
    for _, setting in SEVERAL:
        tree, queries = setting(delta=DELTA, split=False)
        name = f"{_called(tree)}, the best order chosen afterwards"
        yield _finding(name, DELTA, tree.measured(queries), True)
    tree, queries = EXTREMAL[1][1](delta=DELTA)
    for what, broken in (
        ("its first answer is not charged", replace(tree, told=(0.0, 1.0, 1.0, 1.0))),
        ("0.8 of every loss", replace(tree, told=(0.8,) * 4)),
        ("a member is added, not removed", replace(tree, adding=True)),
    ):
        yield _finding(f"{_called(tree)}, {what}", DELTA, broken.measured(queries), True)
    name = f"{_called(tree)}, read as a bound of another event"
    exceeded = tree.exceeded(queries)
    claim = "P(log P/Q > ε(D))"
    yield Finding("odometer", name, claim, DELTA * (1 + SLACK), exceeded, 1.0, True)


def _ball(
    order: float, beta: float, adjacency: Adjacency, loss_orders: tuple[float, ...] = ()
) -> AdaPMixED:
    return AdaPMixED(order, beta, screen=None, loss_orders=loss_orders, adjacency=adjacency)


def searched() -> list[tuple[str, Odometer, bool]]:
    """Return trees to search over all logits: (suffix of the name, tree, whether a control)."""
    added, emptied = _ball(3.0, 1.0, "add_remove"), _ball(3.0, 1.0, "zero_out")
    smaller, several = _ball(3.0, 0.5, "add_remove"), _ball(4.0, 1.0, "add_remove", (4.0, 1.5))
    two = Odometer(smaller, 2, 2, 3, SEARCHED_DELTA)
    return [
        ("", Odometer(smaller, 1, 2, 3, SEARCHED_DELTA), False),
        ("", Odometer(smaller, 2, 2, 4, SEARCHED_DELTA), False),
        ("", Odometer(emptied, 2, 2, 3, SEARCHED_DELTA), False),
        ("", Odometer(added, 3, 3, 2, SEARCHED_DELTA), False),
        ("", Odometer(emptied, 3, 2, 3, SEARCHED_DELTA), False),
        (", δ split", Odometer(several, 2, 2, 3, SEARCHED_DELTA), False),
        (
            ", the best order chosen afterwards",
            Odometer(several, 2, 2, 3, SEARCHED_DELTA, split=False),
            True,
        ),
        (", its second answer is not charged", replace(two, told=(1.0, 0.0, 1.0)), True),
        (", half of every loss", replace(two, told=(0.5,) * 3), True),
        (
            ", answers from a ball twice as large as charged",
            replace(two, mechanism=added, charged=smaller),
            True,
        ),
        (", losses of zero-out", replace(two, mechanism=added, charged=emptied), True),
        (", a member is added, not removed", replace(two, mechanism=added, adding=True), True),
    ]


def _searches(effort: Effort) -> Iterator[Finding]:
    """Search for trees that break the statement, and for trees that break each control."""
    steps = effort.count(STEPS_PER_SECOND, 60)
    for index, (what, tree, control) in enumerate(searched()):
        queries = tree.search(steps, effort.generator(f"odometer/{index}"))
        name = _called(tree, "a tree, its logits searched,") + what
        yield _finding(name, tree.delta, tree.measured(queries), control)


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack nearly tight trees, and searched ones."""
    yield from _extremal_trees()
    yield from _extremal_controls()
    yield from _searches(effort)
