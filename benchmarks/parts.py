"""Profile of a call, by torch operation."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Call, Report

_LEAST = 0.01  # share below which an operation is one of the rest


def parts(report: Report, table: str, call: Call, device: torch.device, turns: int = 5) -> None:
    """Profile some calls and print each operation's share of the time in operations.

    The time is that of the call's own thread, or of the GPU. The profiler slows small operations
    down a little.
    """
    cuda = device.type == "cuda"
    call(0)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=activities) as profiled:
        for turn in range(1, turns + 1):
            call(turn)
    times = {
        event.key: event.self_device_time_total if cuda else event.self_cpu_time_total
        for event in profiled.key_averages()
    }
    total = sum(times.values())
    shares = {name: time / total for name, time in times.items() if time >= _LEAST * total}
    shown = dict(sorted(shares.items(), key=lambda item: -item[1]))
    shown["the rest"] = 1 - sum(shown.values())
    report.say("  of it: " + ", ".join(f"{name} {share:.0%}" for name, share in shown.items()))
    report.tables[table] = [{"name": name, "share": share} for name, share in shown.items()]
