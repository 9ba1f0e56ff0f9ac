"""The static figures of the CUDA kernels: how they are read, and that none of them rises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # benchmarks is not installed, and pytest may be started anywhere

from benchmarks import cuda_static, sass  # noqa: E402
from benchmarks.cuda_hot import HOT, lines_of  # noqa: E402

OBJECTS = ROOT / "build" / "cuda"

# A loop over packs of four numbers. A slow path loads them one by one, and an inner loop of it is
# passed once; a rare path reads local memory.
LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/x/csrc/a.cuh", line 10
        /*0010*/                   MOV R2, RZ ;
.L_x_1:
\t//## File "/x/csrc/b.cuh", line 3 inlined at "/x/csrc/a.cuh", line 12
\t//## File "/x/csrc/a.cuh", line 12
        /*0020*/                   BSSY B0, `(.L_x_4) ;
        /*0030*/              @!P3 BRA P0, `(.L_x_2) ;
.L_x_3:
        /*0040*/                   LDG.E R4, desc[UR8][R2.64] ;
        /*0050*/               @P1 BRA `(.L_x_3) ;
        /*0060*/                   LDL R9, [R1] ;
        /*0070*/                   BRA `(.L_x_5) ;
.L_x_2:
        /*0080*/                   IMAD.WIDE R6, R2, 0x4, R10 ;
        /*0090*/                   LDG.E.128 R4, desc[UR8][R6.64] ;
.L_x_5:
        /*00a0*/                   BSYNC B0 ;
.L_x_4:
\t//## File "/x/csrc/a.cuh", line 14
        /*00b0*/                   DADD R20, R20, R4 ;
        /*00c0*/                   ISETP.GE.AND P0, PT, R2, R8, PT ;
        /*00d0*/              @!P0 BRA `(.L_x_1) ;
        /*00e0*/                   EXIT ;
"""


def outer() -> tuple[sass.Code, sass.Loop]:
    code = sass.Code("kernel", LISTING)
    assert [loop.header for loop in code.loops] == [0x20, 0x40]
    return code, code.loops[0]


def loaded(one: sass.Instruction) -> tuple[float, ...]:
    return (one.loaded_bytes / 4 if one.name == "LDG" else 0.0,)


def test_a_trip_takes_the_path_with_most_elements() -> None:
    code, loop = outer()
    path = code.hot_path(loop, loaded)
    assert [one.offset for one in path] == [0x20, 0x30, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0]
    narrow = code.hot_path(loop, lambda one: (float(one.operation == "LDG.E"),))
    assert 0x40 in [one.offset for one in narrow] and 0x90 not in [one.offset for one in narrow]
    assert "LDL" in [one.name for one in code.instructions_of(loop)]


def test_the_lines_of_source_are_those_of_all_calls() -> None:
    code, _ = outer()
    chains = {one.offset: one.chain for one in code.instructions}
    assert chains[0x00] == ()
    assert chains[0x90] == (("b.cuh", 3), ("a.cuh", 12))
    assert chains[0xB0] == (("a.cuh", 14),)


def test_what_a_trip_costs() -> None:
    code, loop = outer()
    path = code.hot_path(loop, loaded)
    assert sass.address_multiplies(path) == 1
    assert sass.busy_cycles(path)["issue"] == len(path)
    assert sass.busy_cycles(path)["fp64"] == 2.0


def test_registers_read_and_written() -> None:
    code, _ = outer()
    by_offset = {one.offset: one for one in code.instructions}
    assert sass.results(by_offset[0x90]) == ["R4", "R5", "R6", "R7"]
    assert sass.sources(by_offset[0x90]) == ["UR8", "R6", "R7"]
    assert sass.results(by_offset[0xB0]) == ["R20", "R21"]
    assert sass.sources(by_offset[0xB0]) == ["R20", "R21", "R4", "R5"]
    assert sass.results(by_offset[0xC0]) == ["P0"]


def test_every_hot_loop_is_a_statement_of_the_sources() -> None:
    """A loop whose source changes must be named anew, or its figures would be another's."""
    assert len({(hot.operator, hot.name) for hot in HOT}) == len(HOT)
    for hot in HOT:
        for statement in hot.statements:
            _, lines = lines_of(statement)
            assert 0 < len(lines) < 80, statement


def test_every_hot_loop_has_bars() -> None:
    assert set(json.loads(cuda_static.BARS.read_text())) == {
        " | ".join((architecture, dtype, hot.operator, hot.name))
        for architecture in cuda_static.ARCHITECTURES
        for dtype in cuda_static.DTYPES
        for hot in HOT
    }


def built() -> tuple[Path, sass.Tools]:
    """Return the objects of `make cuda` and the tools that read them, or skip."""
    nvcc = shutil.which(os.environ.get("CUDACXX") or "nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    if "release 13.0" not in said:
        pytest.skip("the bars are those of nvcc 13.0")
    tools = sass.Tools.find()
    if tools is None:
        pytest.skip("there is no cuobjdump and nvdisasm")
    if not (OBJECTS / "build.ninja").exists():
        pytest.skip("the kernels are not built: run `make cuda`")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ninja = shutil.which("ninja", path=path)
    assert ninja, "ninja of the `test` extra is missing"
    left = subprocess.run([ninja, "-C", OBJECTS, "-n"], capture_output=True, text=True).stdout
    if "no work to do" not in left:
        pytest.skip("the sources are newer than the objects: run `make cuda`")
    return OBJECTS, tools


@pytest.mark.slow
def test_no_figure_rises() -> None:
    """Instructions an element, multiplies for addresses, and local memory in the hot loops.

    The bars only go down: `python -m benchmarks.cuda_static --lower-bars` writes smaller figures.
    """
    objects, tools = built()
    table = cuda_static.read(objects, tools)
    bars = json.loads(cuda_static.BARS.read_text())
    found = cuda_static.bars_of(table)
    assert set(found) == set(bars)
    risen = [
        f"{key}: {value} {what}, at most {bars[key][what]}"
        for key, figures in found.items()
        for what, value in figures.items()
        if value > bars[key][what]
    ]
    assert not risen, "\n".join(risen)
    assert all(figures["local"] == 0 for figures in found.values())
    text = cuda_static.text_of(table)
    assert all(hot.name in text for hot in HOT) and "== sm_90, bf16" in text
