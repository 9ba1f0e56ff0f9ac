"""Time orders: integers and others, small and large, at small and at ordinary targets."""

from functools import partial

import adapmixed_ext
from adapmixed_ext import Projection
from benchmarks.calls import rotate
from benchmarks.harness import READ_ONCE, Call, Query, Report, floors, interleave, size
from benchmarks.inputs import make_queries
from benchmarks.scaling import RADIUS, Sizes, check_setting

PROJECTIONS = (
    (18.0, RADIUS), (17.5, RADIUS), (3.0, 0.03), (2.5, 0.03), (17.5, 0.03), (64.0, 0.03),
)  # fmt: skip
LOSSES = (3.0, 18.0, 17.5, 64.0, 256.0)


def order_calls(queries: list[Query]) -> dict[str, Call]:
    """Return `project` and `leave_one_out` at several orders, checked at the small target."""
    for order, radius in PROJECTIONS[2:4]:
        check_setting(queries[0], order, radius)
    known = [adapmixed_ext.project(*query, order=18.0, radius=RADIUS) for query in queries]
    calls: dict[str, Call] = {
        f"project, order {order:g}, radius {radius:g}": rotate(
            queries, partial(_project, order, radius)
        )
        for order, radius in PROJECTIONS
    }
    for order in LOSSES:
        calls[f"leave_one_out, order {order:g}"] = partial(_loss, queries, known, order)
    return calls


def orders(report: Report, sizes: Sizes) -> None:
    """Time the calls on far inputs, one query."""
    queries = make_queries(sizes.models, sizes.vocab, kind="far")
    calls = order_calls(queries) | {READ_ONCE: floors(queries)[READ_ONCE]}
    timings = interleave(calls, dict.fromkeys(calls, sizes.runs(15)))
    report.say(
        f"orders: far inputs, {sizes.models} models, {sizes.vocab} tokens, fp32, one query; "
        "ratios to the first"
    )
    report.add(
        "orders", timings, base=next(iter(calls)), floor=READ_ONCE, bytes_read=size(queries[0]),
        models=sizes.models, vocab=sizes.vocab,
    )  # fmt: skip


def _project(order: float, radius: float, query: Query) -> object:
    return adapmixed_ext.project(*query, order=order, radius=radius)


def _loss(queries: list[Query], known: list[Projection], order: float, turn: int) -> object:
    at = turn % len(queries)
    return adapmixed_ext.leave_one_out(*queries[at], known[at], orders=order)
