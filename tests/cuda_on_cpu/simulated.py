"""The CUDA kernels on a CPU: build them against simt.h and let the operators run them.

    with simulated.kernels("reverse"):
        adapmixed_ext.project(private, public, order=18, radius=3.6)

runs the kernels' own source on CPU tensors, with one fibre for each CUDA thread. Keep inputs tiny.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from torch import Tensor

from adapmixed_ext import _native

ROOT = Path(__file__).resolve().parents[2]
SANITIZER = os.environ.get("ADAPMIXED_SANITIZE", "")  # set by `make sanitize`
# The order in which threads and blocks run, and a seed for "random".
ORDERS = (("forward", 0), ("reverse", 0), ("random", 1))
# Of what a GPU only approximates: 1 / x, 2^x and log2 x.
ERRORS = ("up", "down", "random")


def run(*command: object, limit: float | None = None) -> str:
    """Run a command with the tools of the `test` extra, without the sanitizer of this process."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LD_PRELOAD": ""}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=limit)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def build(source: Path, folder: Path, sanitizer: str = "") -> Path:
    """Build the kernels as a module, as far as they have changed, and return its path."""
    run(
        "cmake", "-S", source, "-B", folder, "-G", "Ninja", "-DADAPMIXED_SIMT=ON",
        "-DADAPMIXED_CUDA=OFF", f"-DADAPMIXED_WERROR={'OFF' if sanitizer else 'ON'}",
        f"-DADAPMIXED_SANITIZE={sanitizer}",
        f"-DCMAKE_BUILD_TYPE={'Debug' if sanitizer else 'Release'}",
        f"-Dpybind11_DIR={run(sys.executable, '-m', 'pybind11', '--cmakedir')}",
        f"-DPython_EXECUTABLE={sys.executable}",
    )  # fmt: skip
    run("cmake", "--build", folder, "--parallel", 2, limit=900)
    return folder / f"_cuda_on_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"


@cache
def module() -> ModuleType:
    """Return the kernels as a module, built if they have changed, by one process at a time."""
    override = os.environ.get("ADAPMIXED_SIMULATED")  # a module, see delete_barriers.py
    folder = ROOT / "build" / "-".join(filter(None, ("cuda-on-cpu", SANITIZER)))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = Path(override) if override else build(ROOT, folder, SANITIZER)
    spec = importlib.util.spec_from_file_location("_cuda_on_cpu", path)
    assert spec is not None and spec.loader is not None
    built = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built)
    return built


@contextmanager
def kernels(
    order: str = "forward", seed: int = 0, *, sizes_of_a_gpu: bool = False, errors: str = "random"
) -> Iterator[list[Tensor]]:
    """Let operators on CPU tensors run the CUDA kernels, with threads in this order.

    Args:
        order: order in which threads and blocks run: "forward", "reverse" or "random".
        seed: seed of the order "random".
        sizes_of_a_gpu: use the tiles and chunks of a GPU. Otherwise they are smaller, so that
            short rows have several of them.
        errors: one of ERRORS.

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

    before = _native.backends["cpu"]
    built.set_order(order, seed)
    built.set_sizes(sizes_of_a_gpu)
    built.set_errors(ERRORS.index(errors))
    _native.backends["cpu"] = _native.Backend(built, where, False)
    try:
        yield workspaces
    finally:
        _native.backends["cpu"] = before
