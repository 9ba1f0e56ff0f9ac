"""Settings of AdaPMixED: presets, orders, adjacencies and errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from adapmixed_cases import MODELS, POSITIONS, SETTINGS, ensemble, events_of, propose
from exact import answered_from_q, losses, stated

from adapmixed.mechanisms import AdaPMixED
from adapmixed.mechanisms.adapmixed import PRESETS
from adapmixed.privacy import (
    Accountant,
    GaussianScreening,
    LeaveOneOutLoss,
)


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_losses_at_several_orders(adjacency: str) -> None:
    private, public = ensemble()
    settings = SETTINGS | dict(adjacency=adjacency)
    several = propose(AdaPMixED(**settings, loss_orders=(1.5, 3.0, 18.0)), private, public)
    (loss,) = events_of(several, LeaveOneOutLoss)
    assert loss.orders == (1.5, 3.0, 18.0) and loss.adjacency == adjacency
    for k, order in enumerate(loss.orders):
        one = propose(AdaPMixED(**settings, loss_orders=(order,)), private, public)
        (single,) = events_of(one, LeaveOneOutLoss)
        np.testing.assert_allclose(single.loss[:, :, 0], loss.loss[:, :, k], rtol=1e-4)
    assert (np.diff(loss.loss, axis=2) > 0).all()  # increasing in the order
    assert losses(several).shape == (MODELS, POSITIONS, 3)
    assert (losses(several)[:, answered_from_q(several)] == 0).all()


# The paper's table: order, beta, sigma, lambda, threshold, top-k (N is the ensemble's).
TABLE = {
    "wikitext-103": (18, 0.2, 1e-2, 1e-4, 4.5, 60),
    "one-billion-word": (18, 0.2, 1e-2, 1e-4, 4.5, 60),
    "pubmed": (15, 0.3, 1e-1, 1e-3, 4.5, 60),
    "air-dialogue": (15, 0.3, 1e-2, 1e-4, 4.5, 60),
}


def test_presets_are_the_papers_table() -> None:
    assert set(PRESETS) == set(TABLE)
    for name, (order, beta, sigma, weight, threshold, top_k) in TABLE.items():
        m = AdaPMixED.preset(name)
        assert (m.order, m.target_leakage, m.sigma, m.screen_weight) == (order, beta, sigma, weight)
        assert (m.threshold, m.screen_top_k) == (threshold, top_k)
        assert (m.screen, m.loss, m.adjacency) == ("noisy", "data-dependent", "zero_out")
        assert m.radius == beta * order
        private, public = ensemble()
        (loss,) = events_of(propose(m, private, public), LeaveOneOutLoss)
        assert loss.orders == (order,)


def test_paper_screening_total() -> None:
    """Screening of 9 728 queries of wikitext-103 with 100 models costs 0.00175."""
    private, public = torch.zeros(100, 1, 4), torch.zeros(1, 4)
    proposal = propose(AdaPMixED.preset("wikitext-103"), private, public)
    (event,) = events_of(proposal, GaussianScreening)
    accountant = Accountant(1e-5)
    for _ in range(9728):
        accountant.add(stated(proposal))
    assert accountant.breakdown()["screening"] == pytest.approx(0.00175, abs=2e-6)
    assert accountant.breakdown()["conversion"] == pytest.approx(0.45005, abs=5e-6)
    assert (event.weight, event.sigma, event.num_models) == (1e-4, 1e-2, 100)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(order=1.0), "order must be > 1, got 1.0"),
        (dict(order=math.inf), "order must be"),
        (dict(order=math.nan), "order must be > 1, got nan"),
        (dict(order="18"), "order must be a number, got '18'"),
        (dict(target_leakage=-0.1), "target_leakage must be >= 0, got -0.1"),
        (dict(target_leakage=math.nan), "target_leakage must be >= "),
        (dict(target_leakage=math.inf), "target_leakage must be <= 100, got inf"),
        (dict(screen="private"), "screen must be one of .*'noisy', 'public', None.*'private'"),
        (dict(screen_weight=1.5), "screen_weight must be <= 1, got 1.5"),
        (dict(screen_weight=-0.5), "screen_weight must be >= 0"),
        (dict(sigma=math.nan), "sigma must be"),
        (dict(threshold=-1.0), "threshold must be >= 0, got -1.0"),
        (dict(threshold=math.nan), "threshold must be >= 0, got nan"),
        (dict(screen_top_k=0), "screen_top_k must be an integer >= 1, got 0"),
        (dict(screen_top_k=True), "screen_top_k must be an integer >= 1, got True"),
        (dict(screen_top_k=2.0), "screen_top_k must be an integer, got 2.0"),
        (dict(loss="fix"), "loss must be one of .*'data-dependent', 'fixed'.* got 'fix'"),
        (dict(loss_orders=(2.0, 1.0)), "loss_orders must be > 1, got 1.0"),
        (dict(loss_orders=tuple(range(2, 11))), "loss_orders must be at most 8"),
        (dict(loss="fixed", loss_orders=(2.0,)), "loss_orders must be empty with loss='fixed'"),
        (dict(loss="fixed", adjacency="add_remove"), "adjacency must be 'zero_out' with loss='fix"),
        (dict(adjacency="replace_one"), "adjacency must be one of .*got 'replace_one'"),
    ],
)
def test_settings_that_are_not_allowed_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaPMixED(**(SETTINGS | changes))


@pytest.mark.parametrize("value,words", [(math.nan, "NaN"), (math.inf, "inf")])
def test_bad_logits_raise_before_anything_is_released(value: float, words: str) -> None:
    private, public = ensemble(positions=3)
    private[1, 2, 4] = value
    with pytest.raises(ValueError, match=rf"private_logits\[1, 2\] contains .*{words}"):
        propose(AdaPMixED(**SETTINGS), private, public)
