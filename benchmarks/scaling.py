"""Times of every operator, and how they depend on dtype, batch and size."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import adapmixed_ext
from adapmixed.rng import SeededRandom
from adapmixed_ext import Projection
from adapmixed_ext import reference as oracle
from benchmarks.calls import (
    EIGHT_ORDERS,
    OURS,
    draw,
    evaluate,
    our_calls,
    rotate,
    two_calls,
)
from benchmarks.harness import (
    READ_ONCE,
    READ_TWICE,
    Call,
    Query,
    Report,
    Timing,
    floors,
    interleave,
    size,
)
from benchmarks.inputs import (
    check_call,
    check_losses,
    check_weights,
    few,
    make_queries,
    make_query,
    on_cpu,
    true_losses,
)

ORDER, RADIUS = 18.0, 3.6
# The boxes of clip_project: symmetric, and one that lets much through.
BOXES = ((0.6, 1.65), (0.78, 2.72))
SCREEN = {"weight": 1e-4, "order": ORDER, "threshold": 1.0, "top_k": 60}
POOL = {"lower": -0.25, "upper": 1.0, "scale": 2.0}


class Sizes(NamedTuple):
    """Sizes of the tables that are about one size; ``quick`` shrinks the others too."""

    models: int
    vocab: int
    quick: bool

    def runs(self, count: int) -> int:
        """Return the number of runs, or 2 if quick."""
        return 2 if self.quick else count


def check(query: Query) -> None:
    """Check the two calls on some models against the reference."""
    check_call(two_calls, query, ORDER, RADIUS, [ORDER])


def check_setting(query: Query, order: float, radius: float) -> tuple[Tensor, Tensor]:
    """Check our calls on one query; return weights and the reference's losses, (N,), on the CPU."""
    projection, loss = two_calls(query, order, radius, order)
    truth = true_losses(query, projection, [order])
    check_losses(loss, truth)
    check_weights((few(query[0]), query[1]), few(projection.weight), order, radius)
    for orders in ([order], EIGHT_ORDERS):
        check_call(two_calls, query, order, radius, orders)
    return projection.weight[:, 0].cpu(), truth[:, 0, 0]


def pool_mixture(query: Query) -> Tensor:
    """Compute the mixture of a clipped pool."""
    return adapmixed_ext.mixture(*query, adapmixed_ext.log_pool(*query, **POOL))


def pool_token(query: Query, rng: SeededRandom) -> Tensor:
    """Draw a token of a clipped pool."""
    return adapmixed_ext.sample(pool_mixture(query), query[1], rng=rng)


def check_pool(query: Query) -> None:
    """Check the mixture of a clipped pool on some models against the reference."""
    log_pooled, _, _ = oracle.log_pool(*on_cpu(query), **POOL)
    found = pool_mixture(query).cpu()
    if not torch.allclose(found, log_pooled.exp(), rtol=adapmixed_ext.loss_error, atol=1e-12):
        raise SystemExit("the mixture of log_pool differs from the reference; nothing is timed")


def check_single(query: Query, noise: Tensor) -> None:
    """Check the remaining operators against the reference on the CPU."""
    part = few(query[0]), query[1]
    known = on_cpu(part)
    projection = adapmixed_ext.project(*part, order=ORDER, radius=RADIUS)
    p = oracle.mixture(*known, (projection.weight.cpu(), projection.complement.cpu()))
    screening = adapmixed_ext.screen(*part, noise, **SCREEN)
    target = part[1].argmax(-1)
    log_p = p[0, target.cpu()].log()
    forward, backward = adapmixed_ext.renyi_divergence(*part, ORDER)
    true_forward, true_backward = oracle.renyi_divergence(*known, ORDER)
    pool = adapmixed_ext.log_pool(*part, **POOL)
    log_pooled, log_normaliser, _ = oracle.log_pool(*known, **POOL)
    pairs: tuple[tuple[str, Tensor | None, Tensor], ...] = (
        ("log_pool", pool.log_normaliser, log_normaliser),
        ("mixture of a LogPool", adapmixed_ext.mixture(*part, pool), log_pooled.exp()),
        ("mixture", adapmixed_ext.mixture(*part, projection), p),
        ("log_prob", adapmixed_ext.log_prob(*part, projection, target), log_p),
        ("screen", screening.divergence, oracle.screen(*known, noise.cpu(), **SCREEN)[0]),
        ("renyi_divergence", forward, true_forward),
        ("renyi_divergence", backward, true_backward),
    )
    for lower, upper in BOXES:
        clipping = adapmixed_ext.clip_project(*part, lower=lower, upper=upper, orders=ORDER)
        bars = oracle.clip_project(*known, lower=lower, upper=upper)
        charge = oracle.clip_charge(bars, known[1], lower=lower, orders=ORDER)
        pairs += (
            ("clip_project", clipping.charge, charge),
            ("clip_project", adapmixed_ext.mixture(*part, clipping), bars.mean(0)),
        )
    for name, ours, truth in pairs:
        if ours is None or not torch.allclose(
            ours.cpu(), truth, rtol=adapmixed_ext.loss_error, atol=1e-12
        ):
            raise SystemExit(f"{name} differs from the reference; nothing is timed")


