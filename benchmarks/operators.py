"""Time the operators against torch programs and against reading the logits.

    python -m benchmarks.operators                    # all tables
    python -m benchmarks.operators --only speed       # one or several of them
    python -m benchmarks.operators --out PREFIX       # also PREFIX.txt and PREFIX.json
    python -m benchmarks.operators --quick            # tiny sizes: does everything run?
    python -m benchmarks.operators --device cuda      # the same tables on a GPU

The contestants of a run take turns on inputs in rotation that are larger than the cache. In "speed"
ours are compared with the float64 reference first, and torch programs are marked where their
weights or losses differ. Figures are per query: medians with the fastest and slowest call. GB/s
counts the bytes of the logits once. "floor" is the measured time for reading them twice with the
same threads, as a share of the call's time. In the table of single operators they are read once.

On a GPU, "graph" means replayed CUDA graphs: the time of the GPU alone. Figures without it are of
calls as Python makes them. Draws cannot be captured, since a replay would repeat them.
"""

import argparse
import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.rng import SeededRandom
from adapmixed_ext.low_rank import BLOCK, add_low_rank, blocks_of
from benchmarks.contestants import LOOP, SMART_CONSTANT, Program, Smart, torch_programs
from benchmarks.harness import (
    READ_ONCE,
    READ_TWICE,
    Neighbours,
    Query,
    Report,
    floors,
    headline,
    machine,
    size,
)
from benchmarks.inputs import (
    KINDS,
    ORDER,
    POOL,
    RADIUS,
    check_ours,
    judge,
    make_query,
    pool_mixture,
    pool_token,
    rotation,
    two_calls,
)
from benchmarks.timing import Call, Contestant, Device, interleave

SETTINGS = ((ORDER, RADIUS), (3.0, 0.03), (17.5, 0.03))
EIGHT_ORDERS = (2.0, 4.0, 8.0, 12.0, 18.0, 32.0, 64.0, 128.0)
# The boxes of clip_project: symmetric, and one that lets much through.
BOXES = ((0.6, 1.65), (0.78, 2.72))
SCREEN = {"weight": 1e-4, "order": ORDER, "threshold": 1.0, "top_k": 60}
# What a model of today gives first: the time of a machine may end at any moment.
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
OURS = "ours: two calls, K = 1"
OURS_8 = "ours: two calls, K = 8"
GRAPH = ", graph"
BATCH = 8
ACTIVE, RANK = 8192, 8


class Sizes(NamedTuple):
    """Sizes of the tables that are about one size; ``quick`` shrinks the others too."""

    models: int
    vocab: int
    quick: bool


