"""Python with the AVX-512 path of adapmixed_ext emulated: avx512_emulated.h, on any AVX2 machine.

    python tests/isa/emulated.py -m pytest tests/kernels
    python tests/isa/emulated.py tests/kernels/fuzz.py --isa avx512 --count 1000

build a second module in build/isa if the sources have changed (with cmake, ninja and pybind11 of
the `test` extra), put it before the installed one and run Python with these arguments. "avx512" is
then the emulation, and the default path unless a test chooses another.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "isa"
# Compiling takes longer than running, so little optimisation pays.
OPTIMISATION = "-O1"


def _command(name: str) -> str:
    found = shutil.which(
        name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    assert found, f"{name} is needed to build the emulated path"
    return found


def _run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def site() -> Path:
    """Return a folder with adapmixed_ext and the emulated module, built if it has changed."""
    pybind11 = _run(sys.executable, "-m", "pybind11", "--cmakedir")
    _run(
        _command("cmake"), "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DADAPMIXED_EMULATE_AVX512=ON",
        "-DADAPMIXED_CUDA=OFF", "-DADAPMIXED_WERROR=ON", "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CXX_FLAGS_RELEASE={OPTIMISATION}", f"-Dpybind11_DIR={pybind11}",
        f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={_command('ninja')}",
    )  # fmt: skip
    _run(_command("cmake"), "--build", BUILD)
    package = BUILD / "site" / "adapmixed_ext"
    shutil.rmtree(package.parent, ignore_errors=True)
    package.mkdir(parents=True)
    module = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    ours = ROOT / "adapmixed_ext"
    for path in (*ours.glob("*.py"), ours / "reference", BUILD / module):
        (package / path.name).symlink_to(path)
    return package.parent


def environment() -> dict[str, str]:
    """Return the variables of a Python that imports the emulated module and can run fuzz.py."""
    # Not the current folder: it may be the repository, which holds the installed module.
    path = map(str, (site(), ROOT / "python", ROOT / "tests" / "kernels"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
