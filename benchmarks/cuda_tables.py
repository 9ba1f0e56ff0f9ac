"""The tables on a GPU: ``python -m benchmarks.operators --device cuda``.

The same tables as on the CPU. "graph" means replayed CUDA graphs: the time of the GPU alone.
Figures without it are of calls one after the other, as Python makes them. All figures are per
query. Draws cannot be captured, since a replay would repeat them.
"""

import math
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence

import torch

import adapmixed_ext
from adapmixed.rng import SeededRandom
from benchmarks.calls import draw, evaluate, rotate, two_calls
from benchmarks.contestants import (
    CONSTANT,
    EAGER,
    LOOP,
    RUN_TIME,
    SMART,
    SMART_CONSTANT,
    Program,
    Smart,
    torch_programs,
)
from benchmarks.cuda_bench import GRAPH, Bench, base_of, ours
from benchmarks.cuda_grids import batches, dtypes, pools, sizes
from benchmarks.cuda_timing import Card, Contestant, card_floors
from benchmarks.harness import READ_ONCE, READ_TWICE, Query, Report, size
from benchmarks.inputs import KINDS, few, judge
from benchmarks.scaling import (
    ORDER,
    RADIUS,
    SCREEN,
    Sizes,
    check,
    check_setting,
    check_single,
    single_calls,
)

# (order, radius, kinds of input): the compiler takes minutes for each pair of the first two.
SETTINGS = ((18.0, 3.6, tuple(KINDS)), (3.0, 0.03, tuple(KINDS)), (17.5, 3.6, ("near",)))
BATCH = 8
# Without these, for one query and for a batch, a run has not compared anything and fails.
PEERS = (EAGER, CONSTANT, SMART, SMART_CONSTANT)


def _programs(
    queries: list[Query], programs: Mapping[str, Program], order: float, radius: float
) -> dict[str, Contestant]:
    """Return the torch programs as called, and the compiled ones replayed."""
    # The smart one looks at its weights to save a solve. A graph cannot: it is told.
    backward = any(Smart().backward(*query, order, radius) for query in queries)
    result = {}
    for name, program in programs.items():
        result[name] = Contestant(
            rotate(queries, lambda query, program: program(*query), program), len(queries)
        )
        if name in (RUN_TIME, CONSTANT, SMART_CONSTANT):
            known = (backward,) if name == SMART_CONSTANT else ()
            turn = rotate(queries, lambda query, p, known: p(*query, *known), program, known)
            result[name + GRAPH] = Contestant(turn, len(queries), replay=True)
    return result


def speed(bench: Bench) -> None:
    """Time all contestants at the first setting: one query, and a batch of them; fp32."""
    _settings(bench, SETTINGS[:1])
    _batch(bench, *SETTINGS[0][:2])


def more_speed(bench: Bench) -> None:
    """Time the other settings, without the programs that are slow everywhere."""
    if not bench.sizes.quick:
        _settings(bench, SETTINGS[1:])


def _settings(bench: Bench, settings: Sequence[tuple[float, float, tuple[str, ...]]]) -> None:
    models, vocab, quick = bench.sizes
    for order, radius, kinds in settings:
        if bench.late(f"speed at order {order:g}"):
            continue
        inputs = {kind: bench.queries(models, vocab, kind=kind) for kind in kinds}
        programs, seconds = torch_programs(
            order, radius, inputs["near"][0], backend="eager" if quick else "inductor",
            refused=bench.leave_out,
        )  # fmt: skip
        for kind, queries in inputs.items():
            if bench.late(f"speed at order {order:g}, {kind} inputs"):
                continue
            whole = order == SETTINGS[0][0] and kind == "near"
            some = {n: p for n, p in programs.items() if whole or n not in (LOOP, RUN_TIME)}
            _compare(bench, kind, queries, order, radius, some)
        _tell_compilation(bench, seconds, order, radius, batch=1)


def _tell_compilation(
    bench: Bench, seconds: Mapping[str, float], order: float, radius: float, *, batch: int
) -> None:
    for name, taken in seconds.items():
        bench.report.say(f"  first call of '{name}', which compiles it: {taken:.1f} s")
        row = {"name": name, "order": order, "radius": radius, "batch": batch, "seconds": taken}
        bench.report.tables.setdefault("compilation", []).append(row)
    bench.report.say()