@dataclass
class Bench:
    """The device, the limits and the report that every table uses.

    Attributes:
        device: the CPU or a GPU.
        until: a ``time.monotonic()``; nothing new begins after it.
        left_out: the runs left out for lack of time, or because the compiler refused them.
        save: writes the results so far, since the program may be ended at any time.
    """

    device: Device
    report: Report
    sizes: Sizes
    until: float = math.inf
    left_out: list[str] = field(default_factory=list)
    save: Callable[[], None] = lambda: None

    def late(self, what: str) -> bool:
        """Return whether the time is over, and say so."""
        if time.monotonic() < self.until:
            return False
        self.leave_out(what, "the time is over")
        return True

    def leave_out(self, what: str, why: object) -> None:
        """Report and keep that there is no figure."""
        first = str(why).strip().partition("\n")[0]
        self.report.say(f"  left out: {what}: {first}")
        self.left_out.append(f"{what}: {first}")

    def queries(
        self, models: int = 0, vocab: int = 0, *, kind: str = "near", positions: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> list[Query]:  # fmt: skip
        """Return queries in rotation, larger than the cache; of the table's size unless given."""
        models, vocab = models or self.sizes.models, vocab or self.sizes.vocab
        count = rotation(dtype.itemsize * models * positions * vocab, self.device.cache)
        more = {"kind": kind, "positions": positions, "dtype": dtype, "device": self.device.device}
        return [make_query(models, vocab, seed=seed, **more) for seed in range(count)]

    def contestants(
        self, calls: Mapping[str, Call], turns: int, drawn: Iterable[str] = ()
    ) -> dict[str, Contestant]:
        """Return calls as Python makes them and, on a GPU, replayed; not those that draw."""
        contestants = {}
        for name, call in calls.items():
            contestants[name] = Contestant(call, turns)
            if self.device.graphs and name not in drawn:
                contestants[name + GRAPH] = Contestant(call, turns, replay=True)
        return contestants

    def run(
        self, table: str, contestants: Mapping[str, Contestant], queries: list[Query], *,
        base: str, floor: str = READ_TWICE, runs: Mapping[str, int] | int = 20, label: str = "",
        extra: Mapping[str, Mapping[str, object]] | None = None, **fields: object,
    ) -> None:  # fmt: skip
        """Time one interleaved run, with the floors, and add it to a table.

        Args:
            base: the contestant of ratios; on a GPU its graph.
            floor: the floor of shares.
            runs: of each contestant; by name, 20 for those without one.
            label: what the names of the rows begin with.
            extra: further fields by contestant.
            fields: further fields of all.
        """
        reads = floors(queries).items()
        whole = dict(contestants) | {
            name: Contestant(call, len(queries), replay=True) for name, call in reads
        }
        counts = dict.fromkeys(whole, 20) | (
            dict.fromkeys(whole, runs) if isinstance(runs, int) else dict(runs)
        )
        if self.sizes.quick:
            counts = dict.fromkeys(whole, 2)
        timings = interleave(self.device, whole, counts, self.leave_out)
        models, positions, vocab = queries[0][0].shape
        peer, least = (
            timings[f"{name}{GRAPH}" if f"{name}{GRAPH}" in timings else name].per(positions)
            for name in (base, floor)
        )
        self.report.head()
        for name, timing in timings.items():
            each = 1e12 * timing.median / (models * positions * vocab)
            more = {"note": f"{each:.2f} ps per element"} | dict((extra or {}).get(name, {}))
            self.report.row(
                table, label + name.removeprefix("ours: " * bool(label)), timing, base=peer,
                floor=least, bytes_read=size(queries[0]) // positions, queries=positions,
                models=models, vocab=vocab, batch=positions, **fields, **more,
            )  # fmt: skip
        self.report.say()
        self.save()
        self.device.forget()


def rotate(queries: list[Query], call: Callable[..., object], *arguments: object) -> Call:
    """Return ``call`` on the query of the turn."""
    return lambda turn: call(queries[turn % len(queries)], *arguments)


def our_calls(queries: list[Query], order: float, radius: float) -> dict[str, Call]:
    """Return the two calls, for one order and for eight."""
    return {
        OURS: rotate(queries, two_calls, order, radius, order),
        OURS_8: rotate(queries, two_calls, order, radius, EIGHT_ORDERS),
    }


def speed(bench: Bench) -> None:
    """Compare with torch programs at two settings, on a GPU a batch of queries, too."""
    quick = bench.sizes.quick
    batches = (1, BATCH) if bench.device.graphs else (1,)
    for (order, radius), positions in itertools.product(SETTINGS[: 1 if quick else None], batches):
        if bench.late(f"speed at order {order:g}, {positions} queries"):
            continue
        programs = torch_programs(
            order, radius, bench.queries(positions=positions)[0],
            backend="eager" if quick else "inductor", refused=bench.leave_out,
        )  # fmt: skip
        for kind in KINDS if positions == 1 else ("near",):
            if kind != "near" or positions > 1:
                # The loop takes one query, says nothing new here and would take most of the time.
                programs.pop(LOOP, None)
            if not bench.late(f"speed at order {order:g}, {kind} inputs"):
                queries = bench.queries(kind=kind, positions=positions)
                _compare(bench, kind, queries, order, radius, programs)


def _compare(
    bench: Bench, kind: str, queries: list[Query], order: float, radius: float,
    programs: dict[str, Program],
) -> None:  # fmt: skip
    check_ours(queries[0], order, radius)
    projection, loss = two_calls(queries[0], order, radius, order)
    weight = projection.weight
    extra = {name: judge(p(*queries[0]), weight, loss[..., 0]) for name, p in programs.items()}
    extra |= {name + GRAPH: fields for name, fields in extra.items()}
    contestants = {}
    for name, program in programs.items():
        turn = rotate(queries, lambda query, p: p(*query), program)
        contestants[name] = Contestant(turn, len(queries))
        if bench.device.graphs and name == SMART_CONSTANT:
            # It looks at its weights to save a solve. A graph cannot: it is told.
            backward = any(Smart().backward(*query, order, radius) for query in queries)
            turn = rotate(queries, lambda query, p, back: p(*query, back), program, backward)
            contestants[name + GRAPH] = Contestant(turn, len(queries), replay=True)
    contestants |= bench.contestants(our_calls(queries, order, radius), len(queries))
    bench.report.say(
        f"speed: order {order:g}, radius {radius:g}, {kind} inputs (weights "
        f"{float(weight.min()):.3g} to {float(weight.max()):.3g}), {len(queries[0][0])} models, "
        f"{bench.sizes.vocab} tokens, fp32, {len(queries[0][1])} queries in a call"
    )
    runs = {n: 3 if n == LOOP else 10 if n in programs else 30 for n in contestants}
    bench.run(
        "speed", contestants, queries, base=OURS, runs=runs, extra=extra, kind=kind, order=order,
        radius=radius,
    )  # fmt: skip


def _grid(bench: Bench, table: str, shapes: Iterable[tuple[str, int, int, int]]) -> None:
    """Time the two calls for each (dtype, N, V, B)."""
    for dtype, models, vocab, positions in shapes:
        label = f"{dtype}, N = {models}, V = {vocab}, B = {positions}"
        if bench.late(f"{table}: {label}"):
            continue
        queries = bench.queries(models, vocab, positions=positions, dtype=DTYPES[dtype])
        contestants = bench.contestants(our_calls(queries, ORDER, RADIUS), len(queries))
        bench.report.say(f"{table}: {label}")
        bench.run(table, contestants, queries, base=OURS, label=f"{dtype}, ", dtype=dtype)


def dtypes(bench: Bench) -> None:
    """Time bf16, fp32 and fp16 logits, on a GPU 8 queries in one call."""
    models, vocab, _ = bench.sizes
    positions = BATCH if bench.device.graphs else 1
    _grid(bench, "dtypes", ((dtype, models, vocab, positions) for dtype in DTYPES))


def batches(bench: Bench) -> None:
    """Time 8, 1 and 64 queries in one call."""
    models, vocab, _ = bench.sizes
    each = itertools.product(("bf16", "fp32"), (8, 1, 64))
    _grid(bench, "batches", ((dtype, models, vocab, count) for dtype, count in each))


def sizes(bench: Bench) -> None:
    """Time one query against N and V, to see whether time is linear in N V."""
    numbers, vocabs = (8, 100, 1000), (4_097, 32_000, 50_257, 128_256)
    if bench.sizes.quick:
        numbers, vocabs = (8, 12, 40), (256, 512, 700)
    _grid(bench, "sizes", (("fp32", *shape, 1) for shape in itertools.product(numbers, vocabs)))


def pools(bench: Bench) -> None:
    """Time `log_pool`, `mixture` and `sample`, the path to a token of the clipped pool."""
    for dtype, positions in itertools.product(("bf16", "fp32"), (8, 1)):
        label = f"{dtype}, B = {positions}"
        if bench.late(f"pools: {label}"):
            continue
        queries = bench.queries(positions=positions, dtype=DTYPES[dtype])
        mixed, drawn = "log_pool + mixture", "log_pool + mixture + sample"
        calls = {
            mixed: rotate(queries, pool_mixture),
            drawn: rotate(queries, pool_token, SeededRandom(0)),
        }
        contestants = bench.contestants(calls, len(queries), {drawn})
        bench.report.say(f"pools: {label}")
        bench.run("pools", contestants, queries, base=mixed, label=f"{dtype}, ", dtype=dtype)


def members(bench: Bench) -> None:
    """Time members of the output layer on K tokens against reading those tokens' factors once."""
    few, vocab, quick = bench.sizes
    active, device = vocab // 4 if quick else ACTIVE, bench.device.device
    generator = torch.Generator().manual_seed(4)
    batches = (1, BATCH, 64) if bench.device.graphs else (1, BATCH)
    for models, positions in itertools.product((few, 10 * few), batches):
        label = f"N = {models}, K = {active}, B = {positions}"
        if bench.late(f"members: {label}"):
            continue
        shape, turns = (blocks_of(models), RANK, BLOCK), max(2, 8 // positions)
        order = torch.rand(turns, positions, vocab, generator=generator).argsort(-1)
        tokens = order[..., :active].sort(-1).values.to(device)
        factors = torch.empty(vocab, *shape, dtype=torch.bfloat16, device=device).normal_()
        codes = torch.empty(positions, *shape, device=device).normal_()
        start = torch.empty(positions, active, device=device).normal_()
        inputs = start, codes, factors, torch.empty(models, positions, active, device=device)
        turn = [partial(add_low_rank, *inputs, ids) for ids in tokens]
        calls = {"add_low_rank": lambda at, turn=turn: turn[at % len(turn)]()}
        # As many bytes as these rows have.
        rows = factors.new_ones(codes[0].numel(), positions, active), start.bfloat16()
        bench.report.say(f"members: {label}, r = {RANK}, bf16")
        bench.run("members", bench.contestants(calls, turns), [rows] * 2, base="add_low_rank",
                  floor=READ_ONCE, rank=RANK)  # fmt: skip


def operators(bench: Bench) -> None:
    """Time every operator by itself on one query, and what a perplexity and a token need."""
    queries, rng = bench.queries(), SeededRandom(0)
    device = queries[0][0].device

    def gaussian() -> Tensor:
        return ops.gaussian((1, SCREEN["top_k"]), sigma=0.01, rng=rng, device=device)

    noise = gaussian()
    inputs = []
    for query in queries:
        projection = ops.project(*query, order=ORDER, radius=RADIUS)
        pool = ops.log_pool(*query, **POOL)
        inputs.append((query, projection, ops.mixture(*query, projection), pool))
    target = queries[0][1].argmax(-1)

    def each(call: Callable[..., object]) -> Call:
        return lambda turn: call(*inputs[turn % len(inputs)])

    def score(query: Query, *_: object) -> Tensor:
        projection = ops.project(*query, order=ORDER, radius=RADIUS)
        return ops.log_prob(*query, projection, target)

    def draw(query: Query, *_: object) -> Tensor:
        projection = ops.project(*query, order=ORDER, radius=RADIUS)
        return ops.sample(ops.mixture(*query, projection), query[1], rng=rng)

    def loss(orders: object, adjacency: str) -> Call:
        return each(
            lambda q, ball, *_: ops.leave_one_out(*q, ball, orders=orders, adjacency=adjacency)
        )

    def clip(box: tuple[float, float], orders: float | None) -> Call:
        return each(lambda q, *_: ops.clip_project(*q, lower=box[0], upper=box[1], orders=orders))

    calls: dict[str, Call] = {
        "log_sum_exp": each(lambda q, *_: torch.ops.adapmixed.log_sum_exp(q[0], "private_logits")),
        "project": each(lambda q, *_: ops.project(*q, order=ORDER, radius=RADIUS)),
        **{
            f"clip_project [{box[0]:g}, {box[1]:g}]{words}": clip(box, orders)
            for box in BOXES
            for orders, words in ((None, ""), (ORDER, ", charges"))
        },
        "leave_one_out": loss(ORDER, "add_remove"),
        "leave_one_out, K = 8": loss(EIGHT_ORDERS, "add_remove"),
        "leave_one_out, zero-out": loss(ORDER, "zero_out"),
        "mixture": each(lambda q, ball, *_: ops.mixture(*q, ball)),
        "log_prob": each(lambda q, ball, *_: ops.log_prob(*q, ball, target)),
        "log_pool": each(lambda q, *_: ops.log_pool(*q, **POOL)),
        "mixture of a LogPool": each(lambda q, _ball, _p, pool: ops.mixture(*q, pool)),
        "screen": each(lambda q, *_: ops.screen(*q, noise, **SCREEN)),
        "renyi_divergence (N rows)": each(lambda q, *_: ops.renyi_divergence(*q, ORDER)),
        "evaluation: project + log_prob": each(score),
        "sampling: project + mixture + sample": each(draw),
        "sample": each(lambda q, _ball, p, _pool: ops.sample(p, q[1], rng=rng)),
        "gaussian (k = 60)": lambda turn: gaussian(),
    }
    contestants = bench.contestants(calls, len(queries), list(calls)[-3:])
    bench.report.say(
        f"operators: order {ORDER:g}, radius {RADIUS:g}, {len(queries[0][0])} models, "
        f"{bench.sizes.vocab} tokens, fp32, one query; log_prob, sample and gaussian hardly read "
        "logits"
    )
    bench.run("operators", contestants, queries, base=READ_ONCE, floor=READ_ONCE, runs=30)


# The comparison comes last, since compiling its contestants may take all the time there is.
TABLES = {f.__name__: f for f in (dtypes, pools, batches, members, operators, sizes, speed)}


def measure(bench: Bench, only: list[str]) -> list[str]:
    """Measure tables; return those that failed, which do not end the others."""
    failed: list[str] = []
    for name in only:
        try:
            if not bench.late(name):
                TABLES[name](bench)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            bench.report.say(f"FAILED: {name}: {str(error).strip().partition(chr(10))[0]}\n")
            failed.append(name)
    if "speed" in only and bench.left_out:  # a comparison must be whole
        bench.report.say("FAILED: speed: something was left out\n")
        failed.append("speed")
    return failed


def main() -> int:
    """Measure and print the tables, and write them if asked; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="TABLE",
                        help=f"of {', '.join(TABLES)}")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dry-run", action="store_true",
                        help="--device cuda on the CPU: does it run?")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=math.inf,
                        help="nothing new begins after so many")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few runs, no meaning")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    arguments = parser.parse_args()
    device = Device(arguments.device, arguments.dry_run)
    if arguments.device == "cpu":
        torch.set_num_threads(2)
    quick = arguments.quick
    sizes = Sizes(6, 512, True) if quick else Sizes(100, 50257, False)
    about = machine()
    until = time.monotonic() + arguments.seconds
    bench = Bench(device, Report(unit="µs" if device.graphs else "ms"), sizes, until)
    if device.graphs:
        about["gpu"] = device.about()
        bench.report.say("{name}, driver {driver}, CUDA {cuda}".format(**about["gpu"]))
    bench.report.say(f"{headline(about)}\n")
    neighbours = Neighbours()

    def save(complete: bool = False, others: float | None = None) -> None:
        if arguments.out is not None:
            bench.report.write(arguments.out, machine=about, quick=quick, complete=complete,
                               left_out=bench.left_out, others=others)  # fmt: skip

    bench.save = save
    failed = measure(bench, arguments.only)
    save(not failed and not bench.left_out, bench.report.others(neighbours))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
