"""The CUDA kernels on a CPU: build them against simt.h and let the operators run them.

    with simulated.kernels("reverse"):
        adapmixed_ext.project(private, public, order=18, radius=3.6)

runs the kernels' own source on CPU tensors, with one fibre for each CUDA thread. Keep inputs tiny.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from torch import Tensor

from adapmixed_ext import _registry

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cuda-on-cpu"
# The order in which threads and blocks run, and a seed for "random".
ORDERS = (("forward", 0), ("reverse", 0), ("random", 1))


def _command(name: str) -> str:
    found = shutil.which(
        name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    assert found, f"{name} is needed to build the kernels for a CPU"
    return found


def _run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def _build() -> None:
    pybind11 = _run(sys.executable, "-m", "pybind11", "--cmakedir")
    _run(
        _command("cmake"), "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DADAPMIXED_SIMT=ON",
        "-DADAPMIXED_CUDA=OFF",
        "-DADAPMIXED_WERROR=ON", "-DCMAKE_BUILD_TYPE=Release", f"-Dpybind11_DIR={pybind11}",
        f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={_command('ninja')}",
    )  # fmt: skip
    _run(_command("cmake"), "--build", BUILD)


@cache
def module() -> ModuleType:
    """Return the kernels as a module, built if they have changed, by one process at a time."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build()
    path = BUILD / f"_cuda_on_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    spec = importlib.util.spec_from_file_location("_cuda_on_cpu", path)
    assert spec is not None and spec.loader is not None
    built = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built)
    return built


@contextmanager
def kernels(
    order: str = "forward", seed: int = 0, *, sizes_of_a_gpu: bool = False
) -> Iterator[list[Tensor]]:
    """Let operators on CPU tensors run the CUDA kernels, with threads in this order.

    Args:
        order: order in which threads and blocks run: "forward", "reverse" or "random".
        seed: seed of the order "random".
        sizes_of_a_gpu: use the tiles and chunks of a GPU. Otherwise they are smaller, so that
            short rows have several of them.

    Yields:
        The workspaces of the calls, as the kernels left them.
    """
    workspaces: list[Tensor] = []
    built = module()

    def where(like: Tensor, memory: Tensor | None) -> tuple[int, int, int]:
        if memory is None:
            return 0, 0, 0
        workspaces.append(memory.fill_(0xFF))  # NaN in all words that are never written
        return 0, 0, memory.data_ptr()

    before = _registry.backends["cpu"]
    built.set_order(order, seed)
    built.set_sizes(sizes_of_a_gpu)
    _registry.backends["cpu"] = _registry.Backend(built, where, False)
    try:
        yield workspaces
    finally:
        _registry.backends["cpu"] = before
