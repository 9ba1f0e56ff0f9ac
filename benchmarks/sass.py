"""Read the machine code of CUDA kernels: hot loops, and what a trip of them issues.

`cuobjdump` and `nvdisasm` of the toolkit, or of the packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm, print the code. Lines of source (-lineinfo) tell which loop is which.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Chain = tuple[tuple[str, int], ...]  # (file below csrc, line), the innermost call first


@dataclass(frozen=True)
class Instruction:
    offset: int
    predicate: str
    operation: str  # with its suffixes, as in LDG.E.64
    arguments: tuple[str, ...]
    chain: Chain

    @property
    def name(self) -> str:
        return self.operation.partition(".")[0]

    def suffixed(self, suffix: str) -> bool:
        return suffix in self.operation.split(".")[1:]

    @property
    def loaded_bytes(self) -> int:
        """The bytes that one thread loads."""
        for suffix, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
            if self.suffixed(suffix):
                return size
        return 4


@dataclass
class Block:
    start: int
    instructions: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """One loop of a kernel: the start of its first block, and the starts of all its blocks."""

    header: int
    body: frozenset[int]


class Code:
    """The code of one kernel as blocks and loops."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.instructions, labels = _instructions(text)
        self.blocks = _blocks(self.instructions, labels)

    @cached_property
    def loops(self) -> list[Loop]:
        """All loops, those with the same first block as one."""
        before: dict[int, set[int]] = {start: set() for start in self.blocks}
        for start, block in self.blocks.items():
            for target in block.next:
                before[target].add(start)
        bodies: dict[int, set[int]] = {}
        for start, block in self.blocks.items():
            for header in block.next:
                if header <= start:
                    bodies.setdefault(header, {header}).update(_reaching(start, header, before))
        return [Loop(header, frozenset(body)) for header, body in sorted(bodies.items())]

    def instructions_of(self, loop: Loop) -> Iterator[Instruction]:
        for start in sorted(loop.body):
            yield from self.blocks[start].instructions

    def hot_path(
        self, loop: Loop, score: Callable[[Instruction], tuple[float, ...]]
    ) -> list[Instruction]:
        """Return one trip through a loop: its best path from the first block back to it.

        The best path has the largest sum of `score`, compared number by number, and of those the
        fewest instructions. An inner loop is passed once.
        """
        best: dict[int, tuple[tuple[float, ...], list[int]] | None] = {}
        busy: set[int] = set()

        def total(start: int) -> tuple[float, ...]:
            block = self.blocks[start].instructions
            sums = [sum(column) for column in zip(*map(score, block), strict=True)] if block else []
            return (*(sums or (0.0,) * len(score(self.instructions[0]))), -float(len(block)))

        def walk(start: int) -> tuple[tuple[float, ...], list[int]] | None:
            if start in best:
                return best[start]
            busy.add(start)
            found: tuple[tuple[float, ...], list[int]] | None = None
            own = total(start)
            for target in self.blocks[start].next:
                if target == loop.header:
                    rest: tuple[tuple[float, ...], list[int]] | None = ((0.0,) * len(own), [])
                elif target not in loop.body or target in busy:
                    rest = None
                else:
                    rest = walk(target)
                if rest is not None:
                    sums = tuple(a + b for a, b in zip(own, rest[0], strict=True))
                    if found is None or sums > found[0]:
                        found = sums, [start, *rest[1]]
            busy.discard(start)
            best[start] = found
            return found

        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, 10 * len(self.blocks) + 1000))
        try:
            path = walk(loop.header)
        finally:
            sys.setrecursionlimit(limit)
        if path is None:
            return []
        return [one for start in path[1] for one in self.blocks[start].instructions]


def _instructions(text: str) -> tuple[list[Instruction], dict[str, int]]:
    pattern = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?)\s*;")
    place = re.compile(r'File "([^"]*)", line (\d+)')
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    chain: list[tuple[str, int]] = []
    told = False  # whether the chain is complete
    for line in text.splitlines():
        if "//##" in line:
            if told:
                chain, told = [], False
            for file, number in place.findall(line):
                at = (file.rpartition("/csrc/")[2], int(number))
                if at not in chain:
                    chain.append(at)
            continue
        match = pattern.search(line)
        if match:
            told = True
            offset = int(match[1], 16)
            for label in waiting:
                labels[label] = offset
            waiting = []
            arguments = tuple(part.strip() for part in match[4].split(",")) if match[4] else ()
            found.append(Instruction(offset, match[2] or "", match[3], arguments, tuple(chain)))
        elif re.match(r"^\.L_\w+:", line):
            waiting.append(line.partition(":")[0])
    return found, labels


