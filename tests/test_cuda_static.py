"""The static figures of the CUDA kernels: none of them rises."""

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
    text = cuda_static.text_of(table, "")
    assert all(hot.name in text for hot in HOT) and "== sm_90, bf16" in text