def _batch(bench: Bench, order: float, radius: float) -> None:
    """Time our calls and the torch programs that take several queries, on near inputs."""
    if bench.late(f"speed, {BATCH} queries in one call"):
        return
    models, vocab, quick = bench.sizes
    queries = bench.queries(models, vocab, positions=BATCH)
    first = queries[0]
    programs, seconds = torch_programs(
        order, radius, first, backend="eager" if quick else "inductor", refused=bench.leave_out,
        only=PEERS,
    )  # fmt: skip
    check((few(first[0]), first[1]))
    projection, loss = two_calls(first, order, radius, order)
    # Ours were just held to the reference: they are what the torch programs are judged by.
    truth = projection.weight.cpu(), loss[..., 0].cpu()
    extra = {name: judge(p(*first), *truth) for name, p in programs.items()}
    extra |= {name + GRAPH: fields for name, fields in extra.items()}
    contestants = _programs(queries, programs, order, radius)
    contestants |= ours(queries, order, radius) | card_floors(queries)
    timings = bench.time(contestants, {n: 10 if n in programs else 30 for n in contestants})
    bench.report.say(
        f"speed: order {order:g}, radius {radius:g}, near inputs, {models} models, {vocab} "
        f"tokens, fp32, {BATCH} queries in one call; figures per query"
    )
    bench.report.head()
    base, floor = (timings[n].per(BATCH) for n in (base_of(timings), READ_TWICE))
    for name, timing in timings.items():
        bench.report.row(
            "speed", name, timing, base=base, floor=floor, bytes_read=size(first) // BATCH,
            queries=BATCH, kind="near", order=order, radius=radius, models=models, vocab=vocab,
            batch=BATCH, **extra.get(name, {}),
        )  # fmt: skip
    bench.report.say()
    _tell_compilation(bench, seconds, order, radius, batch=BATCH)
    bench.save()
    del contestants, queries
    bench.card.forget()


def _not_compared(report: Report) -> list[str]:
    """Return the torch programs that the speed table lacks."""
    rows = report.tables.get("speed", [])
    seen = {(row["name"], row["batch"]) for row in rows}
    return [
        f"'{name}' on {batch} quer{'y' if batch == 1 else 'ies'}"
        for batch in (1, BATCH)
        for name in PEERS
        if (name, batch) not in seen
    ]


def _compare(
    bench: Bench, kind: str, queries: list[Query], order: float, radius: float,
    programs: dict[str, Program],
) -> None:  # fmt: skip
    first, sizes = queries[0], bench.sizes
    weight, truth = check_setting(first, order, radius)
    extra = {name: judge(p(*first), weight, truth) for name, p in programs.items()}
    extra |= {name + GRAPH: fields for name, fields in extra.items()}
    contestants = _programs(queries, programs, order, radius)
    contestants |= ours(queries, order, radius) | card_floors(queries)
    runs = {n: 3 if n == LOOP else 10 if n in programs else 30 for n in contestants}
    timings = bench.time(contestants, runs)
    bench.report.say(
        f"speed: order {order:g}, radius {radius:g}, {kind} inputs (weights "
        f"{float(weight.min()):.3g} to {float(weight.max()):.3g}), {sizes.models} models, "
        f"{sizes.vocab} tokens, fp32, one query"
    )
    bench.report.add(
        "speed", timings, base=base_of(timings), floor=READ_TWICE, bytes_read=size(first),
        extra=extra, kind=kind, order=order, radius=radius, models=sizes.models,
        vocab=sizes.vocab, batch=1,
    )  # fmt: skip
    bench.save()


