"""ε and perplexity against the number of models, with unchanged mechanisms and shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adapmixed.ensemble import read_manifest
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
)
from adapmixed.training.folder import TrainingFolder
from adapmixed_lab.reproduce.inputs import Inputs
from adapmixed_lab.reproduce.measure import UNPROTECTED, Run, measure
from adapmixed_lab.reproduce.members import FirstMembers, sizes
from adapmixed_lab.reproduce.paper import ADAPMIXED, DELTA, PMIXED, PUBLIC
from adapmixed_lab.reproduce.result import row

GROUP = "models"
TITLE = "ε and perplexity against the number of models, shards of one mean size"
NOTE = (
    "Number of models: the first N members of the largest available ensemble, whose shards keep "
    "their size. A keyed hash assigns the text, so the stated size of a shard is a mean. The "
    "settings stay the same, so ε falls as N grows. PMixED's ε is given, and its perplexity "
    "follows."
)


def methods(dataset: str, queries: int) -> dict[str, Mechanism]:
    """Return the mechanisms that are run at every number of models."""
    return {
        UNPROTECTED: Unprotected(),
        PMIXED: PMixED(8.0, DELTA, queries, 3.0),
        ADAPMIXED: AdaPMixED.preset(dataset),
        "ClippedMixing": ClippedMixing(0.78, 2.7, queries=queries),
        "ClippedLogPool": ClippedLogPool(-0.25, 1.0, 2.0, queries=queries),
    }


def rows(
    inputs: Inputs, run: Run, queries: int, folders: Sequence[Path] = ()
) -> list[dict[str, object]]:
    """Return a line for each mechanism and number of models, labelled by the number.

    Args:
        inputs, run, queries: of the study.
        folders: ensembles; the largest is taken if it has more members than that of the inputs.
    """
    ensemble, words = inputs.ensemble, ""
    members = {folder: len(read_manifest(folder).members) for folder in folders}
    largest = max(members, key=members.__getitem__, default=None)
    if largest is not None and members[largest] > ensemble.num_models:
        ensemble = inputs.sources.load(largest)
        words = f", {shard_tokens(largest):,.0f} tokens"
    compared: dict[str, Mechanism] = {PUBLIC: PublicOnly()}
    lines: list[tuple[str, str, int]] = []
    for name, mechanism in methods(inputs.sources.dataset, queries).items():
        for count in sizes(ensemble.num_models, (8, 16, 32, 64, 128)):
            key = f"{name}, N = {count}"
            compared[key] = FirstMembers(mechanism, count)
            lines.append((key, name, count))
    found = measure(ensemble, inputs.tokens, compared, queries, run, state="models")
    return [
        row(PUBLIC, found[PUBLIC], group=GROUP),
        *(
            row(name, found[key] | {"num_models": count}, group=GROUP, label=f"N = {count}{words}")
            for key, name, count in lines
        ),
    ]


def shard_tokens(folder: Path) -> float:
    """Return the mean number of tokens of a shard, as training recorded them."""
    count = len(read_manifest(folder).members)
    training = TrainingFolder(folder, count)
    return sum(int(training.record(member)["tokens"]) for member in range(count)) / count
