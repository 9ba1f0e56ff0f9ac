"""What the machine code of the CUDA kernels says about their speed, without a GPU.

    python -m benchmarks.cuda_static --objects build/cuda --out benchmarks/results/cuda-static.txt

For the hot loops of HOT it prints how many instructions a trip issues for each element, and for
each kernel its registers and memory. From these and from assumed latencies it estimates the time of
a query. `make cuda` compiles the objects; they must have lines of source (-lineinfo).

A loop's trip is the path from its first block back to it which handles most elements with the
fewest instructions: blocks that are branched around do not count. Of loops in each other the
innermost one counts that has the elements. If the compiler has made several loops of one, the loop
with most elements a trip counts. Elements are counted in the machine code:
the bytes that the statement `element` loads in a trip, or the number of `operation` there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import sass
from benchmarks.sass import Code, Instruction, Tools, Usage

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"bf16": ("LNS_5DtypeE1E", 2), "fp32": ("LNS_5DtypeE0E", 4)}
ARCHITECTURES = ("sm_90", "sm_100")
ALL_ARCHITECTURES = ("sm_80", *ARCHITECTURES)
BARS = Path(__file__).with_name("cuda_static_bars.json")
# An H200 under load.
PROCESSORS, CLOCK, BANDWIDTH = 132, 1.7e9, 0.9 * 4.8e12
# Cycles of a load from memory and from the L2 cache, and seconds that a launch adds to a chain.
FROM_MEMORY, FROM_CACHE, LAUNCH = 650.0, 280.0, 1e-6
SHARED_A_PROCESSOR, REGISTERS_A_PROCESSOR, MOST_WARPS, MOST_BLOCKS = 227 * 1024, 65536, 64, 32


@dataclass(frozen=True)
class Shape:
    models: int = 100
    positions: int = 8
    vocab: int = 50_257
    size: int = 2  # bytes of a logit

    @property
    def rows(self) -> int:
        return self.models * self.positions


Statement = tuple[str, str]  # a file of csrc, and how a statement of it begins


@dataclass(frozen=True)
class Hot:
    """A hot loop: where it is, what an element is, and how much of it a call does.

    Attributes:
        operator: call that runs it.
        name: what it does; unique within the operator.
        kernel: part of the kernel's mangled name; "{dtype}" stands for that of the dtype.
        within: statements whose instructions the loop holds: the loop itself, and for a loop of a
            shared function the call.
        element: statement that reads the elements, or that has `operation`.
        size: bytes of an element; 0: those of a logit.
        operation: pattern of an operation, each of which is one element, instead of the loads.
        loads: what reads elements: global and generic loads unless said otherwise.
        work: statement that a hot trip executes, if a shorter trip may leave it out.
        blocks, threads: what is launched; threads without work in the loop do not count.
        elements: elements of one thread.
        dynamic: dynamic shared memory of a block.
        first_read: whether the elements come from memory, not from the L2 cache.
        scattered: whether the other loads of the loop miss the L1 cache, too.
        goal: instructions an element that are wanted.
    """

    operator: str
    name: str
    kernel: str
    within: tuple[Statement, ...]
    element: Statement
    blocks: Callable[[Shape], int]
    threads: int
    elements: Callable[[Shape], float]
    size: int = 0
    operation: str = ""
    loads: tuple[str, ...] = ("LDG", "LD")
    work: Statement | None = None
    dynamic: Callable[[Shape], int] = lambda shape: 0
    first_read: bool = False
    scattered: bool = False
    goal: float | None = None


PARTS, POOL = "common/row_parts.cuh", "log_pool/cuda_sums.cuh"
FLOATS, LISTS = "project/cuda_floats.cuh", "project/cuda_block_lists.cuh"
LOSS_DEVIATIONS = "leave_one_out/cuda_float_deviations.cuh"
LOSS_MOMENTS = "leave_one_out/cuda_float_moments.cuh"
DOUBLE, MOMENTS = "sums: deviations in double", "sums: moments, degree 10"
TILE = 224  # tokens at N = 100


def loss_shared(shape: Shape) -> int:
    return max(64 * TILE, 16 * shape.models) + 12 * TILE + 4 * shape.models * (TILE + 4)


def tiles(shape: Shape) -> int:
    return -(-shape.vocab // TILE)


HOT = (
    *(
        Hot(
            operator, name, "row_parts_kernelI{dtype}" + look,
            ((PARTS, "for (int at = lane_id(); at < length; at += kStretch) {"),),
            (PARTS, "load_tokens<D>(row + at, size - at, z);"),
            lambda s: s.positions * -(-(1 + s.models) // 8) * -(-s.vocab // 2048),
            256, lambda s: 2048 / 32,
            work=(PARTS, "total = exp_from.add(total, z[k]);"), first_read=True,
            goal=goal,
        )
        for operator, name, look, goal in (
            ("project", "rows: log-sum-exps and scores", "NS0_9ScoreLookE", 16),
            ("project", "small targets: log-sum-exps", "NS0_6NoLookE", 16),
            ("log_pool", "rows: log-sum-exps and spans", "NS0_8PoolLookE", None),
        )
    ),
    Hot(
        "project", "lists: largest scores", "project_kernelI{dtype}Lb1E",
        ((LISTS, "for (int first = warp_id(); first < items;"),),
        (LISTS, "const std::uint32_t word ="),
        lambda s: s.rows, 64, lambda s: s.vocab / 32 / 64, size=4,
    ),
    Hot(
        "project", "small targets: moments", "project_kernelI{dtype}Lb0E",
        ((FLOATS, "for (int v = first; v < vocab_; v += stride) {"),
         (FLOATS, "for_each([&](const float* z, const float* z0,")),
        (FLOATS, "second += w;"),
        lambda s: s.rows, 384, lambda s: s.vocab / 384, operation="FADD", scattered=True,
    ),
    Hot(
        "leave_one_out", "sums: deviations", "float_sums_kernelI{dtype}",
        ((LOSS_DEVIATIONS, "for (int k = 2 * kModelsAtOnce; k <= count; k += kModelsAtOnce)"),),
        (LOSS_DEVIATIONS, "if (kWhole || g < count) column[g * pitch] = e[g];"),
        lambda s: tiles(s) * s.positions, TILE, lambda s: s.models, operation="STS",
        dynamic=loss_shared, scattered=True, first_read=True, goal=30,
    ),
    Hot(
        "leave_one_out", MOMENTS, "float_sums_kernelI{dtype}",
        ((LOSS_MOMENTS, "for (int k = 0; k < kBurst; k += 4, ++tokens, deviations += 4)"),
         (LOSS_MOMENTS, "add_burst<false>(tile.tokens"), (LOSS_MOMENTS, "add_moments<10>(tile")),
        (LOSS_MOMENTS, "float power = p * fourth;"),
        lambda s: tiles(s) * s.positions, 128, lambda s: TILE, operation="FMUL",
        dynamic=loss_shared, goal=20,
    ),
    Hot(
        "leave_one_out", DOUBLE, "float_sums_kernelI{dtype}",
        ((LOSS_DEVIATIONS, "for (int first = 0; first < count; first += kAtOnce"),),
        (LOSS_DEVIATIONS, "*column = static_cast<float>(e);"),
        lambda s: tiles(s) * s.positions, TILE, lambda s: s.models, operation="STS",
        dynamic=loss_shared, scattered=True,
    ),
    Hot(
        "leave_one_out", "totals over chunks", "float_finish_kernelILi2E",
        (("leave_one_out/cuda_float_finish.cuh", "for (int first = warp_id(); first < chunks;"),),
        ("leave_one_out/cuda_float_finish.cuh", "own[j] = present ? *reinterpret_cast"),
        lambda s: -(-(s.models * 22 + 6) // 32) * s.positions, 256, lambda s: tiles(s) / 8, size=8,
    ),
    *(
        Hot(
            "log_pool", name, "pool_sums_kernelI{dtype}",
            ((POOL, "if (row < cut.rows) sum = row_sum<1>(parts, cut.count);"), (PARTS, loop)),
            (PARTS, element), lambda s: -(-s.vocab // 256) * s.positions, 256,
            lambda s: -(-s.vocab // 2048), size=size,
        )
        for name, loop, element, size in (
            ("sums: largest of a row's parts", "const RowPart part = parts[k];",
             "const RowPart part = parts[k];", 8),
            ("sums: a row's parts", "total[0] = vfma(parts[k].sum",
             "total[0] = vfma(parts[k].sum", 12),
        )
    ),
    Hot(
        "log_pool", "sums over models", "pool_sums_kernelI{dtype}",
        ((POOL, "for (int i = warp_id(); i < count; i += kPoolWarps) {"),),
        (POOL, "next[k] = there ? own[k * kWarp]"),
        lambda s: -(-s.vocab // 256) * s.positions, 256, lambda s: 1 + s.models,
        work=(POOL, "for (int k = 0; k < kPoolTokens; ++k) sums[k] += bit_cast"),
    ),
    Hot(
        "sample", "weights", "sample_kernelI{dtype}",
        (("sample/cuda.cu", "for (std::int64_t v = begin; v < end; ++v) {"),),
        ("sample/cuda.cu", "const double p = row.p[v];"),
        lambda s: -(-s.vocab // 2048) * s.positions, 256, lambda s: 8.0, size=8,
        work=("sample/cuda.cu", "weight += integer_weight(p);"),
    ),
    Hot(
        "mixture", "sums over models", "mixture_kernelI{dtype}",
        (("mixture/cuda_projected.cuh", "for (std::int64_t i = 0; i < in.shape.models; ++i) {"),),
        ("mixture/cuda_projected.cuh", "return logit<D>(logits, v) - z0 - shift;"),
        lambda s: -(-s.vocab // 256) * s.positions, 256, lambda s: s.models, first_read=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Pipeline:
    """The calls of a query.

    Attributes:
        operators: those whose loops count.
        kernels, memsets: what they queue, also kernels that return at once.
            tests/cuda_on_cpu/test_launches.py counts them.
        wanted: at most so many kernels.
        times: how often each loop of NOT_ALWAYS runs, and loops that run more than once.
        targets: microseconds a query, by dtype and B.
    """

    operators: tuple[str, ...]
    kernels: int
    memsets: int
    wanted: int
    times: Mapping[str, int] = field(default_factory=dict)
    targets: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def loops(self, table: Table, dtype: str, shape: Shape) -> list[tuple[str, float]]:
        """Return the name of each loop that runs, and its microseconds a query."""
        return [
            (f"{hot.operator}, {hot.name}" + (f", {times} times" if times > 1 else ""),
             times * seconds(hot, found, shape) / shape.positions * 1e6)
            for (arch, kind, operator, name), (hot, found) in table.items()
            if (arch, kind) == ("sm_90", dtype) and operator in self.operators
            and (times := self.times.get(name, int(name not in NOT_ALWAYS)))
        ]  # fmt: skip

    def queued(self, shape: Shape) -> float:
        return (self.kernels + self.memsets) * LAUNCH * 1e6 / shape.positions


LOSSES = ("project", "leave_one_out")
NOT_ALWAYS = {"small targets: log-sum-exps", "small targets: moments", DOUBLE}
PIPELINES = {
    "log_pool + mixture + sample": Pipeline(
        ("log_pool", "sample"), 4, 1, 4, targets={("bf16", 8): 12}
    ),
    "project + leave_one_out": Pipeline(
        LOSSES, 6, 0, 6, targets={("bf16", 8): 16, ("fp32", 8): 20, ("bf16", 1): 40}
    ),
    # Every tile is computed again in double.
    "the same, if models share much": Pipeline(LOSSES, 6, 0, 6, {DOUBLE: 1, MOMENTS: 2}),
}


def lines_of(statement: Statement, csrc: Path = ROOT / "csrc") -> tuple[str, range]:
    """Return the file and the lines of a statement.

    Raises:
        LookupError: it is not there, or more than once.
    """
    file, text = statement
    source = (csrc / file).read_text()
    pattern = re.compile(r"\s+".join(map(re.escape, text.split())))
    found = list(pattern.finditer(source))
    if len(found) != 1:
        raise LookupError(f"{file} has {len(found)} times {text!r}; HOT must name it once")
    begin, depth, end = found[0].start(), 0, len(source)
    for k in range(begin, len(source)):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(source[k], 0)
        if depth < 0 or (depth == 0 and k >= found[0].end() - 1 and source[k] in ";}"):
            end = k
            break
    return file, range(source.count("\n", 0, begin) + 1, source.count("\n", 0, end) + 2)


def inside(one: Instruction, place: tuple[str, range]) -> bool:
    return any(file == place[0] and line in place[1] for file, line in one.chain)


@dataclass(frozen=True)
class Figures:
    """What the machine code of one hot loop says."""

    elements: float  # of a trip
    path: Sequence[Instruction]
    local: int  # loads and stores of local memory in the whole loop, blocks branched around too
    usage: Usage

    @property
    def issued(self) -> float:
        return len(self.path) / self.elements

    @property
    def busy(self) -> dict[str, float]:
        """Cycles an element and warp that the issue and each pipe take."""
        return {k: v / self.elements for k, v in sass.busy_cycles(self.path).items()}

    @property
    def multiplies(self) -> int:
        return sass.address_multiplies(self.path)

    def count(self, *names: str) -> float:
        return sum(one.name in names for one in self.path) / self.elements


def figures(hot: Hot, code: Code, usage: Usage, logit: int) -> Figures:
    """Return the figures of a loop.

    Raises:
        LookupError: no loop of the kernel has the statements of `hot`.
    """
    places = [lines_of(statement) for statement in hot.within]
    element = lines_of(hot.element)
    work = lines_of(hot.work) if hot.work else None

    def elements(one: Instruction) -> float:
        if not inside(one, element):
            return 0.0
        if hot.operation:
            return float(re.fullmatch(hot.operation, one.operation) is not None)
        return one.loaded_bytes / (hot.size or logit) if one.name in hot.loads else 0.0

    def score(one: Instruction) -> tuple[float, ...]:
        return elements(one), float(work is not None and inside(one, work))

    def serves(loop: sass.Loop) -> bool:
        code_of_loop = list(code.instructions_of(loop))
        return any(all(inside(one, place) for place in places) for one in code_of_loop) and any(
            elements(one) for one in code_of_loop
        )

    found = []
    served = [loop for loop in code.loops if serves(loop)]
    for loop in served:
        if any(other.body < loop.body for other in served):
            continue
        path = code.hot_path(loop, score)
        local = sum(one.name in ("LDL", "STL") for one in code.instructions_of(loop))
        found.append((sum(map(elements, path)), -len(path), path, local))
    found = [one for one in found if one[0] > 0]
    if not found:
        raise LookupError(f"{code.name} has no loop for {hot.operator}, {hot.name}")
    best = max(found, key=lambda one: one[:2])
    return Figures(best[0], best[2], best[3], usage)


def seconds(hot: Hot, found: Figures, shape: Shape) -> float:
    """Estimate how long one call's trips through a loop take."""
    warps = hot.threads / 32
    blocks_at_once = min(
        MOST_BLOCKS,
        int(MOST_WARPS // warps),
        REGISTERS_A_PROCESSOR // (math.ceil(found.usage.registers / 8) * 8 * hot.threads),
        SHARED_A_PROCESSOR // max(1, found.usage.shared + hot.dynamic(shape)),
    )
    blocks, trips = hot.blocks(shape), hot.elements(shape) / found.elements
    element = lines_of(hot.element)

    def wait(one: Instruction) -> float:
        if one.name in ("LDG", "LD") and (hot.scattered or inside(one, element)):
            return FROM_MEMORY if hot.first_read else FROM_CACHE
        return sass.latency(one)

    alone = sass.alone_cycles(found.path, wait)
    busy = max(sass.busy_cycles(found.path).values())
    cycles = 0.0
    while blocks > 0:
        here = min(blocks_at_once, -(-blocks // PROCESSORS))
        rounds = max(1, blocks // (here * PROCESSORS))
        cycles += rounds * trips * max(alone, here * warps / 4 * busy)
        blocks -= rounds * here * PROCESSORS
    read = hot.blocks(shape) * hot.threads * hot.elements(shape) * (hot.size or shape.size)
    return max(cycles / CLOCK, read / BANDWIDTH if hot.first_read else 0.0)


Table = dict[tuple[str, str, str, str], tuple[Hot, Figures]]  # architecture, dtype, operator, name


def read(objects: Path, tools: Tools, architectures: Sequence[str] = ARCHITECTURES) -> Table:
    """Return the figures of all hot loops in the objects of a build."""
    table: Table = {}
    for architecture in architectures:
        codes: dict[tuple[str, str], Code] = {}
        usages: dict[str, dict[str, Usage]] = {}
        for dtype, (mangled, logit) in DTYPES.items():
            for hot in HOT:
                compiled = object_of(objects, hot)
                if hot.operator not in usages:
                    usages[hot.operator] = tools.usage(compiled, architecture)
                part = hot.kernel.replace("{dtype}", mangled)
                if (hot.operator, part) not in codes:
                    kernels = list(tools.kernels(compiled, architecture, part))
                    if len(kernels) != 1:
                        raise LookupError(f"{compiled.name} has {len(kernels)} kernels {part}")
                    codes[hot.operator, part] = kernels[0]
                code = codes[hot.operator, part]
                found = figures(hot, code, usages[hot.operator][code.name], logit)
                table[architecture, dtype, hot.operator, hot.name] = hot, found
    return table


def object_of(objects: Path, hot: Hot) -> Path:
    pattern = f"{hot.operator}/cuda.cu.o"
    found = list(objects.glob(f"CMakeFiles/adapmixed_cuda.dir/csrc/{pattern}"))
    if not found:
        raise LookupError(f"{objects} has no {pattern}: run `make cuda`")
    return found[0]


def bars_of(table: Table) -> dict[str, dict[str, float]]:
    return {
        " | ".join(key): {
            "instructions": round(found.issued, 2),
            "address multiplies": found.multiplies,
            "local": found.local,
        }
        for key, (_, found) in table.items()
    }


def loops_text(table: Table, architecture: str, dtype: str) -> str:
    head = ("operator", "loop", "a trip", "instr.", "goal", "fp64", "MUFU", "mul.adr", "bound by",
            "cycles", "regs", "local", "static")  # fmt: skip
    rows = [head]
    for (arch, kind, operator, name), (hot, found) in table.items():
        if (arch, kind) != (architecture, dtype):
            continue
        busy = found.busy
        most = max(busy, key=lambda pipe: busy[pipe])
        rows.append((
            operator, name, f"{found.elements:g}", f"{found.issued:.1f}",
            f"{hot.goal:g}" if hot.goal else "", f"{found.count(*sass.DOUBLES):.1f}",
            f"{found.count(*sass.SLOW):.2f}", str(found.multiplies), most, f"{busy[most]:.1f}",
            str(found.usage.registers), str(found.usage.local + found.usage.stack),
            str(found.usage.shared),
        ))  # fmt: skip
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(
            zip(row, widths, strict=True))).rstrip()
        for row in rows
    )  # fmt: skip


def estimate_text(table: Table, dtype: str) -> str:
    lines = []
    size = DTYPES[dtype][1]
    for name, pipeline in PIPELINES.items():
        for positions in (1, 8):
            shape = Shape(positions=positions, size=size)
            parts, queued = pipeline.loops(table, dtype, shape), pipeline.queued(shape)
            total = sum(value for _, value in parts) + queued
            target = pipeline.targets.get((dtype, positions))
            lines.append(f"{name}, {dtype}, B = {positions}: {total:.0f} µs a query"
                         + (f" (target {target})" if target else ""))  # fmt: skip
            lines += [f"  {value:7.2f}  {loop}" for loop, value in parts]
            lines.append(f"  {queued:7.2f}  {pipeline.kernels} kernels (wanted: at most "
                         f"{pipeline.wanted}) and {pipeline.memsets} memsets queued")  # fmt: skip
            floor = shape.rows * shape.vocab * size / BANDWIDTH / positions * 1e6
            lines += [f"  {floor:7.2f}  of these for one read of the rows, at the least", ""]
    return "\n".join(lines)


HEAD = """Static figures of the CUDA kernels: python -m benchmarks.cuda_static
Nothing here was measured: no GPU has run these kernels.

a trip    elements that a thread handles in one trip of the loop
instr.    instructions issued for an element; goal: what is wanted
fp64      operations in double precision for an element; MUFU: special functions
mul.adr   64-bit multiplies a trip (IMAD.WIDE) that make the address of a load or store
bound by  the busiest of the issue and the pipes, with its cycles for a warp's elements
regs      registers a thread; local: bytes of local memory and stack; static: shared memory
"""

ESTIMATE = f"""
Estimate for N = 100, V = 50 257 on an H200 ({PROCESSORS} multiprocessors at {CLOCK / 1e9:g} GHz,
{BANDWIDTH / 1e12:.2f} TB/s), from the figures of sm_90
A loop takes its trips times the cycles of a trip. These are those of the busiest pipe, for all warps
of a quarter of a multiprocessor, or those that one warp waits for, whichever is more. A load of
elements takes {FROM_MEMORY:g} cycles if it is the first of them, and {FROM_CACHE:g} from the L2 cache; each kernel and
each memset adds {LAUNCH * 1e6:g} µs.

How wrong it may be: assume a factor of two, rather too low than too high. It leaves out what
surrounds the loops, tokens and rows that take a rarer path, bank conflicts and bandwidth of the
caches. Models are near the public one: no group of scores is looked at, and the search ends at
once. Kernels that issue without a pause are rare: 60 to 80 % of the rate is usual, so a loop bound
by the issue takes 1.3 to 1.7 times as long. A loop that waits is as wrong as the latencies, by some
30 %. Overlap of kernels, which would make it faster, is not assumed.
"""  # noqa: E501


def totals(table: Table) -> list[tuple[str, str, int, float, int | None]]:
    """Return (calls, dtype, B, microseconds a query, target) of each estimate."""
    found = []
    for name, pipeline in PIPELINES.items():
        for dtype, (_, size) in DTYPES.items():
            for positions in (8, 1):
                shape = Shape(positions=positions, size=size)
                taken = sum(value for _, value in pipeline.loops(table, dtype, shape))
                found.append((name, dtype, positions, taken + pipeline.queued(shape),
                              pipeline.targets.get((dtype, positions))))  # fmt: skip
    return found


def summary_text(table: Table) -> str:
    """Return the totals, which docs/develop/cuda.md shows."""
    lines = [f"{'µs a query, estimated; H200':30}{'B':>3}  {'dtype':8}{'now':>6}{'wanted':>8}"]
    lines += [
        f"{calls:30}{positions:3}  {dtype:8}{taken:6.0f}{target or '-':>8}"
        for calls, dtype, positions, taken, target in totals(table)
    ]
    return "\n".join(lines)


def kernel_name(mangled: str) -> str:
    """Return a kernel's name with its template's arguments, as in project bf16 true."""
    match = re.search(r"6deviceL?(\d+)", mangled)
    if match is None:
        return mangled
    end = match.end() + int(match[1])
    rest = mangled[end:]
    given = re.findall(r"LNS_5DtypeE(\d)E|Lb(\d)E|Li(\d+)E", rest) if rest[:1] == "I" else []
    words = [("fp32", "bf16", "fp16")[int(dtype)] if dtype else ("no", "yes")[int(flag)] if flag
             else number for dtype, flag, number in given]  # fmt: skip
    return " ".join([mangled[match.end() : end].removesuffix("_kernel"), *words])


def registers_text(objects: Path, tools: Tools) -> str:
    """Return registers a thread, static shared memory, and local memory, of every kernel."""
    found: dict[str, dict[str, Usage]] = {}
    for compiled in sorted(objects.glob("CMakeFiles/adapmixed_cuda.dir/csrc/*/*.cu.o")):
        for architecture in ALL_ARCHITECTURES:
            for mangled, usage in tools.usage(compiled, architecture).items():
                if "6device" in mangled:
                    name = f"{compiled.parent.name}: {kernel_name(mangled)}"
                    found.setdefault(name, {})[architecture] = usage
    lines = [f"{'kernel':52}" + "".join(f"{a:>8}" for a in ALL_ARCHITECTURES)
             + "   shared   local and stack"]  # fmt: skip
    for name, usages in sorted(found.items()):
        registers = "".join(
            f"{usages[a].registers if a in usages else '-':>8}" for a in ALL_ARCHITECTURES
        )
        shared = max(usage.shared for usage in usages.values())
        local = max(usage.local + usage.stack for usage in usages.values())
        lines.append(f"{name:52}{registers}{shared:9}{local:18}")
    return "\n".join(lines)


def text_of(table: Table, registers: str = "") -> str:
    parts = [HEAD, f"== totals\n{summary_text(table)}\n"]
    for architecture in ARCHITECTURES:
        for dtype in DTYPES:
            parts += [f"== {architecture}, {dtype}", loops_text(table, architecture, dtype), ""]
    parts.append(ESTIMATE)
    parts += [estimate_text(table, dtype) for dtype in DTYPES]
    if registers:
        parts.append(f"== registers a thread of every kernel; bytes of static shared memory, of "
                     f"which sm_90 and later take 1024 for themselves\n{registers}")  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--objects", type=Path, default=ROOT / "build" / "cuda",
                        help="build folder of `make cuda`")  # fmt: skip
    parser.add_argument("--out", type=Path, help="file for the tables, besides the screen")
    parser.add_argument("--lower-bars", action="store_true",
                        help="write smaller figures into cuda_static_bars.json")  # fmt: skip
    options = parser.parse_args()
    tools = Tools.find()
    if tools is None:
        print("no cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm",
              file=sys.stderr)  # fmt: skip
        return 2
    table = read(options.objects, tools)
    text = text_of(table, registers_text(options.objects, tools))
    print(text, end="")
    if options.out:
        options.out.write_text(text)
    if options.lower_bars:
        old = json.loads(BARS.read_text()) if BARS.exists() else {}
        new = bars_of(table)
        lowered = {
            key: {
                what: min(value, old.get(key, {}).get(what, value)) for what, value in own.items()
            }
            for key, own in new.items()
        }
        BARS.write_text(json.dumps(lowered, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
