"""The study of what members adapt: perplexity at one ε against the cost of a token.

There are ensembles of four kinds of members, two numbers of models, three ranks and two seeds.
There are two corpora, the second with two public models. Every ensemble answers the same held-out
queries.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapmixed.data.demo import demo_base
from adapmixed.ensemble import Ensemble, read_manifest
from adapmixed.mechanisms import AdaPMixED, Mechanism, PublicOnly, Unprotected
from adapmixed.mechanisms.planned import planned
from adapmixed.privacy.planner import CHOSEN_SCALE, CHOSEN_SHAPE, plan
from adapmixed.training.base import base_facts
from adapmixed.training.blocks import token_stream
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.shards import create_public_key
from adapmixed_lab.reproduce.kinds.corpora import NO_CHANGELOGS, Domain, domains
from adapmixed_lab.reproduce.kinds.cost import token_cost
from adapmixed_lab.reproduce.measure import UNPROTECTED, Ours, Run, measure, over_trainings
from adapmixed_lab.reproduce.paper import ADAPMIXED, DELTA, PUBLIC, RUN_QUERIES
from adapmixed_lab.reproduce.result import build_result, row
from adapmixed_lab.reproduce.trained import trained

RATES = {"head": 1.2e-2, "last:1": 6e-3, "last:2": 6e-3, "all": 3e-3}
"""AdamW's learning rate for each kind of members, chosen on text of authors in no shard."""
SETTINGS = ((8, 100), (8, 32), (2, 100), (32, 100))
"""(rank, N) of the ensembles; the first represents each kind."""
SEEDS = 2
BUDGETS = (1.0, 3.0)
_SCALE = 8.0  # alpha / rank, the paper's
NOTE = (
    "Cost is the number of multiply-adds of linear layers for one private token, divided by that "
    "of the public model. Times are in benchmarks/results/cpu-trunk-avx512.txt. All kinds of "
    "members have the same corpus, division, queries and passes; alpha / rank is 8. ClippedMixing "
    "and ClippedLogPool have the settings that 'adapmixed plan' chooses for ε. PMixED's ε is "
    "fixed, too, and AdaPMixED's is found afterwards. Perplexities are means over seeds, and each "
    "seed has its own division."
)


@dataclass(frozen=True)
class Setting:
    """One ensemble of the study.

    Attributes:
        domain: corpus and public model.
        kind: what members adapt, as in ``adapmixed train --adapt``.
        rank, num_models, seed: of its training.
    """

    domain: Domain
    kind: str
    rank: int
    num_models: int
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder and of its state file."""
        kind = self.kind.replace(":", "-")
        return f"{self.domain.slug}-{kind}-r{self.rank}-n{self.num_models}-s{self.seed}"


def kinds(
    folder: Path,
    run: Run,
    *,
    queries: int = RUN_QUERIES,
    seeds: int = SEEDS,
    settings: Sequence[tuple[int, int]] = SETTINGS,
    workers: int | None = None,
) -> dict[str, Any]:
    """Train and measure all ensembles; a killed run goes on in the same folder.

    Args:
        folder: for corpora, ensembles and the state of their evaluations.
        run: seed and progress of the evaluations.
        queries: answered by every method of every ensemble.
        seeds: of training, >= 1.
        settings: (rank, N) of the ensembles.
        workers: processes that train; None: one for each core.

    Raises:
        ValueError: if the folder holds other corpora or ensembles, or a text is too short.
    """
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    found = domains(folder, str(demo_base()), run.progress)
    kept = replace(run, keep=folder)
    measured: dict[str, list[dict[str, Ours]]] = {}
    about: dict[str, dict[str, Any]] = {}
    for one in _order(found, settings, seeds):
        ensemble, cost = _ensemble(folder, one, run, workers)
        tokens = token_stream(ensemble.tokenizer, one.domain.held_out)
        here = measure(
            ensemble, tokens, methods(one.num_models, queries), queries, kept,
            state=one.name,
        )  # fmt: skip
        key = replace(one, seed=0).name
        measured.setdefault(key, []).append(here)
        about[key] = {"domain": one.domain.name, "adapt": one.kind, "rank": one.rank,
                      "num_models": one.num_models, "cost": cost}  # fmt: skip
    rows = []
    for domain in found:
        for key, facts in about.items():
            if facts["domain"] == domain.name:
                rows += _rows(measured[key], facts)
    sizes = dict.fromkeys(str(num_models) for _, num_models in settings)
    return build_result(
        "kinds",
        rows,
        inputs={
            "dataset": "builtin",
            "scale": "builtin",
            "base": "base",
            "num_models": " and ".join(sizes),
        },
        settings={
            "queries": queries,
            "seeds": seeds,
            "delta": DELTA,
            "rates": {
                one.name: {kind: one.rate * rate for kind, rate in RATES.items()} for one in found
            },
            "titles": {one.name: f"What members adapt: {one.name}" for one in found},
        },
        notes=[NOTE, *([] if len(found) > 1 else [NO_CHANGELOGS])],
        seconds=time.perf_counter() - started,
    )


def methods(num_models: int, queries: int) -> dict[str, Mechanism]:
    """Return the compared mechanisms, whose settings follow from public numbers alone."""
    found: dict[str, Mechanism] = {PUBLIC: PublicOnly(), UNPROTECTED: Unprotected()}
    for epsilon in BUDGETS:
        for one in plan(
            epsilon, DELTA, num_models, queries, shapes=(CHOSEN_SHAPE,), scales=(CHOSEN_SCALE,)
        ):
            mechanism = planned(one)
            found[f"{type(mechanism).__name__}, ε ≤ {epsilon:g}"] = mechanism
    return found | {ADAPMIXED: AdaPMixED(order=18.0, target_leakage=0.1)}


def _order(
    found: Sequence[Domain], settings: Sequence[tuple[int, int]], seeds: int
) -> Iterator[Setting]:
    """Yield the ensembles, the most informative ones first."""
    for rank, num_models in settings:
        for seed in range(seeds):
            for domain in found:
                for kind in RATES:
                    yield Setting(domain, kind, rank, num_models, seed)


def _ensemble(folder: Path, one: Setting, run: Run, workers: int | None) -> tuple[Ensemble, float]:
    """Return the ensemble, trained if it is missing, and the cost of its token."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    key = folder / f"division-{one.seed}.key"
    create_public_key(key, f"adapmixed kinds of members, division {one.seed}")
    config = FinetuneConfig(
        rank=one.rank,
        alpha=_SCALE * one.rank,
        target_modules=base_facts(one.domain.base).adapt(one.kind),
        learning_rate=one.domain.rate * RATES[one.kind],
        epochs=one.domain.epochs,
        batch_size=4,
        block_size=256,
    )
    output = trained(
        folder / one.name, base=one.domain.base, text=one.domain.text, key=key,
        num_models=one.num_models, config=config, seed=one.seed, workers=workers,
        progress=run.progress,
    )  # fmt: skip
    ensemble = Ensemble.from_pretrained(one.domain.base, output)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(one.domain.base))
    adapted = read_manifest(output).adapted
    return ensemble, token_cost(base, ensemble.trunk, adapted, one.num_models)


def _rows(seeds: Sequence[Mapping[str, Ours]], facts: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return a line for each mechanism, with means over the seeds."""
    label = f"{facts['adapt']}, r = {facts['rank']}, N = {facts['num_models']}"
    lines = []
    for name in seeds[0]:
        several = [one[name] for one in seeds]
        ours = over_trainings(several) | {k: v for k, v in facts.items() if k != "domain"}
        lines.append(row(name, ours, group=facts["domain"], label=label))
    return lines
