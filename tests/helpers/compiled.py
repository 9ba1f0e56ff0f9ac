"""Build the compiled module of a source tree in place, without CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def build_module(tree: Path, build: Path) -> None:
    """Build the module from a tree's sources and put it into the tree's adapmixed_ext.

    Args:
        tree: root of the sources.
        build: build folder, which can be used again.

    Raises:
        RuntimeError: if the module cannot be built.
    """
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    }
    pybind11 = _output([sys.executable, "-m", "pybind11", "--cmakedir"], environment).strip()
    configure = [
        "cmake", "-S", str(tree), "-B", str(build), "-G", "Ninja",
        "-DADAPMIXED_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}",
    ]  # fmt: skip
    _output(configure, environment)
    _output(["cmake", "--build", str(build)], environment)
    copy_module(build, tree / "adapmixed_ext")


def copy_module(source: Path, target: Path) -> None:
    """Copy the module of one folder into another, even if a process has the old one mapped."""
    for path in source.glob("_C*.so"):
        fresh = target / f".{path.name}"
        shutil.copy2(path, fresh)
        fresh.replace(target / path.name)


def _output(command: list[str], environment: dict[str, str]) -> str:
    """Return the output of a command, or raise RuntimeError with it if the command fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout
