"""Time two pretrained models with members that adapt the output layer.

    python scripts/real_models.py                                # makes both models' folders
    python -m benchmarks.real [--only NAME] [--out PREFIX]

Each part is a process of its own, so that its peak memory counts nothing else. Times are those of
the clock and, since others may use the machine, of the processor.

- train: `adapmixed train --workers 2` over 10 kB of Python's standard library (`all`), and one
  member on 512 tokens in one thread (`one`), whose memory is counted. One epoch, blocks of 128.
- answer: load the ensemble (`load`), then read a prompt of 200 tokens and draw the first token
  (`first`) and 15 more (`token`, the median), with ClippedLogPool and an accountant in memory.
- evaluate: score a block of 256 tokens with ClippedLogPool.

ADAPMIXED_REAL_MODELS names the folder of the models, if it is not build/models.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from adapmixed import Accountant, ClippedLogPool, Ensemble
from adapmixed.evaluation import evaluate
from adapmixed.generation.loop import Answerer
from adapmixed.rng import SecureRandom
from adapmixed.training import FinetuneConfig
from adapmixed.training.blocks import token_stream
from adapmixed.training.finetune import train_adapter
from adapmixed.training.settings import HEAD
from benchmarks.harness import Neighbours, Report, headline, machine

MODELS = Path(os.environ.get("ADAPMIXED_REAL_MODELS") or "build/models")
NAMES, MEMBERS = ("smollm2", "gemma3"), (20, 100)
BLOCK, TEXT_BYTES, DOCUMENT, TRAINED = 128, 10_000, 100, 512
PROMPT, TOKENS, RUNS, SCORED = 200, 16, 3, 255
POOL = ClippedLogPool(-0.25, 1.0, 2.0)
Row = dict[str, Any]


def documents() -> list[str]:
    """Return parts of the standard library's modules in alphabetical order."""
    found: list[str] = []
    left = TEXT_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for start in range(0, len(text), DOCUMENT):
            part = text[start : start + DOCUMENT]
            left -= len(part.encode())
            if left < 0:
                return found
            found.append(part)
    return found


def timed(texts: list[str], members: int, folder: Path, base: Path) -> tuple[float, float]:
    """Train once; return the seconds of the clock, and of the processor."""
    corpus = folder / "corpus.jsonl"
    rows = ({"id": str(number), "text": text} for number, text in enumerate(texts))
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [sys.executable, "-m", "adapmixed", "train", "--base", str(base), "--adapt", "head"]
    words += ["--corpus", str(corpus), "--id-column", "id", "--output", str(folder / "head")]
    words += ["--models", str(members), "--share-shards", "--workers", "2", "--epochs", "1"]
    begun, before = time.perf_counter(), os.times()
    subprocess.run([*words, "--block-size", str(BLOCK)], stdout=subprocess.DEVNULL, check=True)
    used = os.times()  # of the command and its workers, which it has waited for
    return time.perf_counter() - begun, sum(used[2:4]) - sum(before[2:4])


def clock() -> torch.Tensor:
    """Return the seconds of the clock and of this process's cores."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def train(base: Path, members: int, folder: Path) -> Row:
    """Return the seconds of a whole training, and of one member."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = documents()
    whole = timed(texts, members, folder, base)
    tokens = token_stream(AutoTokenizer.from_pretrained(base), texts)
    settings = HEAD | {"epochs": 1, "steps": 1, "block_size": BLOCK}
    config = FinetuneConfig(**settings, target_modules=("lm_head",))
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.set_num_threads(1)
    begun = clock()
    train_adapter(model, tokens[:TRAINED], config, seed=0, shard=0)
    one = (clock() - begun).tolist()
    return {"all": list(whole), "tokens": len(tokens), "one": one}


def load(base: Path, folder: Path) -> tuple[Ensemble, list[int]]:
    ensemble = Ensemble.from_pretrained(base, folder / "head")
    return ensemble, token_stream(ensemble.tokenizer, documents())


def answer(base: Path, members: int, folder: Path) -> Row:
    """Return the seconds of loading, of a first token and of a later one, as medians."""
    begun = clock()
    ensemble, tokens = load(base, folder)
    loaded = clock() - begun
    answerer = Answerer(ensemble, POOL, Accountant(1e-5), SecureRandom(), memory_bytes=2 << 30)
    first, later = [], []
    for run in range(RUNS):
        prompt = [*ensemble.beginning, *tokens[PROMPT * run : PROMPT * (run + 1)]][:PROMPT]
        times = [clock()]
        for _ in answerer.stream(torch.tensor([prompt]), max_new_tokens=TOKENS):
            times.append(clock())
        first.append(times[1] - times[0])
        later += torch.stack(times)[1:].diff(dim=0)
    medians = [torch.stack(found).median(0).values.tolist() for found in (first, later)]
    return {"load": loaded.tolist(), "first": medians[0], "token": medians[1]}


def score(base: Path, members: int, folder: Path) -> Row:
    """Return the seconds of an evaluation, without loading."""
    ensemble, tokens = load(base, folder)
    begun = clock()
    evaluate(
        ensemble, tokens, {"pool": POOL}, delta=1e-5, rng=SecureRandom(), block=SCORED + 1,
        queries=SCORED,
    )  # fmt: skip
    return {"evaluate": (clock() - begun).tolist()}


PARTS = {"train": train, "answer": answer, "evaluate": score}


def part(name: str, model: str, members: int, folder: Path) -> Row:
    """Return what one part measures in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.real", "--part", name, "--only", model]
    words += ["--members", str(members), "--folder", str(folder)]
    neighbours = Neighbours()
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return {"others": neighbours.share(), **json.loads(done.stdout.splitlines()[-1])}


def measure(report: Report, model: str, members: int) -> None:
    """Measure all parts of one model and number of members."""
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: part(name, model, members, Path(folder)) for name in PARTS}
    found = {"model": model, "members": members}
    found |= rows["answer"] | rows["evaluate"] | rows["train"]
    found["peak"] = {name: row["peak"] for name, row in rows.items()}
    found["others"] = max(row["others"] or 0.0 for row in rows.values())
    report.tables.setdefault("real", []).append(found)
    report.say(f"{model}, N = {members}; others used up to {found['others']:.0%} of the cores")
    each = {"load": 1, "first": 1, "token": 1, "evaluate": SCORED, "one": TRAINED, "all": 1}
    for name, count in each.items():
        wall, processor = (1e3 * seconds / count for seconds in found[name])
        report.say(
            f"  {name:10} {wall:10.1f} ms{' a token' * (count > 1):8} (processor {processor:.1f})"
        )
    peaks = ", ".join(f"{name} {peak / 1e9:.1f} GB" for name, peak in found["peak"].items())
    report.say(f"  peak memory: {peaks}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=NAMES, help="one of the models (default: both)")
    parser.add_argument("--members", type=int, nargs="+", default=MEMBERS, help="numbers N")
    parser.add_argument("--out", type=Path, help="write PREFIX.json and PREFIX.txt")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        row = PARTS[given.part](MODELS / given.only, given.members[0], given.folder)
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({**row, "peak": peak}))
        return
    about, report = machine(), Report()
    report.say(f"{headline(about)}, load average {os.getloadavg()[0]:.1f}\n")
    for model in (given.only,) if given.only else NAMES:
        for members in given.members:
            measure(report, model, members)
            if given.out:
                report.write(given.out, machine=about)


if __name__ == "__main__":
    main()
