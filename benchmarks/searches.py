"""Times of `clip_project` and `project`, which search one number a row.

On near inputs at order 18 `project` has nothing to search for, since all weights are 1.
"""

from functools import partial

import torch

import adapmixed_ext
from adapmixed_ext import reference as oracle
from benchmarks.calls import rotate
from benchmarks.harness import READ_TWICE, Call, Query, Report, floors, interleave, size
from benchmarks.inputs import KINDS, few, make_queries, on_cpu
from benchmarks.scaling import BOXES, ORDER, RADIUS, Sizes, check_setting

SETTINGS = ((ORDER, RADIUS), (3.0, 0.03))


def search_calls(queries: list[Query]) -> dict[str, Call]:
    """Return `project` at two settings and `clip_project` in two boxes by name, checked."""
    part = few(queries[0][0]), queries[0][1]
    for order, radius in SETTINGS:
        check_setting(queries[0], order, radius)
    for lower, upper in BOXES:
        clipping = adapmixed_ext.clip_project(*part, lower=lower, upper=upper)
        truth = oracle.clip_project(*on_cpu(part), lower=lower, upper=upper).mean(0)
        if not torch.allclose(adapmixed_ext.mixture(*part, clipping).cpu(), truth, rtol=1e-9):
            raise SystemExit("clip_project differs from the reference; nothing is timed")
    calls = {
        f"project, order {order:g}, radius {radius:g}": rotate(
            queries, partial(_project, order, radius)
        )
        for order, radius in SETTINGS
    }
    return calls | {
        f"clip_project, {lower:g} to {upper:g}": rotate(queries, partial(_clip, lower, upper))
        for lower, upper in BOXES
    }


def searches(report: Report, sizes: Sizes) -> None:
    """Time both on every kind of input, one query."""
    for kind in KINDS:
        queries = make_queries(sizes.models, sizes.vocab, kind=kind)
        calls = search_calls(queries) | {READ_TWICE: floors(queries)[READ_TWICE]}
        timings = interleave(calls, dict.fromkeys(calls, sizes.runs(20)))
        report.say(
            f"searches: {kind} inputs, {sizes.models} models, {sizes.vocab} tokens, fp32, one "
            "query; ratios to the first"
        )
        report.add(
            "searches", timings, base=next(iter(calls)), floor=READ_TWICE,
            bytes_read=size(queries[0]), kind=kind, models=sizes.models, vocab=sizes.vocab,
        )  # fmt: skip


def _project(order: float, radius: float, query: Query) -> object:
    return adapmixed_ext.project(*query, order=order, radius=radius)


def _clip(lower: float, upper: float, query: Query) -> object:
    return adapmixed_ext.clip_project(*query, lower=lower, upper=upper)
