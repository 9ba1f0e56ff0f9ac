"""Perplexity and ε of ClippedLogPool's and ClippedMixing's settings on the built-in demonstration.

    python -m benchmarks.clipped_tables --out benchmarks/results/clipped-demo.txt

Nothing is drawn: the same machine prints the same table. ε is that of all queries at δ = 1e-5, a
number fixed beforehand; perplexity is for the operator.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from adapmixed.data.demo import demo_base, held_out_tokens
from adapmixed.ensemble import Ensemble
from adapmixed.evaluation import Evaluation, evaluate
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
)
from adapmixed.mechanisms.planned import planned
from adapmixed.privacy.guarantee import format_epsilon
from adapmixed.privacy.planner import CHOSEN_SCALE, CHOSEN_SHAPE, epsilon_of, plan
from adapmixed.rng import SeededRandom
from adapmixed_lab.reproduce.published import PaperRule
from benchmarks.demo import demo_ensemble

DELTA = 1e-5
POOLS = [
    (-0.25, 0.25, 2.0),
    (-0.25, 0.5, 2.0),
    (-0.25, 1.0, 1.5),
    (-0.25, 1.0, 2.0),
    (-0.25, 2.0, 2.0),
]
BOXES = [(-0.25, 0.25), (-0.5, 0.5), (-0.25, 1.0), (-1.0, 1.0), (-0.5, 2.0)]
"""Logarithms of lower and upper."""
EPSILONS = (2.0, 2.1, 3.166, 5.673)
"""AdaPMixED's ε over 1 024 queries, by the per-model and by the paper's rule, and two near which
ClippedMixing and ClippedLogPool reach its perplexity."""


def settings(queries: int) -> dict[str, Mechanism]:
    """Return all settings that are compared."""
    found: dict[str, Mechanism] = {"public": PublicOnly(), "unprotected": Unprotected()}
    for a, b, scale in POOLS:
        name = f"clipped-log-pool  a={a:g} b={b:g} κ={scale:g}"
        found[name] = ClippedLogPool(a, b, scale, queries=queries)
    for low, high in BOXES:
        name = f"clipped-mixing    e^{low:g} e^{high:g}"
        found[name] = ClippedMixing(math.exp(low), math.exp(high), queries=queries)
    return found


def epsilons(mechanism: Mechanism, models: int, queries: int) -> tuple[str, ...]:
    """Return ε of zero-out and of replace-one, as printed."""
    if not isinstance(mechanism, ClippedMixing | ClippedLogPool):
        return ("0", "0") if isinstance(mechanism, PublicOnly) else ("-", "-")
    scale = mechanism.scale if isinstance(mechanism, ClippedLogPool) else None
    return tuple(
        format_epsilon(
            epsilon_of(
                DELTA,
                models,
                queries,
                way,
                lower=mechanism.lower,
                upper=mechanism.upper,
                scale=scale,
            )  # fmt: skip
        )
        for way in ("zero_out", "replace_one")
    )


def evaluated(
    ensemble: Ensemble,
    compared: Mapping[str, Mechanism],
    queries: int,
) -> list[Evaluation]:
    """Evaluate each on the demonstration's held-out text, in one pass."""
    return evaluate(
        ensemble,
        held_out_tokens(ensemble.tokenizer),
        compared,
        delta=DELTA,
        rng=SeededRandom(0),
        queries=queries,
    )


def table(queries: int) -> list[str]:
    """Return the lines to print, from one pass over the held-out text."""
    ensemble = Ensemble.from_pretrained(demo_base(), demo_ensemble())
    compared, models = settings(queries), ensemble.num_models
    found = evaluated(ensemble, compared, queries)
    public = found[0].perplexity
    lines = [
        f"{models} models, {queries} queries of the demonstration's held-out text, δ = {DELTA:g}",
        f"{'':<38}{'perplexity':>11}{'vs public':>11}{'ε zero-out':>12}{'replace-one':>13}",
    ]
    for one in found:
        out, replaced = epsilons(compared[one.name], models, queries)
        change = one.perplexity / public - 1
        lines.append(f"{one.name:<38}{one.perplexity:>11.2f}{change:>11.1%}{out:>12}{replaced:>13}")
    return lines


def against_adapmixed(queries: int) -> list[str]:
    """Return the lines that compare the AdaPMixED of `adapmixed demo` with planned mechanisms.

    Every ε is for zero-out. AdaPMixED's depends on the private data, is known afterwards and may
    not be published; the others are fixed beforehand, planned for `EPSILONS`.
    """
    ensemble = Ensemble.from_pretrained(demo_base(), demo_ensemble())
    adaptive = AdaPMixED(order=18.0, target_leakage=0.1)
    # Its name keys the screening's noise: with the demonstration's name it has the same ε.
    per_model, paper = "adapmixed", "adapmixed, paper's rule"
    compared: dict[str, Mechanism] = {
        "public": PublicOnly(), per_model: adaptive, paper: PaperRule(adaptive)
    }  # fmt: skip
    for epsilon in EPSILONS:
        question = (epsilon, DELTA, ensemble.num_models, queries)
        for one in plan(*question, shapes=(CHOSEN_SHAPE,), scales=(CHOSEN_SCALE,)):
            mechanism = planned(one)
            if not isinstance(mechanism, PMixED):
                compared[f"{mechanism.name}, ε ≤ {epsilon:g}"] = mechanism
    found = evaluated(ensemble, compared, queries)
    public = found[0].perplexity
    lines = [
        f"{ensemble.num_models} models, {queries} queries: fixed ε against AdaPMixED's ε (ex-post)",
        f"{'':<38}{'perplexity':>11}{'vs public':>11}{'ε zero-out':>14}",
    ]
    for one in found:
        cost = one.guarantee.epsilon
        shown = "-" if cost is None else format_epsilon(cost)
        shown += "*" if one.guarantee.kind == "data-dependent, ex-post" else ""
        change = one.perplexity / public - 1
        lines.append(f"{one.name:<38}{one.perplexity:>11.2f}{change:>11.1%}{shown:>14}")
    return [*lines, "* data-dependent, ex-post; may not be published"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=508)
    parser.add_argument("--compared-queries", type=int, default=1024, help="of the comparisons")
    parser.add_argument("--out", type=Path, help="write the table there, too")
    arguments = parser.parse_args()
    lines = table(arguments.queries)
    lines += ["", *against_adapmixed(arguments.compared_queries)]
    text = "\n".join(lines)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
