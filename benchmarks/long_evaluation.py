"""Check that a long evaluation stays in bounded memory and survives being killed.

    python -m benchmarks.long_evaluation                      # 99 840 queries, twice: 20 minutes
    python -m benchmarks.long_evaluation --out PREFIX         # also PREFIX.txt and PREFIX.json

It runs `adapmixed evaluate --result` with the built-in models over the built-in held-out and
private text, five methods together. It watches the resident memory and the size of the result
file from outside. Then it runs the same again, ended by SIGKILL at some queries and resumed. Both
results must be equal to the last digit.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from adapmixed.data import demo_base
from adapmixed.data.builtin import held_out_documents, private_documents
from adapmixed.evaluation import Evaluation, read_result
from benchmarks.demo import demo_ensemble
from benchmarks.harness import Report, headline, machine

METHODS = (
    "unprotected",
    "pmixed epsilon=8",
    "adapmixed screen=none",
    "clipped-log-pool lower=-0.25 upper=1 scale=2",
)
MEMORY = "73M"
MARKS = (11_000, 25_000, 49_000, 75_000)


def command(text: Path, result: Path, queries: int) -> list[str]:
    """Return the command of the evaluation, as a user starts it."""
    words = [sys.executable, "-m", "adapmixed", "evaluate", "--base", str(demo_base())]
    words += ["--ensemble", str(demo_ensemble()), "--text", str(text), "--block", "128"]
    words += ["--queries", str(queries), "--memory", MEMORY, "--result", str(result), "--resume"]
    words += ["--seed", "0"]
    for method in METHODS:
        words += ["--mechanism", method]
    return words


def status(process: int, field: str) -> int:
    """Return a field of a running process's status, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def answered(result: Path) -> int:
    """Return the number of queries whose answers are in the result file."""
    if not result.exists():
        return 0
    return max((one.queries for runs in read_result(result).runs for one in runs.evaluations),
               default=0)  # fmt: skip


def watched(words: list[str], result: Path, stops: list[int], report: Report) -> list[Evaluation]:
    """Run to the end, killed at `stops`; return the result of every method."""
    marks, begun = [*MARKS], time.monotonic()
    row: dict[str, float] = {}
    while True:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        killed = False
        while process.poll() is None:
            time.sleep(0.2)
            count = answered(result)
            row = seen(process.pid, result, count, begun) or row
            if marks and count >= marks[0]:
                marks = [mark for mark in marks if mark > count]
                _tell(report, row)
            if stops and count >= stops[0]:
                del stops[0]
                process.send_signal(signal.SIGKILL)
                killed = True
                report.say(f"  killed after {count} queries")
        if not killed:
            break
    if process.returncode != 0:
        raise SystemExit(f"the evaluation ended with status {process.returncode}")
    seconds = time.monotonic() - begun
    _tell(report, row | {"queries": answered(result), "seconds": seconds})
    found = read_result(result)
    if not found.complete:
        raise SystemExit("the evaluation is not complete")
    return [one for runs in found.runs for one in runs.evaluations]


def seen(process: int, result: Path, count: int, begun: float) -> dict[str, float]:
    """Return the bytes of the process and of its result; nothing if it has just ended."""
    try:
        peak, now = status(process, "VmHWM"), status(process, "VmRSS")
    except (OSError, StopIteration):
        return {}
    size = result.stat().st_size if result.exists() else 0
    seconds = time.monotonic() - begun
    return {"queries": count, "peak": peak, "now": now, "result": size, "seconds": seconds}


def _tell(report: Report, row: Mapping[str, float]) -> None:
    report.say(
        f"  {row['queries']:7} queries: {row['peak'] / 2**20:.0f} MiB at most, "
        f"{row['now'] / 2**20:.0f} now, result file {row['result'] / 1e3:.1f} kB, "
        f"{row['seconds']:.0f} s"
    )
    report.tables.setdefault("memory", []).append(dict(row))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queries", type=int, default=99_840)
    parser.add_argument("--kill", type=int, nargs="*", default=[21_000, 60_000], metavar="QUERIES",
                        help="of the second run; none: there is no second run")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    arguments = parser.parse_args()
    about, report = machine(), Report()
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    report.say(f"{headline(about)}, OMP_NUM_THREADS {threads}\n")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        documents = [*held_out_documents(), *private_documents()]
        text.write_text("\n\n".join(document.text for document in documents), encoding="utf-8")
        results = [Path(folder, f"{name}.json") for name in ("whole", "killed")]
        report.say(f"evaluate --block 128 --memory {MEMORY}, without a break")
        words = command(text, results[0], arguments.queries)
        whole = watched(words, results[0], [], report)
        for one in whole:
            report.say(f"    {one.name:20} perplexity {one.perplexity:.6f}")
            row = {"name": one.name, "perplexity": one.perplexity, "queries": one.queries}
            report.tables.setdefault("methods", []).append(row)
        if arguments.kill:
            report.say("the same, killed and resumed")
            words = command(text, results[1], arguments.queries)
            killed = watched(words, results[1], sorted(arguments.kill), report)
            same = [(one.name, one.perplexity, one.guarantee, one.queries) for one in whole] == [
                (one.name, one.perplexity, one.guarantee, one.queries) for one in killed
            ]
            report.say(f"  {'equal in every digit' if same else 'DIFFERENT'}")
            report.tables["resumed"] = [{"kills": arguments.kill, "equal": same}]
            if not same:
                sys.exit("a resumed evaluation differs")
    if arguments.out is not None:
        report.write(arguments.out, machine=about)


if __name__ == "__main__":
    main()
