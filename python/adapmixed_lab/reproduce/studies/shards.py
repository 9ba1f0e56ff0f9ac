"""ε and perplexity against the size of a shard: the same text divided among N models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adapmixed.mechanisms import PublicOnly
from adapmixed_lab.reproduce.inputs import Inputs
from adapmixed_lab.reproduce.measure import Run, measure
from adapmixed_lab.reproduce.paper import PUBLIC
from adapmixed_lab.reproduce.result import row
from adapmixed_lab.reproduce.studies import models

GROUP = "shards"
TITLE = "ε and perplexity against the size of a shard, all text divided among the models"
NOTE = (
    "Size of a shard: the whole text is divided among N models, each trained for the same number "
    "of epochs. A larger shard gives a better model, which hides among fewer others."
)


def rows(
    inputs: Inputs, run: Run, queries: int, folders: Sequence[Path]
) -> list[dict[str, object]]:
    """Return a line for each mechanism and ensemble folder, by number of models."""
    public: dict[str, object] | None = None
    lines: list[tuple[str, int, dict[str, object]]] = []
    compared = {PUBLIC: PublicOnly()} | models.methods(inputs.sources.dataset, queries)
    for folder in folders:
        ensemble = inputs.sources.load(folder)
        count = ensemble.num_models
        found = measure(
            ensemble, inputs.tokens, compared, queries, run, state=f"shards-{folder.name}"
        )
        public = found.pop(PUBLIC)
        facts = {"num_models": count, "shard_tokens": models.shard_tokens(folder)}
        lines += [(name, count, ours | facts) for name, ours in found.items()]
    if public is None:
        return []
    order = {name: number for number, name in enumerate(compared)}
    lines.sort(key=lambda line: (order[line[0]], line[1]))
    return [
        row(PUBLIC, public, group=GROUP),
        *(
            row(name, ours, group=GROUP, label=f"N = {count}, {ours['shard_tokens']:,.0f} tokens")
            for name, count, ours in lines
        ),
    ]