def _blocks(instructions: Sequence[Instruction], labels: dict[str, int]) -> dict[int, Block]:
    def target(one: Instruction) -> int | None:
        named = re.search(r"\((\.L_\w+)\)", ",".join(one.arguments))
        return labels.get(named[1]) if named else None

    starts = set(labels.values())
    for k, one in enumerate(instructions):
        if one.name in ("BRA", "EXIT", "RET", "BSYNC", "BRX") and k + 1 < len(instructions):
            starts.add(instructions[k + 1].offset)
    blocks: dict[int, Block] = {}
    barrier: dict[str, int] = {}  # where threads meet that leave a barrier register
    block = Block(0)
    for k, one in enumerate(instructions):
        if one.offset in starts or k == 0:
            block = blocks[one.offset] = Block(one.offset)
        block.instructions.append(one)
        if one.name == "BSSY" and (met := target(one)) is not None:
            barrier[one.arguments[0]] = met
        following = instructions[k + 1].offset if k + 1 < len(instructions) else None
        if following is not None and following not in starts:
            continue
        # A branch may have a second predicate, as in BRA P0, label.
        sure = not one.predicate and not (one.name == "BRA" and len(one.arguments) > 1)
        if one.name == "BRA" and (goal := target(one)) is not None:
            block.next.append(goal)
        elif one.name == "BSYNC" and one.arguments[0] in barrier:
            block.next.append(barrier[one.arguments[0]])
        ends = one.name in ("BRA", "EXIT", "RET", "BSYNC", "BRX") and sure
        if following is not None and not ends and following not in block.next:
            block.next.append(following)
    for block in blocks.values():
        block.next = [start for start in block.next if start in blocks]
    return blocks


def _reaching(start: int, header: int, before: dict[int, set[int]]) -> set[int]:
    """Return the blocks from which `start` is reached without passing the header."""
    found, left = {start}, [start]
    while left:
        block = left.pop()
        if block == header:
            continue
        for one in before[block]:
            if one not in found:
                found.add(one)
                left.append(one)
    return found


