"""Perplexity against ε for every mechanism, at one unit of protection: one whole shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
)
from adapmixed.mechanisms.planned import planned
from adapmixed.privacy.planner import plan
from adapmixed_lab.reproduce.dp_adapter import DPAdapter
from adapmixed_lab.reproduce.inputs import Inputs
from adapmixed_lab.reproduce.measure import Run, compare, measure_alone
from adapmixed_lab.reproduce.paper import ADAPMIXED, DELTA, DP_SGD
from adapmixed_lab.reproduce.result import row

GROUP = "frontiers"
TITLE = "Frontiers: perplexity against ε, for one whole shard unless stated"
NOTE = (
    "Frontiers: settings are planned from public numbers for the given ε. Shapes log C/−log c of 1 "
    "and 4, and κ of 1, 2 and 4, were tried, and the one with the lowest perplexity is shown. This "
    "choice in hindsight is for a frontier, and must not be made on private text. AdaPMixED's β is "
    "given, and its ε is found afterwards by the per-model rule. All ensembles protect one whole "
    "shard (zero-out). DP-SGD of one topic (add/remove) protects all text under one name, of which "
    "it was given at most one block. A shard may hold several names, and for k of them DP-SGD's ε "
    "is k times as large, at another δ. DP-SGD of one block protects far less at the same ε."
)
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0)
LEAKAGES = (0.01, 0.02, 0.05, 0.1, 0.2)
SHAPES, SCALES = (1.0, 4.0), (1.0, 2.0, 4.0)


def methods(dataset: str, num_models: int, queries: int) -> dict[tuple[str, str, str], Mechanism]:
    """Return (method, label, shape or scale) → mechanism; the third is "" if only one is tried."""
    found: dict[tuple[str, str, str], Mechanism] = {}
    for epsilon in BUDGETS:
        plans = plan(epsilon, DELTA, num_models, queries, shapes=SHAPES, scales=SCALES)
        for one in plans:
            settings, shape = one.settings, ""
            if one.mechanism == ClippedMixing.name:
                shape = f"shape {-math.log(settings['upper']) / math.log(settings['lower']):.3g}"
            elif one.mechanism == ClippedLogPool.name:
                shape = f"κ = {settings['scale']:g}"
            mechanism = planned(one)
            found[type(mechanism).__name__, f"ε ≤ {epsilon:g}", shape] = mechanism
    preset = AdaPMixED.preset(dataset)
    for leakage in LEAKAGES:
        found[ADAPMIXED, f"β = {leakage:g}", ""] = replace(preset, target_leakage=leakage)
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def rows(
    inputs: Inputs, run: Run, queries: int, adapters: Sequence[DPAdapter]
) -> list[dict[str, object]]:
    """Return a line for every mechanism and budget, and for every DP-SGD adapter."""
    planned = methods(inputs.sources.dataset, inputs.ensemble.num_models, queries)
    compared = {", ".join(key): mechanism for key, mechanism in planned.items()}
    found = compare(inputs, compared, queries, run, state="frontiers")
    lines = [row(name, found[name], group=GROUP) for name in found if name not in compared]
    best: dict[tuple[str, str], tuple[float, str, dict[str, Any]]] = {}
    for key in planned:
        name, label, shape = key
        ours: dict[str, Any] = found[", ".join(key)]
        perplexity = ours["perplexity"]
        if (name, label) not in best or perplexity < best[name, label][0]:
            best[name, label] = (perplexity, f"{label} {shape}".strip(), ours)
    lines += [
        row(name, ours, group=GROUP, label=label) for (name, _), (_, label, ours) in best.items()
    ]
    for number, adapter in enumerate(adapters):
        alone = adapter.load(inputs.sources)
        state = f"frontiers-dp-{number}"
        ours = measure_alone(alone, inputs.tokens, queries, run, state=state) | adapter.promise()
        lines.append(row(f"{DP_SGD}, one {adapter.unit}", ours, group=GROUP))
    return lines
