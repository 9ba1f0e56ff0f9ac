"""What the machine code of the CUDA kernels says about their hot loops, without a GPU.

    python -m benchmarks.cuda_static --objects build/cuda --out cuda-static.txt

For the loops of HOT (cuda_hot.py) it prints how many instructions a trip issues for each element.
For each kernel it prints registers and memory. `make cuda` compiles the objects; they must have
lines of source (-lineinfo).

A loop's trip is the path from its first block back to it which handles most elements with the
fewest instructions: blocks that are branched around do not count. Of loops in each other the
innermost one counts that has the elements. If the compiler has made several loops of one, the loop
with most elements a trip counts. Elements are counted in the machine code: the bytes that the
statement `element` loads in a trip, or the number of `operation` there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import sass
from benchmarks.cuda_hot import HOT, Hot, lines_of
from benchmarks.sass import Code, Instruction, Tools, Usage

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"bf16": ("LNS_5DtypeE1E", 2), "fp32": ("LNS_5DtypeE0E", 4)}
ARCHITECTURES = ("sm_90", "sm_100")
ALL_ARCHITECTURES = ("sm_80", *ARCHITECTURES)
BARS = Path(__file__).with_name("cuda_static_bars.json")
# What reads elements: global and generic loads.
LOADS = ("LDG", "LD")


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
        return one.loaded_bytes / (hot.size or logit) if one.name in LOADS else 0.0

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


HEAD = """Static figures of the CUDA kernels: python -m benchmarks.cuda_static
They are read from the machine code; nothing here was measured.

a trip    elements that a thread handles in one trip of the loop
instr.    instructions issued for an element; goal: what is wanted
fp64      operations in double precision for an element; MUFU: special functions
mul.adr   64-bit multiplies a trip (IMAD.WIDE) that make the address of a load or store
bound by  the busiest of the issue and the pipes, with its cycles for a warp's elements
regs      registers a thread; local: bytes of local memory and stack; static: shared memory
"""


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


def text_of(table: Table, registers: str) -> str:
    parts = [HEAD]
    for architecture in ARCHITECTURES:
        for dtype in DTYPES:
            parts += [f"== {architecture}, {dtype}", loops_text(table, architecture, dtype), ""]
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
