"""What does a call of a compiled function cost through pybind11, ctypes and the limited API?

    python -m benchmarks.bindings                   # needs g++ and pybind11, on Linux
    python -m benchmarks.bindings --out PREFIX      # also PREFIX.txt and PREFIX.json
    python -m benchmarks.bindings --quick           # few calls: does everything run?

A wheel of pybind11 serves one Python; ctypes and the limited API would serve all. The function has
the 23 arguments of log_pool (addresses, sizes and numbers) and does next to nothing. Every binding
releases the interpreter's lock, and must return the sum of all arguments, each with a weight of its
own. The bindings take turns. For scale, a whole call of a small operator is timed in the same run.
"""

import argparse
import ctypes
import importlib.util
import json
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.machinery import ExtensionFileLoader
from itertools import repeat
from pathlib import Path
from typing import Any

import pybind11
import torch

import adapmixed_ext
from benchmarks.harness import Report, headline, machine
from benchmarks.inputs import make_query

SOURCE = Path(__file__).with_suffix(".cpp")
OPERATOR = "log_pool, 8 models, 2 048 tokens"
REAL = range(11, 14)  # places of the floating-point arguments


def compiled(folder: Path, name: str, *flags: str) -> Path:
    """Compile the source with a binding's flags; return the shared object."""
    path = folder / f"{name}.so"
    includes = {sysconfig.get_path("include"), pybind11.get_include()}
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", *flags]
    command += [f"-I{include}" for include in sorted(includes)] + [str(SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def module(path: Path) -> Any:
    """Import a compiled module."""
    loader = ExtensionFileLoader(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)
    loader.exec_module(found)
    return found


def plain(path: Path) -> Callable[..., float]:
    """Return the function of a shared library, with the types of its arguments."""
    function = ctypes.CDLL(str(path)).flat
    types: list[Any] = [ctypes.c_int64] * 23
    for at in REAL:
        types[at] = ctypes.c_double
    for at in (3, 7, *range(15, 22)):
        types[at] = ctypes.c_void_p
    for at in (6, 10, 22):
        types[at] = ctypes.c_int
    function.argtypes, function.restype = types, ctypes.c_double
    call: Callable[..., float] = function
    return call


def arguments() -> tuple[int | float, ...]:
    """Return what log_pool would be called with."""
    private, public = make_query(8, 2048)
    held = torch.empty(64, dtype=torch.float64)
    out = [held.data_ptr() + 8 * at for at in range(6)]
    first = (8, 1, 2048, private.data_ptr(), 2048, 2048, 0, public.data_ptr(), 0, 2048, 0)
    return *first, -0.25, 1.0, 2.0, 8, 0, *out, 2


def grouped(flat: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments as csrc/bindings.h takes them."""
    return flat[:3], flat[3:7], flat[7:11], flat[11:16], *flat[16:]


def take_turns(
    calls: Mapping[str, Callable[[], object]], sizes: Mapping[str, int], turns: int
) -> dict[str, list[float]]:
    """Return the seconds of one call, by name and turn; `sizes` says how many calls a turn has."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        for name in list(calls) if turn % 2 else reversed(calls):
            call = calls[name]
            start = time.perf_counter()
            for _ in repeat(None, sizes[name]):
                call()
            seconds[name].append((time.perf_counter() - start) / sizes[name])
    return seconds


def main() -> None:
    """Compile the bindings, check what they return, and print the table."""
    parser = argparse.ArgumentParser(description="time a call through three bindings")
    parser.add_argument("--out", type=Path, help="prefix of the files to write")
    parser.add_argument("--quick", action="store_true", help="few calls: does everything run?")
    parsed = parser.parse_args()
    turns, size = (3, 100) if parsed.quick else (201, 2000)
    torch.set_num_threads(1)

    flat = arguments()
    groups = grouped(flat)
    with tempfile.TemporaryDirectory(prefix="adapmixed-bindings-") as name:
        folder = Path(name)
        pybind = module(compiled(folder, "with_pybind11", "-DWITH_PYBIND11"))
        limited_flags = ("-DWITH_LIMITED_API", "-DPy_LIMITED_API=0x030B0000")
        limited = module(compiled(folder, "with_limited_api", *limited_flags))
        library = plain(compiled(folder, "plain", "-fvisibility=default"))

    query, settings = make_query(8, 2048), {"lower": -0.25, "upper": 1.0, "scale": 2.0}
    calls: dict[str, Callable[[], object]] = {
        "pybind11, grouped as in csrc": lambda: pybind.grouped(*groups),
        "pybind11": lambda: pybind.flat(*flat),
        "ctypes": lambda: library(*flat),
        "limited API, by hand": lambda: limited.flat(*flat),
        OPERATOR: lambda: adapmixed_ext.log_pool(*query, **settings),
    }
    expected = sum(weight * float(value) for weight, value in enumerate(flat, 1))
    for name, call in calls.items():
        if name != OPERATOR and call() != expected:
            raise SystemExit(f"{name} must return {expected!r}, got {call()!r}")

    sizes = dict.fromkeys(calls, size) | {OPERATOR: max(1, size // 40)}
    seconds = take_turns(calls, sizes, turns)
    about = machine() | {"pybind11": pybind11.__version__}
    report = Report()
    report.say(headline(about))
    report.say(f"pybind11 {pybind11.__version__}, 23 arguments, {turns} turns of {size} calls\n")
    whole = statistics.median(seconds[OPERATOR])
    report.say(f"  {'':34}{'µs':>8}  {'[fastest, slowest turn]':>24}  of the operator")
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        span = f"[{min(times) * 1e6:.3f}, {max(times) * 1e6:.3f}]"
        report.say(f"  {name:34}{median * 1e6:8.3f}  {span:>24}  {median / whole:14.1%}")
        rows.append({"name": name, "median": median, "fastest": min(times), "slowest": max(times)})
    if parsed.out is not None:
        parsed.out.with_suffix(".txt").write_text("\n".join(report.lines) + "\n", encoding="utf-8")
        content = {"quick": parsed.quick, "machine": about, "turns": turns, "rows": rows}
        text = json.dumps(content, indent=1, ensure_ascii=False)
        parsed.out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
