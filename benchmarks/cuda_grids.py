"""Tables on a GPU over dtypes, batches and sizes, of our calls and the floors alone."""

from collections.abc import Mapping

import torch

from adapmixed.rng import SeededRandom
from benchmarks.calls import rotate
from benchmarks.cuda_bench import GRAPH, Bench, base_of, ours
from benchmarks.cuda_timing import COPY, Contestant, card_floors
from benchmarks.harness import READ_TWICE, size
from benchmarks.scaling import ORDER, RADIUS, check, check_pool, pool_mixture, pool_token

# What a model of today gives first: the time of a machine may end at any moment.
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def _grid(
    bench: Bench, table: str, inputs: Mapping[str, tuple[dict[str, int], str, dict[str, object]]]
) -> None:
    """Time one run for each (shape, dtype, fields): our calls, replayed and called, and floors."""
    bench.report.head()
    for label, (shape, dtype, fields) in inputs.items():
        positions = shape.get("positions", 1)
        numbers = shape["models"] * shape["vocab"] * positions
        if not bench.card.holds(numbers * DTYPES[dtype].itemsize):
            bench.leave_out(label, "it does not fit the memory of the card")
            continue
        if bench.late(f"{table}: {label}"):
            continue
        queries = bench.queries(**shape, dtype=DTYPES[dtype])
        check((queries[0][0][:20, :2], queries[0][1][:2]))
        contestants = ours(queries, ORDER, RADIUS) | card_floors(queries)
        del contestants[COPY]
        timings = bench.time(contestants, dict.fromkeys(contestants, 20))
        base, floor = (timings[n].per(positions) for n in (base_of(timings), READ_TWICE))
        for name, timing in timings.items():
            each = 1e12 * timing.median / numbers
            short = name.removeprefix("ours: ").replace("reading the logits", "reading")
            bench.report.row(
                table, f"{label}, {short}", timing, base=base, floor=floor,
                bytes_read=size(queries[0]) // positions, queries=positions,
                ps_per_element=each, note=f"{each:.2f} ps per element", dtype=dtype, **fields,
            )  # fmt: skip
        del queries, contestants
        bench.card.forget()
    bench.report.say()


def dtypes(bench: Bench) -> None:
    """Time fp32, bf16 and fp16 logits, 8 queries in one call."""
    shape = {"models": bench.sizes.models, "vocab": bench.sizes.vocab, "positions": 8}
    bench.report.say("dtypes: 8 queries in one call; figures per query, ratios within a dtype")
    _grid(bench, "dtypes", {f"{name}, B = 8": (shape, name, {"batch": 8}) for name in DTYPES})


def batches(bench: Bench) -> None:
    """Time 8, 1 and 64 queries in one call."""
    shape = {"models": bench.sizes.models, "vocab": bench.sizes.vocab}
    inputs = {
        f"{name}, B = {positions}": (shape | {"positions": positions}, name, {"batch": positions})
        for name in ("bf16", "fp32")
        for positions in (8, 1, 64)
    }
    bench.report.say("batches: figures per query, ratios within a batch")
    _grid(bench, "batches", inputs)


def pools(bench: Bench) -> None:
    """Time `log_pool`, `mixture` and `sample`, the path to a token of the clipped pool."""
    bench.report.say("pools: log_pool + mixture, and with sample; figures per query")
    bench.report.head()
    for name in ("bf16", "fp32"):
        for positions in (8, 1):
            label = f"{name}, B = {positions}"
            if bench.late(f"pools: {label}"):
                continue
            queries = bench.queries(
                bench.sizes.models, bench.sizes.vocab, positions=positions, dtype=DTYPES[name]
            )
            check_pool((queries[0][0][:20, :2], queries[0][1][:2]))
            token = rotate(queries, pool_token, SeededRandom(0))
            mixed = Contestant(rotate(queries, pool_mixture), len(queries), replay=True)
            contestants = {
                f"log_pool + mixture{GRAPH}": mixed,
                "log_pool + mixture + sample": Contestant(token, len(queries)),
            } | card_floors(queries)
            del contestants[COPY]
            timings = bench.time(contestants, dict.fromkeys(contestants, 20))
            base, floor = (timings[n].per(positions) for n in (next(iter(timings)), READ_TWICE))
            for contestant, timing in timings.items():
                bench.report.row(
                    "pools", f"{label}, {contestant}", timing, base=base, floor=floor,
                    bytes_read=size(queries[0]) // positions, queries=positions, dtype=name,
                    batch=positions,
                )  # fmt: skip
            bench.save()
            del queries, contestants
            bench.card.forget()
    bench.report.say()


def sizes(bench: Bench) -> None:
    """Time one query against N and V."""
    numbers, vocabs = ((8, 12, 40), (256, 512)) if bench.sizes.quick else (
        (8, 100, 1000), (32_000, 50_257, 128_256)
    )  # fmt: skip
    inputs = {}
    for models in numbers:
        for vocab in vocabs:
            shape = {"models": models, "vocab": vocab}
            inputs[f"N = {models}, V = {vocab}"] = (shape, "fp32", {**shape})
    bench.report.say("sizes: one query in fp32; ratios within a size")
    _grid(bench, "sizes", inputs)
