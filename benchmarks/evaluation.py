"""Time a whole evaluation, models and mechanism, against one adapter after the other.

    python -m benchmarks.evaluation [--quick] [--out PREFIX]

Both programs take turns in one run, on the built-in models and the same windows of text:

- the published way: peft's `set_adapter` and a forward pass for every member, then the published
  algorithm as a Python loop over queries and models (`contestants.published`), whose mixture scores
  the token;
- ours: `adapmixed.evaluation.evaluate` with AdaPMixED, screening off as there.

Log-likelihoods are compared before the timing. At order 3 they must agree. At the paper's order 18
the published weights are wrong in float32, and the output says so; benchmarks.operators says by how
much.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from adapmixed.data.demo import demo_base, held_out_tokens
from adapmixed.ensemble import Ensemble
from adapmixed.evaluation import evaluate
from adapmixed.mechanisms import AdaPMixED
from adapmixed.rng import SeededRandom
from benchmarks.contestants import published
from benchmarks.demo import demo_ensemble
from benchmarks.harness import Neighbours, Report, Timing, headline, machine

# Orders and betas: the paper's, and one whose powers float32 can hold.
SETTINGS = ((18.0, 0.2), (3.0, 0.1))
BLOCK = 128


def peft_model(models: int) -> Any:
    """Return the built-in base with its members as adapters "m0", "m1", ..."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folders = sorted(demo_ensemble().glob("member-*"))
    assert len(folders) == models
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(demo_base(), dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folders[0], adapter_name="m0")
        for index, folder in enumerate(folders[1:], start=1):
            model.load_adapter(folder, adapter_name=f"m{index}")
    return model.eval()


@torch.no_grad()
def one_after_the_other(
    model: Any, models: int, tokens: list[int], queries: int, order: float, beta: float
) -> float:
    """Mean negative log-likelihood, nats a query."""
    total, done = 0.0, 0
    for start in range(0, len(tokens), BLOCK):
        block = torch.tensor(tokens[start : start + BLOCK], device=model.device)
        rows = []
        for index in range(models):
            model.set_adapter(f"m{index}")
            rows.append(model(input_ids=block[None, :-1]).logits[0])
        with model.disable_adapter():
            public = model(input_ids=block[None, :-1]).logits[0]
        for position in range(min(len(block) - 1, queries - done)):
            private = torch.stack([row[position] for row in rows])[:, None]
            q = public[position : position + 1]
            weights, _ = published(private, q, order, beta * order)
            target = int(block[position + 1])
            p, p0 = private[:, 0].softmax(-1)[:, target], q[0].softmax(-1)[target]
            total -= math.log(float((weights * p + (1 - weights) * p0).mean()))
            done += 1
        if done == queries:
            return total / done
    raise ValueError(f"queries must be at most {done}, what the text offers, got {queries}")


def ours(ensemble: Ensemble, tokens: list[int], queries: int, order: float, beta: float) -> float:
    """Mean negative log-likelihood, nats a query."""
    mechanism = AdaPMixED(order, beta, screen=None)
    (found,) = evaluate(
        ensemble, tokens, {"adapmixed": mechanism}, delta=1e-5, rng=SeededRandom(0), block=BLOCK,
        queries=queries,
    )  # fmt: skip
    return math.log(found.perplexity)


def compare(
    report: Report, ensemble: Ensemble, model: Any, tokens: list[int], queries: int, runs: int,
    order: float, beta: float,
) -> None:  # fmt: skip
    """Compare their scores, then time both by turns, in ms a query."""
    contestants = {
        "published way": lambda: one_after_the_other(
            model, ensemble.num_models, tokens, queries, order, beta
        ),
        "adapmixed": lambda: ours(ensemble, tokens, queries, order, beta),
    }
    first, second = (call() for call in contestants.values())
    alike = abs(first - second) < 1e-3
    if order < 4 and not alike:
        raise RuntimeError(f"both must score alike, got {first} and {second} nats a query")
    report.say(
        f"evaluation: the built-in models, N = {ensemble.num_models}, V = {ensemble.vocab_size}, "
        f"{queries} queries in blocks of {BLOCK}, order {order:g}, beta {beta:g}; ms a query\n"
        f"  scores: {first:.6f} and {second:.6f} nats a query"
        + ("" if alike else ": the published weights are WRONG")
    )
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(runs):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            seconds[name].append((time.perf_counter() - start) / queries)
    slowest = statistics.median(seconds["published way"])
    for name, taken in seconds.items():
        timing = Timing(statistics.median(taken), min(taken), max(taken), len(taken))
        spread = f"[{1e3 * timing.fastest:.2f}, {1e3 * timing.slowest:.2f}]"
        ratio = slowest / timing.median
        report.say(f"  {name:20}{1e3 * timing.median:9.2f} ms  {spread:>20}  {ratio:6.1f}x")
        row = {"name": name, "order": order, "beta": beta, "alike": alike, **asdict(timing)}
        report.tables.setdefault("evaluation", []).append(row | {"ratio": ratio})
    report.say()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda, of both ways")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--queries", type=int, default=127, help="a run, of every contestant")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few queries, no meaning")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about, report, neighbours = machine(), Report(), Neighbours()
    report.say(f"{headline(about)}\n")
    queries, runs = (5, 1) if arguments.quick else (arguments.queries, arguments.runs)
    ensemble = Ensemble.from_pretrained(demo_base(), demo_ensemble(), device=arguments.device)
    models = ensemble.num_models
    tokens = held_out_tokens(ensemble.tokenizer)
    model = peft_model(models).to(arguments.device)
    for order, beta in SETTINGS:
        compare(report, ensemble, model, tokens, queries, runs, order, beta)
    others = report.others(neighbours)
    if arguments.out:
        report.write(arguments.out, machine=about, quick=arguments.quick, others=others)


if __name__ == "__main__":
    main()
