"""Perplexity against ε for every mechanism, at one unit of protection: one whole shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adapmixed.experiments.dp_adapter import DPAdapter
from adapmixed.experiments.inputs import Inputs
from adapmixed.experiments.measure import Run, measure
from adapmixed.experiments.paper import ADAPMIXED, DELTA, DP_SGD, PMIXED, PUBLIC
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
from adapmixed.privacy.planner import plan

GROUP = "frontiers"
TITLE = "Frontiers: perplexity against ε, one whole shard protected"
NOTE = (
    "Frontiers: settings are planned from public numbers for the given ε, AdaPMixED's β is given "
    "and its ε found afterwards, by the per-model rule. All ensembles protect one whole shard "
    "(zero-out; AdaPMixED: the removal of a shard's model). DP-SGD of one topic protects a whole "
    "name, as a shard does; of one block it protects far less, at the same ε."
)
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0)
LEAKAGES = (0.01, 0.02, 0.05, 0.1, 0.2)
SHAPE, SCALE = 4.0, 2.0
UNPROTECTED = "unprotected ensemble"


def methods(dataset: str, num_models: int, queries: int) -> dict[tuple[str, str], Mechanism]:
    """(method, label) → mechanism."""
    found: dict[tuple[str, str], Mechanism] = {}
    for epsilon in BUDGETS:
        plans = plan(epsilon, DELTA, num_models, queries, shapes=(SHAPE,), scales=(SCALE,))
        for one in plans:
            settings, label = one.settings, f"ε ≤ {epsilon:g}"
            if one.mechanism == PMixED.name:
                found[PMIXED, label] = PMixED(epsilon, DELTA, queries, settings["order"])
            elif one.mechanism == ClippedMixing.name:
                box = ClippedMixing(settings["lower"], settings["upper"], queries=queries)
                found["ClippedMixing", label] = box
            else:
                clip = (settings["lower"], settings["upper"], settings["scale"])
                found["ClippedLogPool", label] = ClippedLogPool(*clip, queries=queries)
    preset = AdaPMixED.preset(dataset)
    for leakage in LEAKAGES:
        found[ADAPMIXED, f"β = {leakage:g}"] = replace(preset, target_leakage=leakage)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def rows(
    inputs: Inputs, run: Run, queries: int, adapters: Sequence[DPAdapter]
) -> list[dict[str, object]]:
    """A line for every mechanism and budget, and for every DP-SGD adapter."""
    compared: dict[str, Mechanism] = {PUBLIC: PublicOnly(), UNPROTECTED: Unprotected()}
    planned = methods(inputs.sources.dataset, inputs.ensemble.num_models, queries)
    compared |= {f"{name}, {label}": mechanism for (name, label), mechanism in planned.items()}
    found = measure(inputs.ensemble, inputs.tokens, compared, queries, run, state="frontiers")
    lines = [row(name, found[name], group=GROUP) for name in (PUBLIC, UNPROTECTED)]
    lines += [
        row(name, found[f"{name}, {label}"], group=GROUP, label=label) for name, label in planned
    ]
    for number, adapter in enumerate(adapters):
        alone = measure(
            adapter.load(inputs.sources.public_model), inputs.tokens, {DP_SGD: Unprotected()},
            queries, run, state=f"frontiers-dp-{number}",
        )  # fmt: skip
        ours = alone[DP_SGD] | adapter.promise()
        lines.append(row(f"{DP_SGD}, one {adapter.unit}", ours, group=GROUP))
    return lines
