"""Time two pretrained models with members that adapt the output layer.

    python scripts/real_models.py                                # makes both models' folders
    python -m benchmarks.real [--only NAME] [--out PREFIX]

Each part is a process of its own, so that its peak memory counts nothing else:

- train: one member on 2 048 tokens in one thread, and then `adapmixed train --workers 2` over 40 kB
  of Python's standard library. One epoch, blocks of 128 tokens. Memory is the largest process'.
- answer: load the ensemble, then the time until the first token after a prompt of 200 tokens, and
  of each token after it, with ClippedLogPool and an accountant in memory.
- evaluate: score a text in blocks of 256 tokens with ClippedLogPool.

ADAPMIXED_REAL_MODELS names the folder of the models, if it is not build/models.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
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
from adapmixed.training.presets import HEAD
from benchmarks.harness import Neighbours, Report, headline, machine
from benchmarks.training import documents, timed

MODELS = Path(os.environ.get("ADAPMIXED_REAL_MODELS") or "build/models")
NAMES, MEMBERS = ("smollm2", "gemma3"), (20, 100)
BLOCK, TEXT_BYTES, DOCUMENT, TRAINED = 128, 40_000, 400, 2048
PROMPT, TOKENS, RUNS, SCORED = 200, 32, 5, 510
POOL = ClippedLogPool(-0.25, 1.0, 2.0)
Row = dict[str, Any]


def train(base: Path, members: int, folder: Path) -> Row:
    """Return the whole time of a training, and the tokens a second of one member."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = documents(TEXT_BYTES, DOCUMENT)
    options = ("--epochs", "1", "--block-size", str(BLOCK))
    whole = timed(texts, members, "head", folder, base, *options)["seconds"]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    tokens = token_stream(AutoTokenizer.from_pretrained(base), texts)
    config = FinetuneConfig(**HEAD, target_modules=("lm_head",), epochs=1, block_size=BLOCK)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.set_num_threads(1)
    begun = time.perf_counter()
    train_adapter(model, tokens[:TRAINED], config, seed=0, shard=0)
    rate = TRAINED / (time.perf_counter() - begun)
    return {"seconds": whole, "tokens": len(tokens), "rate": rate, "peak": 1024 * peak}


def load(base: Path, folder: Path) -> tuple[Ensemble, list[int]]:
    ensemble = Ensemble.from_pretrained(base, folder / "head")
    return ensemble, token_stream(ensemble.tokenizer, documents(TEXT_BYTES, DOCUMENT))


def answer(base: Path, members: int, folder: Path) -> Row:
    """Return the seconds of loading, of a first token and of a later one, as medians."""
    begun = time.perf_counter()
    ensemble, tokens = load(base, folder)
    loaded = time.perf_counter() - begun
    answerer = Answerer(ensemble, POOL, Accountant(1e-5), SecureRandom(), memory_bytes=2 << 30)
    first, later = [], []
    for run in range(RUNS):
        prompt = [*ensemble.beginning, *tokens[PROMPT * run : PROMPT * (run + 1)]][:PROMPT]
        before = time.perf_counter()
        for _ in answerer.stream(torch.tensor([prompt]), max_new_tokens=TOKENS):
            now = time.perf_counter()
            later.append(now - before)
            before = now
        first.append(later.pop(-TOKENS))
    return {"load": loaded, "first": statistics.median(first), "token": statistics.median(later)}


def score(base: Path, members: int, folder: Path) -> Row:
    """Return the tokens a second of an evaluation, without loading."""
    ensemble, tokens = load(base, folder)
    begun = time.perf_counter()
    (found,) = evaluate(
        ensemble, tokens, {"pool": POOL}, delta=1e-5, rng=SecureRandom(), block=256, queries=SCORED
    )
    return {"rate": found.queries / (time.perf_counter() - begun)}


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
    one, two, three = rows.values()
    peaks = "  ".join(f"{row['peak'] / 1e9:4.1f}" for row in rows.values())
    others = max(row["others"] or 0.0 for row in rows.values())
    report.say(
        f"  {model:8} {members:4}  {two['load']:6.1f}  {1e3 * two['first']:6.0f}"
        f"  {1e3 * two['token']:6.0f}  {three['rate']:8.1f}  {one['rate']:8.0f}"
        f"  {one['seconds']:8.0f}    {peaks}  {others:6.0%}"
    )
    report.tables.setdefault("real", []).append({"model": model, "members": members, **rows})


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
        row.setdefault("peak", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        print(json.dumps(row))
        return
    about, report = machine(), Report()
    report.say(f"{headline(about)}, load average {os.getloadavg()[0]:.1f}\n")
    report.say("                 load   first   token  evaluate   train 1   train N    peak GB of")
    report.say("              N      s      ms      ms  tokens/s  tokens/s         s    the parts")
    for model in (given.only,) if given.only else NAMES:
        for members in given.members:
            measure(report, model, members)
    if given.out:
        report.write(given.out, machine=about)


if __name__ == "__main__":
    main()
