"""Times of contestants in turn: of calls, and on a GPU also of replayed graphs."""

import gc
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

import adapmixed_ext

Call = Callable[[int], object]

BURST = 1e-3  # seconds that the calls of one timing shall take: an event resolves 0.5 µs
MOST_CALLS = 64
# Seconds on the CPU, where after another's turn one library's threads still spin and the other's
# are asleep, and on a GPU.
WARM_UP = 0.02, 2e-3
QUEUEING = 40_000  # clock cycles of the GPU, some 20 µs, in which the CPU queues one replay


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one contestant."""

    median: float
    fastest: float
    slowest: float
    runs: int

    def per(self, queries: int) -> "Timing":
        """Return the time for each of ``queries`` that one call answers."""
        times = (s / queries for s in (self.median, self.fastest, self.slowest))
        return Timing(*times, self.runs)


@dataclass(frozen=True)
class Contestant:
    """A program to time: ``call(turn)`` works on the input of that turn, one of ``turns``.

    With ``replay`` one CUDA graph for each input is replayed on a GPU. Neither Python nor launches
    of single kernels delay it. Without it the figure is that of the calls as Python makes them.
    """

    call: Call
    turns: int
    replay: bool = False


class Device:
    """The CPU, or a GPU.

    Attributes:
        graphs: whether contestants are replayed, too; with ``dry`` on the CPU, where that is the
            same, to see whether the program runs.
        cache: bytes of the last cache, None if they are the CPU's.
    """

    def __init__(self, name: str, dry: bool = False) -> None:
        """Choose "cpu" or "cuda"."""
        self.graphs, self.gpu = name == "cuda", name == "cuda" and not dry
        if self.gpu and not torch.cuda.is_available():
            raise SystemExit("no CUDA device is reachable (--dry-run runs the tables without one)")
        if self.gpu and not adapmixed_ext.build_info()["cuda"]:
            raise SystemExit("adapmixed_ext was built without CUDA")
        self.device = torch.device("cuda" if self.gpu else "cpu")
        self.cache = _l2(torch.cuda.get_device_properties(self.device)) if self.gpu else None

    def forget(self) -> None:
        """Give back the memory of the last table."""
        gc.collect()
        if self.gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def captured(self, contestant: Contestant) -> Call:
        """Return the contestant as graphs, one for each input, that share their memory."""
        call, turns = contestant.call, contestant.turns
        if not self.gpu:
            return call
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        pool, graphs = torch.cuda.graph_pool_handle(), []
        with torch.cuda.stream(stream):
            for turn in range(min(turns, 3)):
                call(turn)  # whatever is loaded or compiled at first calls
            stream.synchronize()
            for turn in range(turns):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool)
                try:
                    call(turn)
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
                graphs.append(graph)
        torch.cuda.synchronize(self.device)
        return lambda turn: graphs[turn % turns].replay()

    def burst(self, call: Call, first: int, count: int, *, ahead: bool, warm: int) -> float:
        """Return seconds per call of ``count`` calls, after ``warm`` uncounted ones.

        With ``ahead`` the GPU waits until all are queued, so that only its own time is measured.
        Otherwise it works on the uncounted calls while the first counted one is queued.
        """
        for turn in range(first, first + warm):
            call(turn)
        first += warm
        if not self.gpu:
            start = time.perf_counter()
            for turn in range(first, first + count):
                call(turn)
            return (time.perf_counter() - start) / count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if ahead:
            torch.cuda._sleep(QUEUEING * (count + 2))
        begin.record()
        for turn in range(first, first + count):
            call(turn)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count

    def about(self) -> dict[str, Any]:
        """Return the settings of the card that the figures depend on."""
        if not self.gpu:
            return {"name": "none (dry run)", "cuda": None, "driver": None}
        return {
            "name": torch.cuda.get_device_properties(self.device).name,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "built_for": adapmixed_ext.build_info()["cuda_architectures"],
        }


def _l2(card: Any) -> int:
    # Where torch does not tell, more than any card has.
    return int(getattr(card, "L2_cache_size", 0)) or 128 * 2**20


def _driver() -> str | None:
    """Return the version that nvidia-smi tells; None if there is no such program."""
    command = ["nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def interleave(
    device: Device,
    contestants: Mapping[str, Contestant],
    runs: Mapping[str, int],
    refused: Callable[[str, Exception], None],
) -> dict[str, Timing]:
    """Time every contestant ``runs[name]`` times, in turn, so that noise falls on all alike.

    Each time is of a burst of calls, after uncounted calls on other inputs. Contestants with fewer
    runs are spread over the whole time. One that cannot be captured is reported to ``refused`` and
    left out.
    """
    calls, bursts, warm_ups = {}, {}, {}
    for name, contestant in contestants.items():
        call = contestant.call
        if contestant.replay:
            try:
                call = device.captured(contestant)
            except RuntimeError as error:
                refused(name, error)
                continue
        taken = min(device.burst(call, 0, 1, ahead=False, warm=k) for k in (1, 2))
        calls[name] = call
        bursts[name] = min(MOST_CALLS, math.ceil(BURST / taken))
        warm_ups[name] = 0 if taken > 0.5 else min(8, math.ceil(WARM_UP[device.gpu] / taken))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    turns = dict.fromkeys(calls, 0)
    rounds = max((runs[name] for name in calls), default=0)
    for turn in range(rounds):
        for name, call in calls.items():
            done = len(seconds[name])
            if done * rounds > turn * runs[name] or done >= runs[name]:
                continue
            ahead, warm = contestants[name].replay, warm_ups[name]
            seconds[name].append(
                device.burst(call, turns[name], bursts[name], ahead=ahead, warm=warm)
            )
            turns[name] += bursts[name] + warm
    return {
        name: Timing(statistics.median(s), min(s), max(s), len(s)) for name, s in seconds.items()
    }
