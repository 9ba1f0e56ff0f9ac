"""Delete the kernels' barriers one by one and see whether the checks notice.

    python tests/cuda_on_cpu/delete_barriers.py [PART OF FILE:LINE]

Each mutant is a copy of the sources with one change. It lacks one __syncthreads, __syncwarp or
await_copies, or a vote by which one thread's answer reaches all threads, or one atomic operation is
a plain one. It is built with ThreadSanitizer and runs `test_tiles` of test_kernels.py. A race, a
wrong answer, a crash and a standstill count as noticed. The exit status is 1 if a mutant goes
unnoticed. Run this by hand, a part at a time: each mutant takes minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import simulated

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("CMakeLists.txt", "csrc", "tests/cuda_on_cpu")
BUILD = ROOT / "build" / "mutants"
LONGEST = 600.0  # seconds, about ten times the duration of the tests

# A barrier that only regroups lanes orders no memory, and its comment says so.
BARRIER = re.compile(
    r"(?:__sync(?:threads|warp)\w*|await_copies<[^<>]*>)\([^()]*\);(?!\s*// for speed alone)"
)
# Each atomic operation, with a statement in its place that two threads may not run at once.
ATOMICS = (
    (re.compile(r"atomicAdd\(&((?:[^(),]|\([^()]*\))+), 1u\)"), r"(\1)++"),
    (re.compile(r"atomicExch\(&([^(),]+), 1\)"), r"(\1) = 1"),
    (re.compile(r"atomicOr\(&((?:[^(),]|\([^()]*\))+), ([^;]+)\);"), r"(\1) |= (\2);"),
)
# Without the vote, each thread uses its own answer.
BROADCAST = (re.compile(r"__syncthreads_or\((\w+)\)"), r"\1")


@dataclass(frozen=True)
class Mutant:
    file: Path  # relative to ROOT
    line: int
    what: str
    text: str  # of the whole file

    @property
    def name(self) -> str:
        return f"{self.file.relative_to('csrc')}:{self.line}"


def mutants() -> Iterator[Mutant]:
    for path in sorted((ROOT / "csrc").glob("*/*.cu*")):
        text = path.read_text()
        for pattern, instead in ((BARRIER, ";"), *ATOMICS, BROADCAST):
            for match in pattern.finditer(text):
                changed = text[: match.start()] + match.expand(instead) + text[match.end() :]
                line = text.count("\n", 0, match.start()) + 1
                yield Mutant(path.relative_to(ROOT), line, match.group(), changed)


def prepare() -> None:
    for name in COPIED:
        source, copy = ROOT / name, BUILD / "source" / name
        shutil.rmtree(copy, ignore_errors=True)
        if source.is_dir():
            # Without file times: the last build may be a mutant's, and newer than these files.
            shutil.copytree(source, copy, copy_function=shutil.copyfile)
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def noticed() -> bool:
    """Build the kernels and tell whether the tests fail, or have no end."""
    module = simulated.build(BUILD / "source", BUILD / "build", "thread")
    compiler = os.environ.get("CXX", "c++").split()[0]
    fixed = ("setarch", "-R") if shutil.which("setarch") else ()
    environment = {
        **os.environ, "ADAPMIXED_SIMULATED": str(module), "TSAN_OPTIONS": "halt_on_error=1",
        "LD_PRELOAD": simulated.run(compiler, "-print-file-name=libtsan.so"),
    }  # fmt: skip
    tests = ("-m", "pytest", "-q", "-x", "tests/cuda_on_cpu/test_kernels.py", "-k", "test_tiles")
    try:
        done = subprocess.run(
            [*fixed, sys.executable, *tests], capture_output=True, timeout=LONGEST,
            env=environment, cwd=ROOT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main(part: str) -> int:
    prepare()
    assert not noticed(), "the kernels as they are"
    chosen = [mutant for mutant in mutants() if part in mutant.name]
    missed = 0
    for mutant in chosen:
        file = BUILD / "source" / mutant.file
        whole = file.read_text()
        file.write_text(mutant.text)
        try:
            caught = noticed()
        finally:
            file.write_text(whole)
        missed += not caught
        print(
            f"{'noticed' if caught else 'UNNOTICED':13} {mutant.name:24} {mutant.what}", flush=True
        )
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
