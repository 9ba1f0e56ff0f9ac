"""Filters whose budget reserves noisy counts, beside a ledger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from ledger_cases import DELTA

from adapmixed.privacy import FilterBudget, IndividualCharge, Ledger, PerModelFilter
from adapmixed.rng import SeededRandom

MODELS, K, SIGMA = 3, 3, 20.0
BUDGET = FilterBudget("zcdp", 1.0, DELTA, releases=K, sigma=SIGMA)
SETTINGS: dict[str, Any] = dict(delta=DELTA, configuration="a pool", filter_budget=BUDGET)
SECURE = SimpleNamespace(seeded=False, bits=SeededRandom(0).bits)


def begin(ledger: Ledger, budget: FilterBudget = BUDGET) -> PerModelFilter:
    """A filter that goes on from what the ledger holds."""
    made = PerModelFilter(MODELS, budget, spent=ledger.accountant.individual_spent)
    ledger.attach(made)
    return made


def answer(ledger: Ledger, model_filter: PerModelFilter, amount: float = 0.125) -> None:
    charges = np.full((MODELS, 1), amount)
    charged = np.where(model_filter.admit(charges), charges, 0.0)
    ledger.charge(IndividualCharge("zcdp", None, charged))


def count(model_filter: PerModelFilter, threshold: float = 0.1, noise: int = 0) -> int:
    """A count with this noise."""
    with mock.patch.object(model_filter, "_noise", return_value=noise):
        return model_filter.noisy_count(threshold, rng=SECURE)
