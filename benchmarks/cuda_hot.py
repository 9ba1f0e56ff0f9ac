"""The hot loops of the CUDA kernels, named by statements of their sources.

benchmarks/cuda_static.py reads the machine code of each. A statement that changes must be named
anew in HOT.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"

Statement = tuple[str, str]  # a file of csrc, and how a statement of it begins


@dataclass(frozen=True)
class Hot:
    """A hot loop: where it is, and what an element is.

    Attributes:
        operator: call that runs it.
        name: what it does; unique within the operator.
        kernel: part of the kernel's mangled name; "{dtype}" stands for that of the dtype.
        within: statements whose instructions the loop holds: the loop itself, and for a loop of a
            shared function the call.
        element: statement that reads the elements, or that has `operation`.
        size: bytes of an element; 0: those of a logit.
        operation: pattern of an operation, each of which is one element, instead of the loads.
        work: statement that a hot trip executes, if a shorter trip may leave it out.
        goal: instructions an element that are wanted.
    """

    operator: str
    name: str
    kernel: str
    within: tuple[Statement, ...]
    element: Statement
    size: int = 0
    operation: str = ""
    work: Statement | None = None
    goal: float | None = None

    @property
    def statements(self) -> tuple[Statement, ...]:
        return (*self.within, self.element, *((self.work,) if self.work else ()))


PARTS = "common/row_parts.cuh"
POOL = "log_pool/cuda_kernel.cuh"
DEVIATIONS = "leave_one_out/cuda_float_deviations.cuh"
MOMENTS = "leave_one_out/cuda_float_moments.cuh"
PROJECTED = "mixture/cuda_projected.cuh"

HOT = (
    *(
        Hot(
            operator, name, "row_parts_kernelI{dtype}" + look,
            ((PARTS, "for (int batch = 0; batch < Staged::kTokens; batch += kBatch * kWarp) {"),),
            (PARTS, "load_tokens<D>(tokens + own, staged.left - first, z);"), operation=r"LDS.*",
            work=(PARTS, "total = exp_from.add(total, z[k]);"), goal=goal,
        )
        for operator, name, look, goal in (
            ("project", "rows: log-sum-exps and scores", "NS0_9ScoreLookE", 16),
            ("project", "small targets: log-sum-exps", "NS0_6NoLookE", 16),
            ("log_pool", "rows: log-sum-exps and spans", "NS0_8PoolLookI", None),
        )
    ),
    Hot(
        "leave_one_out", "sums: deviations", "float_sums_kernelI{dtype}",
        ((DEVIATIONS, "for (int k = 2 * kModelsAtOnce; k <= count; k += kModelsAtOnce)"),),
        (DEVIATIONS, "if (kWhole || g < count) column[g * pitch] = e[g];"),
        operation="STS", goal=30,
    ),
    Hot(
        "leave_one_out", "sums: moments, degree 10", "float_sums_kernelI{dtype}",
        ((MOMENTS, "for (int k = 0; k < kBurst; k += 4, ++tokens, deviations += 4)"),
         (MOMENTS, "add_burst<false>(tile.tokens"), (MOMENTS, "add_moments<10>(layout")),
        (MOMENTS, "float power = p * fourth;"), operation="FMUL", goal=20,
    ),
    Hot(
        "leave_one_out", "sums: deviations in double", "float_sums_kernelI{dtype}",
        ((DEVIATIONS, "for (int first = 0; first < count; first += kAtOnce"),),
        (DEVIATIONS, "*column = static_cast<float>(e);"), operation="STS",
    ),
    Hot(
        "log_pool", "sums: a row's parts", "pool_sums_kernelI{dtype}",
        ((PARTS, "for (int first = lane_id() % kLanes; first < count; first += kLanes * kLoads)"),),
        (PARTS, "sums[j] = k < count ? part->sum : 0.0;"), size=8,
    ),
    Hot(
        "log_pool", "sums over models", "pool_sums_kernelI{dtype}",
        ((POOL, "for (rows += warp_id(); rows->logits != nullptr; rows += kPoolWarps) {"),),
        (POOL, "const double z = float_of<D>(tokens[k * kWarp + lane_id()]);"), operation=r"LDS.*",
    ),
    Hot(
        "mixture", "sums over models", "mixture_kernelI{dtype}",
        (("mixture/cuda.cu", "for (std::int64_t i = begin; i < end; ++i) {"),),
        (PROJECTED, "return logit<D>(logits, v) - z0 - shift;"),
    ),
)  # fmt: skip


def lines_of(statement: Statement) -> tuple[str, range]:
    """Return the file and the lines of a statement.

    Raises:
        LookupError: it is not there, or more than once.
    """
    file, text = statement
    source = (CSRC / file).read_text()
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
