"""Try each wheel of a folder where nothing else is: `make test-wheels`.

    python scripts/test_wheels.py --dist dist python3.11 python3.12 python3.13

A Python that does not run is left out. Each other one gets an empty environment with its wheel, the
tests' packages, and the dependencies at their newest versions, as a user gets them. Torch alone has
the version of constraints.txt, because a newer one may come with gigabytes of CUDA. From a folder
outside the repository, every module must come from the wheel and the kernel tests must pass.
`adapmixed demo` must work without a compiler and without a network. One file of tests is left out,
since it compiles headers of csrc. `--installed` does the same in the environment of the Python that
runs it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILING = ("test_float_errors.py",)
TEST_PACKAGES = ("pytest>=8", "mpmath>=1.3")
BEST = """
import os, pathlib, sys
import adapmixed, adapmixed_ext
home = pathlib.Path(sys.prefix).resolve()
for module in (adapmixed, adapmixed_ext, adapmixed_ext._C):
    assert home in pathlib.Path(module.__file__).resolve().parents, module.__file__
info = adapmixed_ext.build_info()
cpuinfo = pathlib.Path("/proc/cpuinfo")
flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
if {"avx2", "fma", "f16c"} <= flags:
    best = "avx512" if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags else "avx2"
    assert info["instruction_set"] == best, f"{info} on a machine with {best}"
print(adapmixed.__version__, info)
"""


def run(command: Sequence[str | Path], cwd: Path, environment: dict[str, str]) -> str:
    """Return what a command prints; end with all of it if the command fails."""
    text = [str(part) for part in command]
    done = subprocess.run(
        text, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(text)} failed:\n{done.stdout}")
    return done.stdout


def offline() -> list[str]:
    """Return the words that run a command without a network, if this machine allows it."""
    program = shutil.which("unshare")
    if program is None:
        return []
    words = [program, "--map-root-user", "--net"]
    return [] if subprocess.run([*words, "true"], capture_output=True).returncode else words


def wheel_of(dist: Path, python: str) -> Path:
    """Return the one wheel of a folder that is for this Python."""
    tag = "import sys; print('cp%d%d' % sys.version_info[:2])"
    tag = subprocess.run(
        [python, "-c", tag], check=True, capture_output=True, text=True
    ).stdout.strip()
    wheels = sorted(dist.glob(f"adapmixed-*-{tag}-*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"{dist} must hold one wheel for {tag}, found {len(wheels)}: make wheels")
    return wheels[0]


def try_wheel(wheel: Path, python: str, select: str) -> None:
    """Install one wheel into an empty environment and use it; a failure ends the program."""
    print(f"{wheel.name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="adapmixed-wheel-") as name:
        folder = Path(name)
        run([python, "-m", "venv", folder / "venv"], folder, clean())
        fresh = folder / "venv" / "bin" / "python"
        pip = [fresh, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        run([*pip, torch(), wheel, *TEST_PACKAGES], folder, clean())
        size = sum(p.stat().st_size for p in (folder / "venv").rglob("*") if p.is_file())
        print(f"  installed: {size / 1e6:.0f} MB with all dependencies", flush=True)
        try_installed(fresh, select)


def torch() -> str:
    """Return the requirement of torch in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def clean() -> dict[str, str]:
    """Return this process's variables without those that lead Python to the repository."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


def try_installed(python: Path, select: str) -> None:
    """Use what is installed in one environment; a failure ends the program."""
    with tempfile.TemporaryDirectory(prefix="adapmixed-tests-") as name:
        folder = Path(name)
        print(f"  {run([python, '-c', BEST], folder, clean()).strip()}", flush=True)
        listed = run([python, "-m", "pip", "list", "--format=freeze"], folder, clean()).split()
        names = ("torch==", "transformers==", "peft==", "numpy==")
        print(f"  {', '.join(line for line in listed if line.startswith(names))}", flush=True)

        # As in the repository, but with nothing of it that Python could import.
        tests = folder / "tests"
        tests.mkdir()
        shutil.copy2(ROOT / "tests" / "conftest.py", tests)
        skipped = shutil.ignore_patterns("__pycache__", "*.cpp", *COMPILING)
        shutil.copytree(ROOT / "tests" / "kernels", tests / "kernels", ignore=skipped)
        (folder / "pytest.ini").write_text(
            "[pytest]\nmarkers = slow: takes two seconds or more\n", encoding="utf-8"
        )
        command = [
            python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", select, "tests/kernels",
        ]  # fmt: skip
        passive = {"OMP_WAIT_POLICY": "PASSIVE"}
        last = run(command, folder, clean() | passive).strip().splitlines()[-1]
        print(f"  kernel tests: {last}", flush=True)

        # Nothing but the environment's own programs on PATH: no compiler, no cmake.
        bare = {"PATH": str(python.parent), "HOME": str(folder), "LANG": "C.UTF-8"}
        cut = offline()
        began = time.monotonic()
        demo = [*cut, python.parent / "adapmixed", "demo", "--out", folder / "report"]
        table = run(demo, folder, bare).strip()
        if not (folder / "report" / "report.json").exists():
            raise SystemExit(f"adapmixed demo wrote no report.json:\n{table}")
        how = "without a network" if cut else "with a network, which could not be cut off here"
        print(f"  adapmixed demo: {time.monotonic() - began:.0f} s, {how}, without a compiler")


def main() -> None:
    """Try the wheels of all the Pythons that are named, or what is installed already."""
    parser = argparse.ArgumentParser(description="try each wheel in an empty environment")
    parser.add_argument(
        "--dist", type=Path, default=ROOT / "dist", help="the wheels' folder (dist)"
    )
    parser.add_argument("--select", default="not slow", help="pytest's -m (not slow)")
    parser.add_argument(
        "--installed", action="store_true", help="try the environment of this Python instead"
    )
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="commands of the Pythons")
    parsed = parser.parse_args()
    if parsed.installed == bool(parsed.pythons):
        parser.error("name Pythons, or give --installed alone")
    if parsed.installed:
        # Not resolved: the link lies in the environment, what it points to does not.
        try_installed(Path(sys.executable).absolute(), parsed.select)
        return
    from build_wheels import runnable

    for python in runnable(parsed.pythons, "ensurepip"):
        try_wheel(wheel_of(parsed.dist.resolve(), python), python, parsed.select)


if __name__ == "__main__":
    main()
