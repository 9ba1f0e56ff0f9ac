"""``adapmixed demo``: train on built-in text and compare all methods in one table.

Divide the built-in corpus into 64 shards, train a member on each that is not empty, and evaluate
every method on held-out text. References without privacy are the best of four pools, found with
hindsight, and one adapter on all text. The table is printed and written to report.json, and with
the extra lab to report.html. No network is needed.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import (
    add_options,
    check_output,
    laboratory,
    option,
    progress_bar,
    random_source,
)

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism

PROMPT = "The try statement"
SAMPLE_TOKENS = 40
DELTA = 1e-5
BUDGETS = (1.0, 3.0)
POOL_SCALES = (1.0, 2.0, 4.0, 8.0)
WHOLE = "one adapter, all text"


@dataclass
class DemoOptions:
    """The options of this command."""

    base: str | None = option(
        "public model, folder or hub name (default: a small one that comes along)"
    )
    out: Path = option(
        "folder for the report and the ensemble; trained members are kept",
        Path("report"),
        metavar="FOLDER",
    )
    queries: int = option("tokens that each method answers", 1024)
    seed: int = option("seed of the evaluation's randomness", 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, DemoOptions)


def methods(queries: int, num_models: int) -> dict[str, Mechanism]:
    """Return the methods to compare; fixed guarantees are planned for `queries` tokens."""
    from adapmixed.mechanisms import AdaPMixED, PMixED, PublicOnly, Unprotected, planned
    from adapmixed.privacy.planner import chosen

    mechanisms: dict[str, Mechanism] = {
        "public": PublicOnly(),
        "unprotected": Unprotected(),
        "pmixed": PMixED(8.0, DELTA, queries, 3.0),
        "adapmixed": AdaPMixED(order=18.0, target_leakage=0.1),
    }
    clipped = {
        f"{plan.mechanism}, ε ≤ {epsilon:g}": planned(plan)
        for epsilon in BUDGETS
        for plan in chosen(epsilon, DELTA, num_models, queries)
    }
    return mechanisms | dict(sorted(clipped.items()))


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, generate a sample and write the report."""
    started = time.perf_counter()
    check_output("--out", arguments.out, folder=True)

    def say(step: str) -> None:
        print(f"[{time.perf_counter() - started:3.0f} s] {step}", flush=True)

    say("1 of 5: load the libraries and the built-in text")
    from adapmixed.workers import start_server

    start_server()  # it imports what training needs while this process imports the rest
    from adapmixed.data import demo_base
    from adapmixed.ensemble import Ensemble
    from adapmixed.evaluation import compared, evaluate
    from adapmixed.evaluation.report import Report, environment
    from adapmixed.mechanisms import Unprotected, UnprotectedPool
    from adapmixed.training.demo import CONFIG, NUM_MODELS, train_demo, train_whole

    base = str(arguments.base or demo_base())
    tokens = _tokens(base, arguments.queries)
    folder = arguments.out / "ensemble"
    left = NUM_MODELS - len(list(folder.glob("member-*")))
    say(
        f"2 of 5: train {left} members that adapt the output layer with rank {CONFIG.rank}, each "
        "on a shard of the language reference"
    )
    train_demo(folder, base=base)
    say("3 of 5: train one adapter on all text, a reference without privacy")
    whole = Ensemble.from_pretrained(base, train_whole(arguments.out, base))
    ensemble = Ensemble.from_pretrained(base, folder)
    mechanisms = methods(arguments.queries, ensemble.num_models)
    # References without protection, of which the best one is shown.
    pools = {f"unprotected pool, κ = {scale:g}": UnprotectedPool(scale) for scale in POOL_SCALES}
    say(f"4 of 5: score {arguments.queries:,} tokens with {len(mechanisms | pools) + 1} methods")
    update, seed = progress_bar("token"), arguments.seed
    settings = {"delta": DELTA, "queries": arguments.queries}
    evaluations = evaluate(
        ensemble, tokens, mechanisms | pools, rng=random_source(seed), progress=update, **settings
    )
    best = min(evaluations, key=lambda row: row.perplexity if row.name in pools else math.inf)
    evaluations = [row for row in evaluations if row.name not in pools]
    single = evaluate(whole, tokens, {WHOLE: Unprotected()}, rng=random_source(seed), **settings)
    evaluations[2:2] = [best, *single]  # after the public and the unprotected line
    say("5 of 5: draw a sample, and write the report")
    report = Report(
        compared(evaluations),
        config={
            "command": "demo",
            "base": "built-in" if arguments.base is None else Path(base).name,
            "text": "held-out topics",
            "num_models": ensemble.num_models,
            "queries": arguments.queries,
            "adjacency": "zero_out",
            "mechanisms": {name: repr(m) for name, m in mechanisms.items()},
            "randomness": f"seeded ({arguments.seed}) for the evaluation, system for the sample",
        },
        environment=environment(),
        sample=_sample(ensemble, mechanisms),
    )
    try:
        print(f"wrote {laboratory('figures.html').write_page(report, arguments.out)[1]}")
    except ValueError as error:
        written = report.write(arguments.out / "report.json")
        print(f"wrote {written}; report.html is left out: {error}")
    print(f"\n{report.text()}\n")
    print(f"took {time.perf_counter() - started:.0f} s")
    return 0


def _tokens(base: str, queries: int) -> list[int]:
    """Return the tokens of the held-out text; raise ValueError if there are too few."""
    from adapmixed.data import held_out_text
    from adapmixed.ensemble.public_model import load_tokenizer
    from adapmixed.evaluation import plan_windows
    from adapmixed.text import token_stream
    from adapmixed.training.settings import base_facts

    facts = base_facts(base)
    tokens = token_stream(load_tokenizer(base), held_out_text())
    plan_windows(len(tokens), facts.longest_block, None, queries)
    return tokens


def _sample(ensemble: Any, mechanisms: dict[str, Mechanism]) -> dict[str, str]:
    """Return a short private continuation and its guarantee, drawn without a seed."""
    from adapmixed.generation import PrivateGenerator
    from adapmixed.privacy import Accountant

    mechanism, accountant = mechanisms["adapmixed"], Accountant(DELTA)
    generator = PrivateGenerator(ensemble, mechanism, accountant)
    (text,) = generator.generate(PROMPT, max_new_tokens=SAMPLE_TOKENS)
    return {
        "prompt": PROMPT,
        "text": text,
        "mechanism": mechanism.name,
        "guarantee": str(accountant.guarantee()),
    }
