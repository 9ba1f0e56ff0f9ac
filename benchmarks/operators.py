"""Time the operators against torch programs and against reading the logits.

    python -m benchmarks.operators                    # all tables, about 5 minutes on 2 cores
    python -m benchmarks.operators --only speed       # one or several of them
    python -m benchmarks.operators --out PREFIX       # also PREFIX.txt and PREFIX.json
    python -m benchmarks.operators --quick            # tiny sizes: does everything run?
    python -m benchmarks.operators --device cuda      # the tables on a GPU

Every timed call is checked first against the float64 reference. The contestants of a table take
turns in one run, on inputs in rotation that are larger than the cache. Figures are medians with the
fastest and slowest call, and ratios are those of medians. GB/s counts the bytes of the logits once.
"floor" is the measured time for reading them twice with the same threads, as a share of the call's
time. In the table of single operators they are read once.
"""

import argparse
import sys
from pathlib import Path

import torch

from adapmixed_ext import _C
from benchmarks import cuda_tables, scaling
from benchmarks.calls import (
    AFTER_TORCH,
    OURS,
    OURS_8,
    keep_torch_busy,
    our_calls,
    rotate,
)
from benchmarks.contestants import LOOP, RUN_TIME, SLOW, Program, torch_programs
from benchmarks.harness import (
    READ_TWICE,
    Neighbours,
    Query,
    Report,
    Timing,
    floors,
    interleave,
    machine,
    size,
)
from benchmarks.inputs import (
    KINDS,
    judge,
    make_queries,
)
from benchmarks.scaling import Sizes, check_setting

SETTINGS = ((18.0, 3.6), (3.0, 0.03), (17.5, 3.6))
TABLES = {
    "operators": scaling.operators,
    "evaluation": scaling.evaluation,
    "dtypes": scaling.dtypes,
    "batches": scaling.batches,
    "sizes": scaling.sizes,
}


def speed(report: Report, sizes: Sizes) -> None:
    """Time all contestants on one query: three settings, three kinds of input at two of them."""
    inputs = {kind: make_queries(sizes.models, sizes.vocab, kind=kind) for kind in KINDS}
    for order, radius in SETTINGS[:1] if sizes.quick else SETTINGS:
        programs, seconds = torch_programs(
            order, radius, inputs["near"][0], backend="eager" if sizes.quick else "inductor"
        )
        for kind, queries in inputs.items():
            if kind == "near":
                _compare(report, sizes, kind, queries, order, radius, programs)
            elif order != SETTINGS[2][0]:
                # The two slowest say nothing new here and would take most of the time.
                some = {n: p for n, p in programs.items() if n not in (LOOP, RUN_TIME)}
                _compare(report, sizes, kind, queries, order, radius, some)
        for name, taken in seconds.items():
            report.say(f"  first call of '{name}', which compiles it: {taken:.1f} s")
            row = {"name": name, "order": order, "radius": radius, "seconds": taken}
            report.tables.setdefault("compilation", []).append(row)
        report.say("  (less where torch finds an earlier run's result in its cache)\n")


def _compare(
    report: Report, sizes: Sizes, kind: str, queries: list[Query], order: float, radius: float,
    programs: dict[str, Program],
) -> None:  # fmt: skip
    first = queries[0]
    weight, truth = check_setting(first, order, radius)
    extra = {name: judge(p(*first), weight, truth) for name, p in programs.items()}
    calls = {
        name: rotate(queries, lambda query, program: program(*query), program)
        for name, program in programs.items()
    }
    calls |= our_calls(queries, order, radius) | floors(queries)
    runs = {n: 3 if n in SLOW else 7 if n in programs else 40 for n in calls}
    timings = interleave(
        calls, dict.fromkeys(runs, 2) if sizes.quick else runs, {AFTER_TORCH: keep_torch_busy}
    )
    report.say(
        f"speed: order {order:g}, radius {radius:g}, {kind} inputs (weights "
        f"{float(weight.min()):.3g} to {float(weight.max()):.3g}), {sizes.models} models, "
        f"{sizes.vocab} tokens, fp32, one query"
    )
    report.add(
        "speed", timings, base=OURS, floor=READ_TWICE, bytes_read=size(first), extra=extra,
        kind=kind, order=order, radius=radius, models=sizes.models, vocab=sizes.vocab,
    )  # fmt: skip
    _advantages(report, timings, list(programs), kind=kind, order=order, radius=radius)