def operators(bench: Bench) -> None:
    """Time every operator by itself on one query."""
    models, vocab, _ = bench.sizes
    queries, rng = bench.queries(models, vocab), SeededRandom(0)
    shape, device = (1, SCREEN["top_k"]), bench.card.device
    noise = adapmixed_ext.gaussian(shape, sigma=0.01, rng=rng, device=device)
    check(queries[0])
    check_single(queries[0], noise)
    calls = single_calls(queries, noise, rng)
    calls["gaussian (k = 60)"] = lambda turn: adapmixed_ext.gaussian(
        shape, sigma=0.01, rng=rng, device=device
    )
    contestants = {}
    for name, call in calls.items():
        contestants[name] = Contestant(call, len(queries))
        if not name.startswith(("sample", "gaussian")):
            contestants[name + GRAPH] = Contestant(call, len(queries), replay=True)
    contestants |= card_floors(queries)
    timings = bench.time(contestants, dict.fromkeys(contestants, 30))
    bench.report.say(
        f"operators: order {ORDER:g}, radius {RADIUS:g}, {models} models, {vocab} tokens, fp32, "
        "one query; log_prob, sample and gaussian hardly read logits"
    )
    bench.report.add(
        "operators", timings, base=READ_ONCE, floor=READ_ONCE, bytes_read=size(queries[0]),
        order=ORDER, radius=RADIUS, models=models, vocab=vocab,
    )  # fmt: skip


def evaluation(bench: Bench) -> None:
    """Time the path to log p(target) and the path to a token, one query."""
    models, vocab, _ = bench.sizes
    queries, rng = bench.queries(models, vocab), SeededRandom(0)
    check(queries[0])
    target = torch.tensor([7], device=bench.card.device)
    sampling, scoring = "sampling: project + mixture + sample", "evaluation: project + log_prob"
    score = rotate(queries, evaluate, ORDER, RADIUS, target)
    contestants = {
        sampling: Contestant(rotate(queries, draw, ORDER, RADIUS, rng), len(queries)),
        scoring: Contestant(score, len(queries)),
        scoring + GRAPH: Contestant(score, len(queries), replay=True),
    } | card_floors(queries)
    timings = bench.time(contestants, dict.fromkeys(contestants, 30))
    bench.report.say("evaluation: what a perplexity needs and what a token needs, one query")
    bench.report.add(
        "evaluation", timings, base=sampling, floor=READ_TWICE, bytes_read=size(queries[0]),
        order=ORDER, radius=RADIUS, models=models, vocab=vocab,
    )  # fmt: skip


# First what needs no torch program compiled; the comparison, which a run must have; its other
# settings last, since compiling the contestants for them may take all the time there is.
TABLES: tuple[tuple[str, Callable[[Bench], None]], ...] = (
    ("dtypes", dtypes),
    ("pools", pools),
    ("batches", batches),
    ("speed", speed),
    ("operators", operators),
    ("evaluation", evaluation),
    ("sizes", sizes),
    ("speed", more_speed),
)


def run(options: Namespace, shape: Sizes, about: dict[str, object]) -> int:
    """Measure and print the tables, write the results after each, and return the exit status.

    A table that fails, or whose results differ from the reference, does not end the others. The
    status is 1 in that case, and if the speed table lacks one of the ``PEERS``.
    """
    card = Card(options.dry_run)
    until = time.monotonic() + options.seconds if options.seconds else math.inf
    bench = Bench(card, Report(unit="µs"), shape, until)
    say, gpu = bench.report.say, card.about()
    say(f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}; {about['cpu']}")
    say(
        f"adapmixed {about['adapmixed']}, torch {about['torch']}, Python {about['python']}, commit "
        f"{str(about['commit'])[:12]}{' with changes' if about['dirty'] else ''}\n"
    )
    chosen = [(name, table) for name, table in TABLES if name in options.only]
    begun: list[str] = []
    failed: list[str] = []

    def save(finished: bool = False) -> None:
        if options.out is not None:
            bench.report.write(
                options.out, machine=about | {"gpu": gpu}, quick=shape.quick, dry=card.dry,
                complete=finished and not failed and not bench.left_out, begun=begun,
                left_out=bench.left_out, failed=failed,
            )  # fmt: skip

    bench.save = save
    for k, (name, table) in enumerate(chosen):
        if name not in begun:
            begun.append(name)
        try:
            if not bench.late(name):
                table(bench)
                card.forget()
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            say(f"FAILED: {name}: {str(error).strip().partition(chr(10))[0]}\n")
            failed.append(name)
        last = k == len(chosen) - 1
        if last and "speed" in begun and (lacking := _not_compared(bench.report)):
            say(f"FAILED: speed: not compared with {', '.join(lacking)}\n")
            failed.append("speed")
        save(finished=last)
    return int(bool(failed))