def single_calls(queries: Sequence[Query], noise: Tensor, rng: SeededRandom) -> dict[str, Call]:
    """Return every operator by itself on the query of the turn; its inputs are made first."""
    known = [
        (query, projection, adapmixed_ext.mixture(*query, projection))
        for query in queries
        for projection in [adapmixed_ext.project(*query, order=ORDER, radius=RADIUS)]
    ]

    pools = [adapmixed_ext.log_pool(*query, **POOL) for query in queries]

    def each(call: Callable[[Query, Projection, Tensor], object]) -> Call:
        return lambda turn: call(*known[turn % len(known)])

    boxes = {
        f"clip_project, {box[0]:g} to {box[1]:g}{note}": each(partial(_clip, box, orders))
        for box in BOXES
        for orders, note in ((None, ""), (ORDER, ", charges"))
    }
    return {
        "log_sum_exp": each(lambda q, *_: torch.ops.adapmixed.log_sum_exp(q[0], "private_logits")),
        "project": each(lambda q, *_: adapmixed_ext.project(*q, order=ORDER, radius=RADIUS)),
        **boxes,
        "leave_one_out": each(
            lambda q, projection, _: adapmixed_ext.leave_one_out(*q, projection, orders=ORDER)
        ),
        "leave_one_out, K = 8": each(
            lambda q, projection, _: adapmixed_ext.leave_one_out(
                *q, projection, orders=EIGHT_ORDERS
            )
        ),
        "leave_one_out, zero-out": each(
            lambda q, projection, _: adapmixed_ext.leave_one_out(
                *q, projection, orders=ORDER, adjacency="zero_out"
            )
        ),
        "mixture": each(lambda q, projection, _: adapmixed_ext.mixture(*q, projection)),
        "log_prob": each(
            lambda q, projection, _: adapmixed_ext.log_prob(*q, projection, q[1].argmax(-1))
        ),
        "log_pool": each(lambda q, *_: adapmixed_ext.log_pool(*q, **POOL)),
        "mixture of a LogPool": lambda turn: adapmixed_ext.mixture(
            *queries[turn % len(queries)], pools[turn % len(queries)]
        ),
        "screen": each(lambda q, *_: adapmixed_ext.screen(*q, noise, **SCREEN)),
        "sample": each(lambda q, _, p: adapmixed_ext.sample(p, q[1], rng=rng)),
        "renyi_divergence (N rows)": each(lambda q, *_: adapmixed_ext.renyi_divergence(*q, ORDER)),
    }


def _clip(
    box: tuple[float, float], orders: float | None, query: Query, *_: object
) -> adapmixed_ext.Clipping:
    return adapmixed_ext.clip_project(*query, lower=box[0], upper=box[1], orders=orders)


def operators(report: Report, sizes: Sizes) -> None:
    """Time every operator by itself on one query."""
    queries = make_queries(sizes.models, sizes.vocab)
    rng = SeededRandom(0)
    noise = adapmixed_ext.gaussian((1, SCREEN["top_k"]), sigma=0.01, rng=rng)
    check(queries[0])
    check_single(queries[0], noise)
    calls = single_calls(queries, noise, rng) | floors(queries)
    timings = interleave(calls, dict.fromkeys(calls, sizes.runs(30)))
    report.say(
        f"operators: order {ORDER:g}, radius {RADIUS:g}, {sizes.models} models, {sizes.vocab} "
        "tokens, fp32, one query; log_prob and sample hardly read logits"
    )
    report.add(
        "operators", timings, base=READ_ONCE, floor=READ_ONCE, bytes_read=size(queries[0]),
        order=ORDER, radius=RADIUS, models=sizes.models, vocab=sizes.vocab,
    )  # fmt: skip


def evaluation(report: Report, sizes: Sizes) -> None:
    """Time the path to log p(target), which never forms (B, V), and the path to a token."""
    queries = make_queries(sizes.models, sizes.vocab)
    check(queries[0])
    target, rng = torch.tensor([7]), SeededRandom(0)
    sampling = "sampling: project + mixture + sample"
    calls: dict[str, Call] = {
        sampling: rotate(queries, draw, ORDER, RADIUS, rng),
        "evaluation: project + log_prob": rotate(queries, evaluate, ORDER, RADIUS, target),
    } | floors(queries)
    timings = interleave(calls, dict.fromkeys(calls, sizes.runs(40)))
    report.say("evaluation: what a perplexity needs and what a token needs, one query")
    report.add(
        "evaluation", timings, base=sampling, floor=READ_TWICE, bytes_read=size(queries[0]),
        order=ORDER, radius=RADIUS, models=sizes.models, vocab=sizes.vocab,
    )  # fmt: skip


