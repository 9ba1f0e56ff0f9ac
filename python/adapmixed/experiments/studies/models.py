"""ε and perplexity against the number of models, mechanisms and shards staying as they are."""

from __future__ import annotations

from adapmixed.experiments.inputs import Inputs
from adapmixed.experiments.measure import UNPROTECTED, Run, measure
from adapmixed.experiments.members import FirstMembers, sizes
from adapmixed.experiments.paper import ADAPMIXED, DELTA, PMIXED, PUBLIC
from adapmixed.experiments.result import row
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
)

GROUP = "models"
TITLE = "ε and perplexity against the number of models"
NOTE = (
    "Against N: the first N members of the ensemble, shards keeping their size. The settings stay "
    "the same, so ε falls as N grows; PMixED's ε is given and its perplexity follows."
)


def methods(dataset: str, queries: int) -> dict[str, Mechanism]:
    """What is run at every number of models."""
    return {
        UNPROTECTED: Unprotected(),
        PMIXED: PMixED(8.0, DELTA, queries, 3.0),
        ADAPMIXED: AdaPMixED.preset(dataset),
        "ClippedMixing": ClippedMixing(0.78, 2.7, queries=queries),
        "ClippedLogPool": ClippedLogPool(-0.25, 1.0, 2.0, queries=queries),
    }


def rows(inputs: Inputs, run: Run, queries: int) -> list[dict[str, object]]:
    """A line for each mechanism and number of models, labelled by the number."""
    compared: dict[str, Mechanism] = {PUBLIC: PublicOnly()}
    lines: list[tuple[str, str, int]] = []
    for name, mechanism in methods(inputs.sources.dataset, queries).items():
        for count in sizes(inputs.ensemble.num_models):
            key = f"{name}, N = {count}"
            compared[key] = FirstMembers(mechanism, count)
            lines.append((key, name, count))
    found = measure(inputs.ensemble, inputs.tokens, compared, queries, run, state="models")
    return [
        row(PUBLIC, found[PUBLIC], group=GROUP),
        *(
            row(name, found[key] | {"num_models": count}, group=GROUP, label=f"N = {count}")
            for key, name, count in lines
        ),
    ]
