"""Times contestants on the same inputs, interleaved in one run, and reports ratios of medians."""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import adapmixed
import adapmixed_ext


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one contestant."""

    median: float
    fastest: float
    slowest: float
    runs: int


def interleave(
    contestants: Mapping[str, Callable[[int], object]], runs: Mapping[str, int]
) -> dict[str, Timing]:
    """Calls every contestant ``runs[name]`` times, in turn, so that noise falls on all alike.

    Args:
        contestants: by name; called with the number of the round, from which they choose inputs.
        runs: rounds per contestant, after one call that is not counted.
    """
    for call in contestants.values():
        call(0)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(max(runs.values())):
        for name, call in contestants.items():
            if turn < runs[name]:
                start = time.perf_counter()
                call(turn)
                seconds[name].append(time.perf_counter() - start)
    return {
        name: Timing(statistics.median(s), min(s), max(s), len(s)) for name, s in seconds.items()
    }


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    root = Path(__file__).resolve().parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    )
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "threads": torch.get_num_threads(),
        "instruction_set": adapmixed_ext.build_info()["instruction_set"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "adapmixed": adapmixed.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }
