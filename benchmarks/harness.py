"""Reports of measurements, floors that contestants are compared with, and the machine."""

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import adapmixed
import adapmixed_ext
from benchmarks.timing import Call, Timing

Query = tuple[Tensor, Tensor]  # private logits (N, B, V), public logits (B, V)

QUIET = 0.05  # share of the cores that others may use
READ_ONCE = "floor: reading the logits once"
READ_TWICE = "floor: reading the logits twice"


def size(query: Query) -> int:
    """Return the bytes of one query's logits."""
    return sum(t.numel() * t.element_size() for t in query)


def _as_floats(tensor: Tensor) -> Tensor:
    """Return the same bytes as fp32, so that a sum reads them without converting."""
    flat = tensor.reshape(-1)
    even = flat.numel() * flat.element_size() // 4 * (4 // flat.element_size())
    return flat[:even].view(torch.float32)


def floors(inputs: list[Query]) -> dict[str, Call]:
    """Return floors as contestants: vectorised sums over the rotated inputs, once and twice.

    Leave-one-out losses need the weights of all models, and weights need whole rows. So two passes
    are the least. Inputs that fit the cache make the second pass cheap, here as in the operators.
    """

    flat = [[_as_floats(tensor) for tensor in query] for query in inputs]

    def read(turn: int) -> None:
        for tensor in flat[turn % len(flat)]:
            tensor.sum()

    def read_twice(turn: int) -> None:
        read(turn)
        read(turn)

    return {READ_ONCE: read, READ_TWICE: read_twice}


def _digits(value: float) -> str:
    """Write four digits at most."""
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"


@dataclass
class Report:
    """Lines of tables and rows of JSON, collected together.

    ``unit`` is that of the lines, "ms" or "µs"; the JSON has seconds.
    """

    lines: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    unit: str = "ms"

    def say(self, line: str = "") -> None:
        """Print and keep one line."""
        print(line, flush=True)
        self.lines.append(line)

    def head(self) -> None:
        """Print the heading of a table."""
        spread = "[fastest, slowest]"
        self.say(f"  {'':41}{'median':>10}  {spread:>20}{'ratio':>9}{'GB/s':>8}  floor")

    def row(
        self, table: str, name: str, timing: Timing, *, base: Timing, floor: Timing,
        bytes_read: int, queries: int = 1, **fields: object,
    ) -> None:  # fmt: skip
        """Print one contestant and keep it.

        Args:
            table: key of the JSON.
            base: the denominator of "ratio".
            floor: the numerator of "share_of_floor".
            bytes_read: of one query's logits, counted once.
            queries: number answered by one call of ``timing``; all figures are per query.
            fields: further fields of the JSON; "note" is printed.
        """
        t = timing.per(queries)
        ratio, rate = t.median / base.median, bytes_read / t.median / 1e9
        share = floor.median / t.median
        scale = {"ms": 1e3, "µs": 1e6}[self.unit]
        spread = f"[{_digits(scale * t.fastest)}, {_digits(scale * t.slowest)}]"
        self.say(
            f"  {name:40} {_digits(scale * t.median):>7} {self.unit}  {spread:>20}"
            f"{ratio:8.2f}x{rate:8.2f} {100 * share:5.1f}%  {fields.get('note', '')}".rstrip()
        )
        row = {"name": name, **asdict(t), "ratio": ratio, "gb_per_s": rate}
        self.tables.setdefault(table, []).append(row | {"share_of_floor": share, **fields})

    def others(self, neighbours: "Neighbours") -> float | None:
        """Report and return the share that other processes used since `neighbours` was made."""
        share = neighbours.share()
        if share is not None:
            verdict = "" if share < QUIET else ": TOO MUCH, these figures mean nothing"
            self.say(f"Other processes used {share:.1%} of the cores{verdict}.")
        return share

    def write(self, prefix: Path, **head: object) -> None:
        """Write PREFIX.json and PREFIX.txt."""
        prefix.parent.mkdir(parents=True, exist_ok=True)
        content = {"format_version": 1, **head, "tables": self.tables}
        text = json.dumps(content, indent=1, allow_nan=False)
        prefix.with_name(prefix.name + ".json").write_text(text + "\n", encoding="utf-8")
        lines = "\n".join(self.lines).rstrip()
        prefix.with_name(prefix.name + ".txt").write_text(lines + "\n", encoding="utf-8")


def _git(*command: str) -> str:
    root = Path(__file__).resolve().parents[1]
    try:
        result = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
    except OSError:
        return ""
    return result.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def caches() -> dict[str, int]:
    """Return the bytes of each data or unified cache of the first core, by level."""
    sizes = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if _read(f"{folder}/type").strip() in ("Data", "Unified"):
            text = _read(f"{folder}/size").strip()
            unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
            sizes[f"L{_read(f'{folder}/level').strip()}"] = int(text.rstrip("KM") or 0) * unit
    return sizes


class Neighbours:
    """The share of the machine that other processes used; figures hold only if it is small.

    A busy core stalls every parallel region, and programs differ a hundredfold in their number.
    So ratios measured on a loaded machine mean nothing.
    """

    def __init__(self) -> None:
        self._begin = self._now()

    def share(self) -> float | None:
        """Return the share of all cores' time since the start; None if the system does not tell."""
        (wall, busy, process), end = self._begin, self._now()
        if not end[1] or end[0] <= wall:
            return None
        cores = os.cpu_count() or 1
        return max(0.0, (end[1] - busy) - (end[2] - process)) / (end[0] - wall) / cores

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Return seconds: wall time, all cores busy, this process and its children busy."""
        ticks = [int(n) for n in _read("/proc/stat").partition("\n")[0].split()[1:]]
        # user, nice, system, then idle and waiting, then interrupts and what other guests took.
        busy = (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK") if ticks else 0.0
        return time.perf_counter(), busy, sum(os.times()[:4])


def machine() -> dict[str, Any]:
    """Return the machine, versions and commit of a measurement."""
    model = re.search(r"model name\s*:\s*(.*)", _read("/proc/cpuinfo"))
    commit, here = os.environ.get("ADAPMIXED_COMMIT"), _git("rev-parse", "HEAD")
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "threads": torch.get_num_threads(),
        "caches": caches(),
        "instruction_set": adapmixed_ext.build_info()["instruction_set"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "adapmixed": adapmixed.__version__,
        # A copy of the sources has its commit from the environment. Nothing is known about changes
        # there, nor without git.
        "commit": commit or here or "unknown",
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no", ":!benchmarks/results"))
        if here and not commit
        else None,
    }


def headline(about: Mapping[str, Any]) -> str:
    """Return the result of `machine` in two lines."""
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, "
        f"{about['instruction_set']}\nadapmixed {about['adapmixed']}, torch {about['torch']}, "
        f"Python {about['python']}, commit {str(about['commit'])[:12]}"
        f"{' with changes' if about['dirty'] else ''}"
    )
