"""Times of contestants on a GPU, by events around bursts of calls or of replayed graphs."""

import gc
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import adapmixed_ext
from benchmarks.harness import Call, Query, Timing, floors

BURST = 1e-3  # seconds that the calls between two events shall take: an event resolves 0.5 µs
MOST_CALLS = 64
WARM_UP = 2e-3
QUEUEING = 40_000  # clock cycles of the GPU, some 20 µs, in which the CPU queues one replay
COPY = "floor: copying the logits"


@dataclass(frozen=True)
class Contestant:
    """A program to time: ``call(turn)`` works on the input of that turn, one of ``turns``.

    With ``replay`` one CUDA graph for each input is replayed. Neither Python nor launches of single
    kernels delay it. Without it the figure is that of the calls as Python makes them.
    """

    call: Call
    turns: int
    replay: bool = False


class Card:
    """The GPU; with ``dry`` the CPU instead, to see whether the program runs."""

    def __init__(self, dry: bool = False) -> None:
        if not dry and not torch.cuda.is_available():
            raise SystemExit("no CUDA device is reachable (--dry-run runs the tables without one)")
        if not dry and not adapmixed_ext.build_info()["cuda"]:
            raise SystemExit("adapmixed_ext was built without CUDA")
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.cache = 2**20 if dry else _l2(torch.cuda.get_device_properties(self.device))

    def holds(self, size: int) -> bool:
        """Return whether so many bytes fit, with as many again for intermediate results."""
        return self.dry or 2 * size < torch.cuda.mem_get_info(self.device)[0]

    def forget(self) -> None:
        """Give back the memory of the last table."""
        gc.collect()
        if not self.dry:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def captured(self, contestant: Contestant) -> Call:
        """Return the contestant as graphs, one for each input, that share their memory."""
        call, turns = contestant.call, contestant.turns
        if self.dry:
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
        if self.dry:
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
        build = adapmixed_ext.build_info()
        if self.dry:
            return {"name": "none (dry run)", "cuda": None, "driver": None}
        card = torch.cuda.get_device_properties(self.device)
        return {
            "name": card.name,
            "capability": f"{card.major}.{card.minor}",
            "memory": card.total_memory,
            "multiprocessors": card.multi_processor_count,
            "l2": self.cache,
            "driver": _ask("driver_version"),
            "clock": _ask("clocks.max.sm"),
            "power_limit": _ask("power.limit"),
            "cuda": torch.version.cuda,
            "built_for": build["cuda_architectures"],
        }


def awaited(calls: dict[str, Call], device: torch.device) -> dict[str, Call]:
    """Return the same calls, each of which waits until the device has done its work."""
    if device.type == "cpu":
        return calls

    def until_done(call: Call, turn: int) -> None:
        call(turn)
        torch.cuda.synchronize(device)

    return {name: partial(until_done, call) for name, call in calls.items()}


def _l2(card: Any) -> int:
    # Where torch does not tell, more than any card has.
    return int(getattr(card, "L2_cache_size", 0)) or 128 * 2**20


def _ask(field: str) -> str | None:
    """Return one field of nvidia-smi; None if there is no such program."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def card_floors(inputs: list[Query]) -> dict[str, Contestant]:
    """Return floors: torch's sum reads the logits once and twice, a copy reads and writes them."""
    target = [torch.empty_like(tensor) for tensor in inputs[0]]

    def copy(turn: int) -> None:
        for to, tensor in zip(target, inputs[turn % len(inputs)], strict=True):
            to.copy_(tensor)

    calls: dict[str, Call] = {**floors(inputs), COPY: copy}
    return {name: Contestant(call, len(inputs), replay=True) for name, call in calls.items()}


def interleave(
    card: Card,
    contestants: Mapping[str, Contestant],
    runs: Mapping[str, int],
    refused: Callable[[str, Exception], None],
) -> dict[str, Timing]:
    """Time every contestant ``runs[name]`` times, in turn; each time is of a burst of calls.

    A contestant that cannot be captured is reported to ``refused`` and left out.
    """
    calls, bursts, warm_ups = {}, {}, {}
    for name, contestant in contestants.items():
        call = contestant.call
        if contestant.replay:
            try:
                call = card.captured(contestant)
            except RuntimeError as error:
                refused(name, error)
                continue
        taken = min(card.burst(call, 0, 1, ahead=False, warm=k) for k in (1, 2))
        calls[name] = call
        bursts[name] = min(MOST_CALLS, math.ceil(BURST / taken))
        warm_ups[name] = 0 if taken > 0.5 else min(8, math.ceil(WARM_UP / taken))
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
                card.burst(call, turns[name], bursts[name], ahead=ahead, warm=warm)
            )
            turns[name] += bursts[name] + warm
    return {
        name: Timing(statistics.median(s), min(s), max(s), len(s)) for name, s in seconds.items()
    }
