"""Time the training of an ensemble: head members, and members of all linear layers.

    python -m benchmarks.training [--quick] [--out PREFIX]

The corpus is 2 MB of Python's standard library in documents of 2 000 characters: 100 shards, 3
epochs, blocks of 256 tokens, the built-in base, two workers. The whole command is timed, start-up
included. Members of all layers are trained on every tenth document into a tenth of the shards, and
the time after the first member is multiplied by ten. The processor time of head members is counted
too, since on a busy machine it says more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from adapmixed.data import demo_base
from benchmarks.harness import Report, headline, machine

TEXT_BYTES = 2_000_000
DOCUMENT = 2_000  # characters
SHARDS = 100
PART = 10  # members of all layers are trained on one document of so many


def documents(size: int) -> list[str]:
    """Return parts of the standard library's modules in alphabetical order, up to `size` bytes."""
    found, left = [], size
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for start in range(0, len(text), DOCUMENT):
            part = text[start : start + DOCUMENT]
            left -= len(part.encode())
            if left < 0:
                return found
            found.append(part)
    return found


def timed(texts: list[str], shards: int, adapt: str, folder: Path) -> dict[str, float]:
    """Train once; return seconds in all, until the first member, and of the processor."""
    corpus = folder / f"{adapt}.jsonl"
    rows = ({"id": str(number), "text": text} for number, text in enumerate(texts))
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [sys.executable, "-m", "adapmixed", "train", "--base", str(demo_base())]
    words += ["--corpus", str(corpus), "--id-column", "id", "--output", str(folder / adapt)]
    words += ["--models", str(shards), "--epochs", "3", "--block-size", "256", "--workers", "2"]
    words += ["--rank", "8", "--learning-rate", "3e-3", "--adapt", adapt]
    begun, first, before = time.perf_counter(), 0.0, os.times()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if not first and any((folder / adapt).glob("member-*")):
            first = time.perf_counter() - begun
        time.sleep(0.1)
    if process.returncode != 0:
        raise SystemExit(f"training ended with status {process.returncode}")
    seconds = time.perf_counter() - begun
    used = os.times()  # of the command and its workers, which it has waited for
    processor = sum(used[2:4]) - sum(before[2:4])
    return {"seconds": seconds, "first": first, "processor": processor}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a hundredth of the text")
    parser.add_argument("--out", type=Path, help="write PREFIX.json and PREFIX.txt")
    arguments = parser.parse_args()
    about, report = machine(), Report()
    report.say(f"{headline(about)}\n")
    texts = documents(TEXT_BYTES // (100 if arguments.quick else 1))
    shards = 10 if arguments.quick else SHARDS
    with tempfile.TemporaryDirectory() as folder:
        head = timed(texts, shards, "head", Path(folder))
        part = timed(texts[::PART], shards // PART, "all", Path(folder))
    whole = part["first"] + PART * (part["seconds"] - part["first"])
    report.say(f"training: {len(texts)} documents, {shards} members, 3 epochs, 2 workers")
    report.say(
        f"  head: {head['seconds']:.0f} s ({head['processor']:.0f} s of the processor), the first "
        f"member after {head['first']:.0f} s\n"
        f"  all:  {whole:.0f} s, from {part['seconds']:.0f} s for one part of {PART} "
        f"({part['processor']:.0f} s of the processor)"
    )
    report.tables["training"] = [{"adapt": "head", **head}, {"adapt": "all", **part}]
    if arguments.out:
        report.write(arguments.out, machine=about)


if __name__ == "__main__":
    main()
