"""Measurements of mechanisms over an experiment's text, as the "ours" of a result's row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adapmixed.evaluation import Runs, evaluate_runs, plan
from adapmixed.mechanisms import Mechanism
from adapmixed.rng import SeededRandom
from adapmixed_lab.reproduce.inputs import Inputs
from adapmixed_lab.reproduce.paper import DELTA
from adapmixed_lab.reproduce.published import PaperRule, PublishedPMixED

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

Progress = Callable[[int, int], None]
Ours = dict[str, object]

UNPROTECTED = "unprotected ensemble"
PUBLISHED = "PMixED, published analysis"
PER_MODEL = "AdaPMixED, per-model rule"
"""Names of methods that the paper does not have."""

BUILTIN_QUERIES = 9728
"""Most queries of a long run at builtin scale, for minutes of work; as in the paper's Table 2."""


@dataclass(frozen=True)
class Run:
    """The seed, the state and the progress of an experiment.

    Attributes:
        seed: of the evaluation's randomness.
        keep: folder of the evaluations' state, from which a killed run goes on; None: nothing is
            kept.
        progress: called with (queries done, queries in all).
    """

    seed: int = 0
    keep: Path | None = None
    progress: Progress | None = None


def measure(
    ensemble: Ensemble,
    tokens: Sequence[int],
    mechanisms: Mapping[str, Mechanism],
    queries: int,
    run: Run,
    *,
    runs: int = 1,
    state: str = "",
) -> dict[str, Ours]:
    """Measure all mechanisms in one forward pass.

    The windows and the randomness follow from the text and the seed, and not from the ensemble.

    Args:
        ensemble: the models.
        tokens: the text.
        mechanisms: by name.
        queries: of each run.
        run: seed, state and progress.
        runs: stretches of text, each with an accountant of its own.
        state: name of the state file; "": none is kept.

    Raises:
        ValueError: as `evaluate_runs`.
    """
    found = evaluate_runs(
        ensemble,
        tokens,
        mechanisms,
        runs=runs,
        queries=queries,
        delta=DELTA,
        rng=SeededRandom(run.seed),
        progress=run.progress,
        result=run.keep / f"{state}.state.json" if run.keep is not None and state else None,
        resume=run.keep is not None and bool(state),
    )
    return {one.name: _ours(one, mechanisms[one.name]) for one in found}


def queries_of(inputs: Inputs, paper: int, given: int | None) -> int:
    """Return the number of queries of one run.

    Args:
        inputs: the text.
        paper: the paper's number of queries.
        given: the requested number; None: the paper's, but at builtin scale no more than the text
            has and `BUILTIN_QUERIES`.
    """
    if given is not None:
        return given
    if inputs.sources.scale == "full":
        return paper  # a text that is too short raises later
    _, available = plan(inputs.tokens, inputs.ensemble.longest_text, None, None)
    return min(paper, available, BUILTIN_QUERIES)


def _ours(runs: Runs, mechanism: Mechanism) -> Ours:
    """Return means and deviations over the runs, and the sentence of the largest ε.

    `screened` counts queries of one run.
    """
    evaluations = runs.evaluations
    worst = max(evaluations, key=lambda one: one.guarantee.epsilon or 0.0)
    guarantee, count = worst.guarantee, len(evaluations)
    return {
        "perplexity": runs.perplexity_mean,
        "perplexity_deviation": runs.perplexity_deviation,
        "perplexities": [one.perplexity for one in evaluations],
        "epsilon": runs.epsilon_mean,
        "epsilon_deviation": runs.epsilon_deviation,
        "epsilons": [one.guarantee.epsilon for one in evaluations],
        "delta": guarantee.delta,
        "kind": guarantee.kind,
        "guarantee": str(guarantee),
        "queries": runs.queries,
        "runs": count,
        "unit": guarantee.unit,
        "adjacency": guarantee.adjacency,
        "rule": _rule(mechanism, guarantee.method),
        "screened": sum(one.screened * one.queries for one in evaluations) / count,
        "seconds": sum(one.seconds for one in evaluations),
        "mechanism": repr(mechanism),
        **{
            part: sum(one.breakdown[part] for one in evaluations) / count
            for part in worst.breakdown
        },
    }


def _rule(mechanism: Mechanism, method: str | None) -> str | None:
    """Return how Rényi losses were summed: "paper" is Σ_t max_i, "per_model" max_i Σ_t."""
    if method != "renyi":
        return None
    inner = getattr(mechanism, "mechanism", mechanism)  # inside FirstMembers
    return "paper" if isinstance(inner, PaperRule) else "per_model"


def published_pmixed(epsilon: float, queries: int, order: float) -> PublishedPMixED:
    """Return PMixED by the published analysis; the notes of a result replace its warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PublishedPMixED reproduces")
        return PublishedPMixED(epsilon, DELTA, queries, order)