def _advantages(
    report: Report, timings: dict[str, Timing], programs: list[str], **setting: object
) -> None:
    """Return how many times faster our calls are than each torch program, at one order."""
    ours = [name for name in (OURS, OURS_8) if name in timings]
    short = [
        name.removeprefix("ours: ").replace("project + leave_one_out", "ours") for name in ours
    ]
    report.say(f"  {'how many times as fast':41}" + "".join(f"{name:>20}" for name in short))
    for program in programs:
        ratios = [timings[program].median / timings[name].median for name in ours]
        report.say(f"  {program:41}" + "".join(f"{ratio:19.1f}x" for ratio in ratios))
        row = {**setting, "program": program, **dict(zip(ours, ratios, strict=True))}
        report.tables.setdefault("advantages", []).append(row)
    report.say()


def main() -> None:
    """Measure and print the tables, and write them if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["speed", *TABLES]
    of_a_gpu = [name for name, _ in cuda_tables.TABLES if name not in names]
    parser.add_argument("--only", nargs="+", choices=[*names, *of_a_gpu], metavar="TABLE",
                        help=f"of {', '.join(names)}, and with --device cuda "
                        f"{', '.join(of_a_gpu)}")  # fmt: skip
    parser.add_argument("--models", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--threads", type=int, help="of the CPU; 2, where that is what is timed")
    parser.add_argument("--instruction-set", choices=("scalar", "avx2", "avx512"),
                        help="of the CPU; the best, where it is not given")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dry-run", action="store_true",
                        help="--device cuda on the CPU: does it run?")  # fmt: skip
    parser.add_argument("--seconds", type=float,
                        help="--device cuda: nothing new begins after so many")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few runs, no meaning")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    arguments = parser.parse_args()
    default = (6, 512) if arguments.quick else (100, 50257)
    sizes = Sizes(arguments.models or default[0], arguments.vocab or default[1], arguments.quick)
    if sizes.models < 4 or sizes.vocab < 256:
        parser.error("the checks need at least 4 models and 256 tokens")
    if arguments.device == "cpu" and (arguments.dry_run or arguments.seconds is not None):
        parser.error("--dry-run and --seconds belong to --device cuda")
    if arguments.device == "cpu" and set(arguments.only or ()) & set(of_a_gpu):
        parser.error(f"{', '.join(of_a_gpu)} need --device cuda")
    arguments.only = arguments.only or [*names, *of_a_gpu]
    if arguments.device == "cpu" or arguments.threads:
        torch.set_num_threads(arguments.threads or 2)
    wanted = arguments.instruction_set
    if wanted is not None and not _C.use_instruction_set(wanted):
        parser.error(f"--instruction-set {wanted}: this processor or build does not have it")
    about = machine()
    if arguments.device == "cuda":
        sys.exit(cuda_tables.run(arguments, sizes, about))
    report = Report()
    caches = ", ".join(f"{k} {v >> 10} KiB" for k, v in about["caches"].items())
    report.say(
        f"{about['cpu']}, {about['cores']} cores ({caches}), {about['threads']} threads, "
        f"{about['instruction_set']}\nadapmixed {about['adapmixed']}, torch {about['torch']}, "
        f"Python {about['python']}, commit {about['commit'][:12]}"
        f"{' with changes' if about['dirty'] else ''}\n"
    )
    neighbours = Neighbours()
    for name in names:
        if name in arguments.only:
            (speed if name == "speed" else TABLES[name])(report, sizes)
    others = report.others(neighbours)
    if arguments.out is not None:
        report.write(arguments.out, machine=about, quick=sizes.quick, others=others)


if __name__ == "__main__":
    main()