# What one warp's instruction takes of its part of a multiprocessor, in cycles (a multiprocessor of
# sm_90 and sm_100 has four parts). From the table of throughputs in NVIDIA's programming guide: 128
# single-precision results a cycle, 64 of integers and of doubles, 16 of the special functions and
# of conversions from and to doubles. The memory pipe takes 32 words a cycle.
FLOATS = {"FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2"}
DOUBLES = {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX"}
MEMORY = {"LDG", "LDS", "LD", "LDL", "STG", "STS", "ST", "STL", "SHFL", "ATOMS", "ATOMG", "RED"}
SLOW = {"MUFU"}
CONVERSIONS = {"F2F", "F2I", "I2F", "FRND"}
INTEGER_MULTIPLY = {"IMAD", "IMUL"}
CONTROL = {"BRA", "BSSY", "BSYNC", "EXIT", "WARPSYNC", "CALL", "RET", "NOP", "BAR", "YIELD"}


def pipe(one: Instruction) -> tuple[str, float]:
    """Return the pipe of an instruction, and how many cycles a warp's occupies its part of it."""
    if one.name in DOUBLES:
        return "fp64", 2.0
    if one.name in SLOW or (one.name in CONVERSIONS and ("64" in one.operation)):
        return "special", 8.0
    if one.name in CONVERSIONS:
        return "special", 2.0
    if one.name in MEMORY:
        return "memory", 4.0 * max(1, one.loaded_bytes // 4)
    if one.name in FLOATS:
        return "float", 1.0
    if one.name in INTEGER_MULTIPLY:
        return "float", 1.0 if one.suffixed("MOV") else 2.0
    if one.name in CONTROL or one.name.startswith(("U", "R2U", "S2U")):
        return "control", 1.0
    return "integer", 2.0


def busy_cycles(path: Sequence[Instruction]) -> dict[str, float]:
    """Return the cycles that one warp's trip takes of each pipe, and of the issue."""
    cycles: dict[str, float] = {"issue": float(len(path))}
    for one in path:
        name, taken = pipe(one)
        cycles[name] = cycles.get(name, 0.0) + taken
    return cycles


_REGISTER = re.compile(r"\b(U?R\d+|U?P\d+)(\.64)?\b")
_WRITES_NOTHING = {"STG", "STS", "ST", "STL", "RED", "BRA", "BSSY", "BSYNC", "EXIT", "BAR", "NOP"}
_TWO_RESULTS = {"ISETP", "FSETP", "DSETP", "PLOP3", "SHFL", "VOTE", "UISETP", "UPLOP3", "IADD3",
                "UIADD3", "LEA", "LOP3"}  # fmt: skip


def _wide(one: Instruction) -> int:
    if one.name in MEMORY | {"LDC", "ULDC"}:
        return max(1, one.loaded_bytes // 4)
    return 2 if one.name in DOUBLES or "WIDE" in one.operation or one.suffixed("64") else 1


def _following(register: str, count: int) -> list[str]:
    kind, number = register.rstrip("0123456789"), int(re.findall(r"\d+", register)[0])
    return [f"{kind}{number + k}" for k in range(count)]


def results(one: Instruction) -> list[str]:
    """Return the registers that an instruction writes."""
    if one.name in _WRITES_NOTHING:
        return []
    found: list[str] = []
    for k, argument in enumerate(one.arguments[:2]):
        match = re.fullmatch(r"(U?R\d+|U?P\d+)", argument)
        second = one.name in _TWO_RESULTS and (argument.lstrip("U")[:1] == "P" or k == 0
                                               or one.name in ("SHFL", "VOTE"))  # fmt: skip
        if match and (k == 0 or second):
            found += _following(match[1], _wide(one) if match[1].lstrip("U")[0] == "R" else 1)
    return found


def sources(one: Instruction) -> list[str]:
    """Return the registers that an instruction reads."""
    first = 0 if one.name in _WRITES_NOTHING else 1
    found: list[str] = []
    double = one.name in DOUBLES
    for argument in (one.predicate, *one.arguments[first:]):
        for register, wide in _REGISTER.findall(argument):
            pair = wide or (double and register[0] == "R")
            found += _following(register, 2 if pair else 1)
    if one.name in ("STG", "STS", "ST", "STL"):
        stored = _REGISTER.findall(one.arguments[-1])
        if stored:
            found += _following(stored[0][0], _wide(one))
    return found


def address_multiplies(path: Sequence[Instruction]) -> int:
    """Return how many 64-bit multiplies of a trip make an address of a load or store of it."""
    count = len(path)
    twice = [*path, *path]
    found: set[int] = set()
    integer = ("IMAD", "IADD", "LEA", "MOV", "SEL", "SHF", "LOP3", "VIADD")
    for k in range(count, 2 * count):
        if twice[k].name not in ("LDG", "LD", "STG", "ST"):
            continue
        address = next((a for a in twice[k].arguments if "[" in a), "")
        wanted = {r for name, wide in _REGISTER.findall(address)
                  for r in _following(name, 2 if wide else 1)}  # fmt: skip
        for j in range(k - 1, k - count - 1, -1):
            one = twice[j]
            written = set(results(one))
            if not written & wanted or not one.name.startswith(integer):
                continue
            if one.name == "IMAD" and one.suffixed("WIDE"):
                found.add(j % count)
            if not one.predicate:
                wanted -= written
            wanted |= {name for name in sources(one) if name.startswith("R")}
    return len(found)


@dataclass(frozen=True)
class Usage:
    registers: int
    stack: int
    shared: int
    local: int


class Tools:
    """The two programs of the toolkit that print machine code."""

    def __init__(self, cuobjdump: str, nvdisasm: str) -> None:
        self.cuobjdump, self.nvdisasm = cuobjdump, nvdisasm

    @classmethod
    def find(cls) -> Tools | None:
        """Return the tools of PATH, of the toolkit beside nvcc, or of pip's packages, or None."""
        folders = os.environ.get("PATH", "").split(os.pathsep)
        nvcc = shutil.which(os.environ.get("CUDACXX") or "nvcc")
        if nvcc:
            folders.append(str(Path(nvcc).resolve().parent))
        folders.append("/usr/local/cuda/bin")
        folders += [str(p) for base in sys.path for p in Path(base or ".").glob("nvidia/cu*/bin")]
        path = os.pathsep.join(folders)
        found = [shutil.which(name, path=path) for name in ("cuobjdump", "nvdisasm")]
        return cls(found[0], found[1]) if found[0] and found[1] else None

    def usage(self, compiled: Path, architecture: str) -> dict[str, Usage]:
        """Return what each kernel of an object takes, by its mangled name."""
        said = _said(self.cuobjdump, "-res-usage", "-arch", architecture, compiled)
        pattern = re.compile(
            r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.MULTILINE
        )
        return {m[1]: Usage(*map(int, m.groups()[1:])) for m in pattern.finditer(said)}

    def kernels(self, compiled: Path, architecture: str, part: str) -> Iterator[Code]:
        """Yield the kernels of an object whose mangled name contains `part`."""
        with tempfile.TemporaryDirectory() as folder:
            _said(self.cuobjdump, "-xelf", architecture, compiled.resolve(), folder=folder)
            for image in sorted(Path(folder).glob("*.cubin")):
                functions = _functions(image.read_bytes())
                wanted = {k: name for k, name in functions.items() if part in name}
                for index, name in wanted.items():
                    text = _said(self.nvdisasm, "-c", "-gi", "-fun", str(index), image)
                    _, _, code = text.partition(f".text.{name}:\n")
                    yield Code(name, code.partition("//--------------------- ")[0])


def _said(*command: object, folder: str | None = None) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr


def _functions(image: bytes) -> dict[int, str]:
    """Return the functions of an ELF file: the index of the symbol, and the name."""
    (sections,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, sections + k * size) for k in range(count)]
    found: dict[int, str] = {}
    for header in headers:
        if header[1] != 2:  # a table of symbols
            continue
        names = headers[header[6]][4]
        for index in range(header[5] // 24):
            name, kind = struct.unpack_from("<IB", image, header[4] + 24 * index)
            if kind & 15 == 2:  # a function
                start = names + name
                found[index] = image[start : image.index(0, start)].decode()
    return found
