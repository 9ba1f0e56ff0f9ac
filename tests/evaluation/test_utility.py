"""The utility theorem holds on all tables of logits, and answers are those without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fake_ensemble import FakeEnsemble
from result_cases import DELTA, NOISY, answer, numbers, stream
from torch import Tensor

from adapmixed.evaluation import Evaluation, evaluate
from adapmixed.evaluation.utility import utility_terms
from adapmixed.mechanisms import AdaPMixED, Mechanism, PMixED, Unprotected
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
    results = evaluate(ensemble, tokens, mechanisms, **(settings | changed))
    return {result.name: result for result in results}


def utility_of(evaluation: Evaluation) -> dict[str, Any]:
    assert evaluation.utility is not None
    return dict(evaluation.utility)


def at_most(least: float, most: float) -> bool:
    return least <= most or (math.isfinite(most) and least <= most + 1e-12 * max(1.0, abs(most)))


@pytest.mark.parametrize("table", TABLES)
def test_the_theorem_holds(table: str) -> None:
    for seed in range(2):
        ensemble = TableEnsemble(*TABLES[table](seed))
        tokens = stream(40, seed)
        results = diagnosed(ensemble, MIXING | {"unprotected": Unprotected()}, tokens)
        unprotected = math.log(results.pop("unprotected").perplexity)
        for result in results.values():
            utility = utility_of(result)
            assert at_most(utility["mean_bound"], utility["bound"])
            assert utility["gap"] is None or at_most(utility["gap"], utility["mean_bound"])
            assert utility["loss"] == pytest.approx(math.log(result.perplexity), rel=1e-12)
            assert utility["ensemble_loss"] == pytest.approx(unprotected, rel=1e-12, abs=1e-12)


def test_what_the_edges_are() -> None:
    tokens = [0, 3] * 12  # reads 0 and 3, whose next are 3 and 0
    private, public = tables(0)
    result = diagnosed(TableEnsemble(*equal(0)), MIXING, tokens)["unscreened"]
    utility = utility_of(result)
    assert utility["bound"] == 0.0 and utility["gap"] == pytest.approx(0.0, abs=1e-14)
    lacking = public.clone()
    lacking[:, 3] = -INF
    # The private models lack a token that the public model gives, so nothing can be lost.
    without = private.clone()
    without[:, :, 3] = -INF
    result = diagnosed(TableEnsemble(without, public), MIXING, tokens)["noisy"]
    utility = utility_of(result)
    assert utility["gap"] == utility["mean_bound"] == -INF < utility["bound"] < INF
    # No model gives the token, so both sides of the gap are infinite.
    result = diagnosed(TableEnsemble(without, lacking), MIXING, tokens)["noisy"]
    assert utility_of(result)["gap"] is None and result.perplexity == INF


def test_terms_where_a_probability_or_a_weight_is_zero() -> None:
    private, public = (
        np.array([[-2.0, -2.0, -INF, -INF, -2.0]]),
        np.array([-3.0, -INF, -3.0, -INF, -INF]),
    )
    for complement, expected in (
        (0.0, [0.0, 0.0, -INF, -INF, 0.0]),
        (0.5, [0.5, INF, -INF, -INF, INF]),
        (1.0, [1.0, INF, -INF, -INF, INF]),
    ):
        terms = utility_terms(private, public, np.full((1, 5), complement))
        assert terms.tolist() == [expected]


def test_answers_are_the_same_and_references_have_no_utility() -> None:
    runs, plain = (answer(diagnostics=some) for some in (True, False))
    assert numbers(runs) == numbers(plain) and not any(result.utility for result in plain)
    mixing = [result.name for result in runs if result.utility is not None]
    assert mixing == ["noisy", "pmixed"]