def _grid(
    report: Report, table: str, inputs: dict[str, tuple[list[Query], int, dict[str, object]]],
    base: str,
) -> None:  # fmt: skip
    """Time all inputs (queries, runs, fields) in one run; "ratio" is to the input ``base``."""
    calls: dict[str, Call] = {}
    runs: dict[str, int] = {}
    for label, (queries, count, _) in inputs.items():
        calls[f"{label}, two calls"] = our_calls(queries, ORDER, RADIUS)[OURS]
        calls[f"{label}, floor"] = floors(queries)[READ_TWICE]
        runs |= {name: count for name in calls if name not in runs}
    timings = interleave(calls, runs)
    report.head()
    for label, (queries, _, fields) in inputs.items():
        _, positions, _ = queries[0][0].shape
        floor = timings[f"{label}, floor"].per(positions)
        for short in ("two calls", "floor"):
            name = f"{label}, {short}"
            reference = timings[f"{base}, {short}"].per(inputs[base][0][0][0].shape[1])
            extra = dict(fields)
            if "models" in fields:
                extra |= _linear(timings[name], reference, queries[0], inputs[base][0][0])
            report.row(
                table, name, timings[name], base=reference, floor=floor,
                bytes_read=size(queries[0]) // positions, queries=positions, **extra,
            )  # fmt: skip
    report.say()


def _linear(timing: Timing, base: Timing, query: Query, base_query: Query) -> dict[str, object]:
    """Return the time per element, and its ratio to that of the base."""
    elements, base_elements = query[0].numel(), base_query[0].numel()
    each, base_each = timing.median / elements, base.median / base_elements
    note = f"{1e9 * each:.3f} ns per element, {each / base_each:.2f} of the base's"
    return {"ns_per_element": 1e9 * each, "linear": each / base_each, "note": note}


def dtypes(report: Report, sizes: Sizes) -> None:
    """Time fp32, bf16 and fp16 logits, the same numbers rounded."""
    inputs = {}
    for label, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)):
        queries = make_queries(sizes.models, sizes.vocab, dtype=dtype)
        check(queries[0])
        inputs[label] = (queries, sizes.runs(40), {"dtype": label})
    report.say(
        f"dtypes: order {ORDER:g}, radius {RADIUS:g}, {sizes.models} models, {sizes.vocab} tokens, "
        "one query; ratios to fp32"
    )
    _grid(report, "dtypes", inputs, "fp32")


def batches(report: Report, sizes: Sizes) -> None:
    """Time 1, 8 and 64 queries in one call; all figures are per query."""
    inputs = {}
    for positions, runs in ((1, 40), (8, 12), (64, 4)):
        # The 64 queries of the last are larger than any cache by themselves.
        if positions < 64:
            queries = make_queries(sizes.models, sizes.vocab, positions=positions)
        else:
            queries = [make_query(sizes.models, sizes.vocab, positions=positions)]
        check((queries[0][0][:, :2], queries[0][1][:2]))
        inputs[f"batch of {positions}"] = (queries, sizes.runs(runs), {"batch": positions})
    report.say(
        f"batches: order {ORDER:g}, radius {RADIUS:g}, {sizes.models} models, {sizes.vocab} "
        "tokens, fp32; all figures per query"
    )
    _grid(report, "batches", inputs, "batch of 1")


def sizes(report: Report, sizes: Sizes) -> None:
    """Time N and V, to see whether time is linear in N V."""
    numbers, vocabs = ((8, 12, 40), (256, 512)) if sizes.quick else (
        (8, 100, 1000), (32_000, 50_257, 128_256)
    )  # fmt: skip
    inputs = {}
    for models in numbers:
        for vocab in vocabs:
            queries = make_queries(models, vocab)
            check((queries[0][0][:20], queries[0][1]))
            runs = sizes.runs(min(30, max(6, int(2e8 / (models * vocab)))))
            fields = {"models": models, "vocab": vocab}
            inputs[f"N = {models}, V = {vocab}"] = (queries, runs, fields)
    base = f"N = {numbers[1]}, V = {vocabs[1]}"
    report.say(f"sizes: order {ORDER:g}, radius {RADIUS:g}, fp32, one query; ratios to {base}")
    _grid(report, "sizes", inputs, base)
