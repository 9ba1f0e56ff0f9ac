"""The utility theorem holds on all tables of logits; diagnostics are exact and bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fake_ensemble import FakeEnsemble
from result_cases import DELTA, EPSILONS, MECHANISMS, NOISY, QUERIES, answer, numbers, stream
from torch import Tensor

from adapmixed.evaluation import Diagnostics, Evaluation, evaluate
from adapmixed.evaluation.diagnostics import BINS, utility_terms
from adapmixed.evaluation.loop import CURVE_POINTS
from adapmixed.evaluation.report import Curve
from adapmixed.mechanisms import AdaPMixED, Mechanism, PMixED, Unprotected
from adapmixed.privacy.composition import ShardBudget
from adapmixed.rng import SeededRandom

INF = math.inf


MIXING: dict[str, Mechanism] = {
    "noisy": NOISY,
    "unscreened": AdaPMixED(order=3.0, target_leakage=0.05, screen=None),
    "always screened": AdaPMixED(order=3.0, target_leakage=0.05, screen="public", threshold=0.0),
    "wide": AdaPMixED(order=2.0, target_leakage=50.0, screen=None),
    "pmixed": PMixED(8.0, DELTA, 10_000, 6.0),
}


class TableEnsemble(FakeEnsemble):
    """An ensemble whose logits (N, V, V) and (V, V) depend on the token read."""

    def __init__(self, private: Tensor, public: Tensor) -> None:
        super().__init__(len(private), public.shape[-1])
        self.private, self.public = private, public

    def logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.private[:, ids], self.public[ids]


def tables(seed: int, models: int = 3, vocab: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = torch.randn(vocab, vocab, generator=generator)
    return public + torch.randn(models, vocab, vocab, generator=generator), public


def far(seed: int) -> tuple[Tensor, Tensor]:
    private, public = tables(seed)
    return 40.0 * private, public


def equal(seed: int) -> tuple[Tensor, Tensor]:
    """Return logits with λ = 1 everywhere."""
    private, public = tables(seed)
    return public.expand_as(private).clone(), public


def one_apart(seed: int) -> tuple[Tensor, Tensor]:
    private, public = equal(seed)
    private[0] = 30.0 * tables(seed + 100)[0][0]
    return private, public


def masked(seed: int) -> tuple[Tensor, Tensor]:
    """Return logits with p = 0 for some tokens in all models, and for some in all private ones."""
    private, public = tables(seed)
    private[:, :, 0] = public[:, 0] = -INF
    private[:, :3, 1] = -INF
    private[0, :, 2] = -INF
    return private, public


def masked_public(seed: int) -> tuple[Tensor, Tensor]:
    """Return logits with q = 0 < p_j for some tokens, so that such a model has weight 0."""
    private, public = tables(seed)
    public[:4, 3] = -INF
    private[1, :, 3] = -INF
    return private, public


TABLES: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "random": tables, "far": far, "equal": equal, "one apart": one_apart, "masked": masked,
    "masked public": masked_public, "single": partial(tables, models=1),
}  # fmt: skip


def diagnosed(
    ensemble: Any, mechanisms: dict[str, Mechanism], tokens: list[int], **changed: Any
) -> dict[str, Evaluation]:
    settings: dict[str, Any] = dict(
        delta=DELTA, rng=SeededRandom(5), block=20, memory_bytes=7, diagnostics=True
    )
    found = evaluate(ensemble, tokens, mechanisms, **(settings | changed))
    return {one.name: one for one in found}


def diagnosis(evaluation: Evaluation) -> Diagnostics:
    assert evaluation.diagnosis is not None
    return evaluation.diagnosis


def utility_of(evaluation: Evaluation) -> dict[str, Any]:
    utility = diagnosis(evaluation).utility
    assert utility is not None
    return utility


def at_most(least: float, most: float) -> bool:
    return least <= most or (math.isfinite(most) and least <= most + 1e-12 * max(1.0, abs(most)))


@pytest.mark.parametrize("table", TABLES)
def test_the_theorem_holds(table: str) -> None:
    for seed in range(2):
        ensemble = TableEnsemble(*TABLES[table](seed))
        tokens = stream(40, seed)
        found = diagnosed(ensemble, MIXING | {"unprotected": Unprotected()}, tokens)
        unprotected = math.log(found.pop("unprotected").perplexity)
        for one in found.values():
            utility = utility_of(one)
            assert at_most(utility["mean_bound"], utility["bound"])
            assert utility["gap"] is None or at_most(utility["gap"], utility["mean_bound"])
            assert utility["loss"] == pytest.approx(math.log(one.perplexity), rel=1e-12)
            assert utility["ensemble_loss"] == pytest.approx(unprotected, rel=1e-12, abs=1e-12)


def test_what_the_edges_are() -> None:
    tokens = [0, 3] * 12  # reads 0 and 3, whose next are 3 and 0
    private, public = tables(0)
    found = diagnosed(TableEnsemble(*equal(0)), MIXING, tokens)["unscreened"]
    utility, (zero, *bins, one) = utility_of(found), diagnosis(found).weights.tolist()
    assert utility["bound"] == 0.0 and utility["gap"] == pytest.approx(0.0, abs=1e-14)
    assert (one, zero, sum(bins)) == (3 * found.queries, 0, 0)
    screened = diagnosed(TableEnsemble(private, public), MIXING, tokens)["always screened"]
    assert screened.screened == 1.0
    assert diagnosis(screened).weights[0] == diagnosis(screened).screened == 3 * screened.queries
    lacking = public.clone()
    lacking[:, 3] = -INF
    # The private models lack a token that the public model gives, so nothing can be lost.
    without = private.clone()
    without[:, :, 3] = -INF
    found = diagnosed(TableEnsemble(without, public), MIXING, tokens)["noisy"]
    utility = utility_of(found)
    assert utility["gap"] == utility["mean_bound"] == -INF < utility["bound"] < INF
    # No model gives the token, so both sides of the gap are infinite.
    found = diagnosed(TableEnsemble(without, lacking), MIXING, tokens)["noisy"]
    assert utility_of(found)["gap"] is None and found.perplexity == INF


def test_terms_where_a_probability_or_a_weight_is_zero() -> None:
    own, public = (
        np.array([[-2.0, -2.0, -INF, -INF, -2.0]]),
        np.array([-3.0, -INF, -3.0, -INF, -INF]),
    )
    for complement, expected in (
        (0.0, [0.0, 0.0, -INF, -INF, 0.0]),
        (0.5, [0.5, INF, -INF, -INF, INF]),
        (1.0, [1.0, INF, -INF, -INF, INF]),
    ):
        terms = utility_terms(own, public, np.full((1, 5), complement))
        assert terms.tolist() == [expected]


def test_weights_charges_and_screening_are_those_of_the_proposals() -> None:
    mechanisms = {name: one for name, one in MECHANISMS.items() if name != "budgeted"}
    found = diagnosed(FakeEnsemble(), mechanisms, stream(40), queries=QUERIES)
    for name in ("public", "unprotected", "pool"):
        told = diagnosis(found[name]).report()
        assert told["utility"] is None and told["weights"] is None
    assert diagnosis(found["pmixed"]).charges == []  # its charge is that of the whole ensemble
    assert diagnosis(found["pool"]).charges == []  # planned beforehand, for all alike
    one = found["noisy"]
    weights = diagnosis(one).report()["weights"]
    assert len(weights["bins"]) == BINS
    assert weights["zero"] + sum(weights["bins"]) + weights["one"] == 3 * QUERIES
    assert weights["screened"] == 3 * round(one.screened * QUERIES) > 0 < sum(weights["bins"])
    done, charges = diagnosis(one).charges[-1]
    assert done == QUERIES and max(charges) == pytest.approx(one.breakdown["mixing"], rel=1e-4)
    # Answered again in a single proposal, the weights are the same.
    rng = SeededRandom(5).child("adapmixed")
    expected = torch.zeros(BINS + 2)
    for start in (0, 20):
        ids = torch.tensor([stream(40)[start : start + 20]])
        private, public = FakeEnsemble().logits(ids[:, :-1])
        proposal = NOISY.propose(private[:, 0], public[0], targets=ids[0, 1:], rng=rng)
        projection: Any = proposal._proposed.projection
        for weight in projection.weight.ravel().tolist():
            place = 0 if weight == 0 else BINS + 1 if weight == 1 else int(weight * BINS) + 1
            expected[place] += 1
    assert diagnosis(one).weights.tolist() == expected.tolist()


def test_members_are_charged_until_their_shards_have_spent_their_budgets() -> None:
    """Results are the same with diagnostics and without."""
    runs, plain = (answer(diagnostics=some, runs=1) for some in (True, False))
    assert numbers(runs) == numbers(plain) and not any(one.diagnosis for one in plain)
    one = next(one for one in runs if one.name == "budgeted")
    budget = ShardBudget.for_epsilon(EPSILONS["budgeted"], DELTA, 4.0).amount
    last = diagnosis(one).charges[-1][1]
    assert len(last) == 3 and 0 < max(last) <= budget
    assert all(a <= b for (_, a), (_, b) in zip(diagnosis(one).charges[:-1],
               diagnosis(one).charges[1:], strict=True))  # fmt: skip


@pytest.mark.parametrize("calls", [1, 2, 511, 512, 513, 1024, 1025, 1536, 5000])
def test_a_curve_keeps_evenly_spaced_points_and_the_last(calls: int) -> None:
    curve = Curve(CURVE_POINTS)
    for call in range(1, calls + 1):
        curve.add((call, float(call), 1.0))
    kept = [int(call) for call in curve.all()[:, 0]]
    step = kept[0]
    assert kept == [*range(step, calls + 1, step)] + ([calls] if calls % step else [])
    assert len(kept) <= CURVE_POINTS + 1
    assert step == 1 if calls <= CURVE_POINTS else len(kept) > CURVE_POINTS // 2
