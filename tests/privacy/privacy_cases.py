"""Events, tickets and ledgers for the tests of the accounting, and adversaries of its theorems."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mpmath
import numpy as np
import torch

from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, Ticket
from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Event,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
)
from adapmixed.privacy.accountant import Account
from adapmixed.privacy.events import Origin, canonical, to_json
from adapmixed.rng import SecureRandom

DELTA = 1e-5


def losses(values: Any, orders: Any = (18.0,), adjacency: str = "zero_out") -> LeaveOneOutLoss:
    return LeaveOneOutLoss(orders, np.asarray(values, dtype=np.float64), adjacency)


def random_losses(
    seed: int, num_models: int = 5, queries: int = 40, orders: Any = (18.0,), **changes: Any
) -> LeaveOneOutLoss:
    generator = np.random.default_rng(seed)
    values = generator.exponential(1e-3, (num_models, queries, len(orders)))
    values[generator.random(values.shape) < 0.3] = 0.0
    return losses(np.sort(values, axis=2), orders, **changes)


def bound(
    order: float = 3.0, epsilon: float = 0.01, queries: int = 1, **changes: Any
) -> RenyiBound:
    return RenyiBound(order, epsilon, queries=queries, **{"num_models": 5, **changes})


def clipped(queries: int = 1, budget: int = 500, **changes: Any) -> ClippedAnswer:
    fields = {"lower": 0.7, "upper": 1.6, "num_models": 20, **changes}
    return ClippedAnswer(**fields, queries=queries, budget=budget)


def pooled(queries: int = 1, budget: int | None = None, **changes: Any) -> BoundedRangeAnswer:
    fields = {"scale": 2.0, "lower": -0.25, "upper": 0.5, "num_models": 20, **changes}
    return BoundedRangeAnswer(**fields, queries=queries, budget=budget)


def individual(seed: int, order: float | None = None) -> IndividualCharge:
    values = np.random.default_rng(seed).exponential(0.01, (5, 3))
    return IndividualCharge(order, values)


# Accountants with every kind of total: their arguments, and the n-th events.
TOTALS: dict[str, tuple[dict[str, Any], Callable[[int], list[Event]]]] = {
    "nothing": ({}, lambda n: []),
    "public": ({"adjacency": "replace_one"}, lambda n: [PublicAnswer(n), Caveat("base")]),
    "unprotected": ({}, lambda n: [UnprotectedAnswer(1), Caveat("seeded"), Caveat("shards")]),
    "losses": (
        {},
        lambda n: [random_losses(n, queries=n), GaussianScreening(5, 2, 0.1, 1 / 3)],
    ),
    "the paper's losses": ({}, lambda n: [random_losses(n, queries=3, adjacency="add_remove")]),
    "orders": ({}, lambda n: [random_losses(n, orders=(2.5, 18.0))]),
    "extreme losses": ({}, lambda n: [losses([[[(5e-324, 1e308, math.inf)[n % 3]]]] * 2)]),
    "no loss yet": ({}, lambda n: [random_losses(n, queries=0)]),
    "a planned bound": ({}, lambda n: [bound(queries=n, budget=100), PublicAnswer(2**70)]),
    "a published bound": ({}, lambda n: [bound(epsilon=math.inf, published=True)]),
    "screenings": ({}, lambda n: [GaussianScreening(5, 1, 0.1 * n, 0.5)]),
    "clipped": ({"adjacency": "replace_one"}, lambda n: [clipped(n, 100)]),
    "pool": ({}, lambda n: [pooled(n, scale=0.1 * n, upper=1 / 3)]),
    "a planned pool": ({}, lambda n: [pooled(n, 100)]),
    "a budget": ({"epsilon": 3.0}, lambda n: [individual(n), PublicAnswer(n)]),
    "a budget of one order": (
        {"epsilon": 12.0, "adjacency": "replace_one"}, lambda n: [individual(n, 4.0)],
    ),
    "a budget without a charge": ({"epsilon": 3.0}, lambda n: [PublicAnswer(n)]),
}  # fmt: skip


POOLED, BOXED = ClippedLogPool(-1.0, 1.0, scale=8.0), ClippedMixing(0.5, 2.0, order=4.0)


def offer(
    events: Sequence[Event] = (),
    charges: Any = None,
    *,
    mechanism: Any = None,
    ensemble: str | None = None,
    models: int = 5,
) -> Any:
    """Return a ticket of these costs, or under budgets of these charges of the members."""
    tensor = None if charges is None else torch.tensor(np.array(charges, dtype=np.float64))
    proposed: Any = SimpleNamespace(events=tuple(events), charges=tensor)
    chosen = mechanism or (AdaPMixED(18.0, 0.2) if tensor is None else POOLED)
    num_models = models if tensor is None else len(tensor)
    return Ticket(chosen, num_models, proposed, None, SecureRandom(), Origin(ensemble, ()))


def answer(number: int, models: int = 5) -> list[Event]:
    """Return the events of one query of AdaPMixED."""
    loss = random_losses(number, models, 1)
    return [GaussianScreening(models, 1, 1e-4, 1e-2), loss, PublicAnswer(0)]


def charged(count: int, models: int = 5, path: Path | None = None) -> Accountant:
    """Return an accountant with so many answers, with an open ledger if there is a path."""
    accountant = Accountant(DELTA, path=path)
    for number in range(count):
        accountant.add(answer(number, models))
    return accountant


def state(account: Accountant | Account) -> str:
    """Return everything that was charged, to the bit."""
    return canonical(to_json(account._account if isinstance(account, Accountant) else account))


def copy(path: Path, to: Path, *, shm: bool = False) -> Path:
    """Copy the files of a ledger, also those that a writer has open."""
    for suffix in ("", "-wal", "-shm"):
        source, target = Path(f"{path}{suffix}"), Path(f"{to}{suffix}")
        target.unlink(missing_ok=True)
        if source.exists() and (shm or suffix != "-shm"):
            shutil.copyfile(source, target)
    return to


# docs/theory/bounded-range.md


def grid_delta(span: float, queries: int, epsilon: float, cells: int = 32) -> float:
    """Return a lower bound of the optimum's δ at the next grid point above ε.

    The adversary steps up to e^x or down to e^(x - span) with x on a grid. Its best price is a
    lower bound of the optimum, without any error of interpolation.
    """
    reach = cells * queries
    position = np.arange(-reach, reach + 1)
    price = np.maximum(np.expm1(position * span / cells), 0.0)
    steps = span * np.arange(1, cells) / cells
    odds = -np.expm1(steps - span) / (np.exp(steps) - np.exp(steps - span))
    above = np.exp(reach * span / cells) * np.expm1(np.arange(1, cells + 1) * span / cells)
    for _ in range(queries):
        wide = np.concatenate([np.zeros(cells), price, price[-1] + above])
        best = price
        for k, odd in enumerate(odds, 1):
            up = wide[cells + k : cells + k + len(price)]
            best = np.maximum(best, odd * up + (1 - odd) * wide[k : k + len(price)])
        price = best
    at = len(position) - 1 - int(np.searchsorted(-position[::-1] * span / cells, epsilon))
    return float(price[at] / math.exp(position[at] * span / cells))


def gaussian_delta(mu: Any, epsilon: Any) -> Any:
    """Return δ(ε) of μ-Gaussian DP, with 60 digits."""
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        first = mpmath.ncdf(mu / 2 - epsilon / mu)
        return first - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


def theorem_epsilon(rho: float, largest: float, delta: float) -> Any:
    """Return ε for Σ η²/8 <= rho and every η²/8 <= largest, to 1e-20 of itself."""
    with mpmath.workdps(60):
        s, h = 2 * mpmath.mpf(rho), 2 * mpmath.mpf(largest)
        mu = mpmath.sqrt(s + h * (mpmath.mpf(5) / 2 + mpmath.log(1 + s / h)))
        low, high = mpmath.mpf(0), mpmath.mpf(1)
        while gaussian_delta(mu, high) > delta:
            low, high = high, 2 * high
        while high - low > high * mpmath.mpf(10) ** -20:
            middle = (low + high) / 2
            low, high = (middle, high) if gaussian_delta(mu, middle) > delta else (low, middle)
        return high


# docs/theory/clipped-mixing.md


def random_distributions(
    generator: Any, vocabulary: int, num_models: int, lower: float, upper: float
) -> tuple[Any, Any, Any]:
    """Return (q, p̄_1..p̄_N, another p̄_1), half of the time near corners of the box."""
    q = generator.dirichlet(np.full(vocabulary, generator.choice([0.3, 1.0, 5.0]))) + 1e-12
    q /= q.sum()
    shape = (num_models + 1, vocabulary)
    if generator.random() < 0.5:
        raised = generator.random(shape) < (1 - lower) / max(upper - lower, 1e-9)
        p = q * np.where(raised, 1e6, 1e-6) * np.exp(generator.normal(0, 0.1, shape))
    else:
        p = generator.dirichlet(np.full(vocabulary, 0.5), num_models + 1) + 1e-12
    # clip(s p, c q, C q) with s such that the sum is 1, up to rounding, by bisection on log s.
    low, high = np.full((num_models + 1, 1), -80.0), np.full((num_models + 1, 1), 80.0)
    for _ in range(80):
        middle = (low + high) / 2
        above = np.clip(np.exp(middle) * p, lower * q, upper * q).sum(-1, keepdims=True) > 1
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    boxed = np.clip(np.exp(low) * p, lower * q, upper * q)
    return q, boxed[:-1], boxed[-1]


def neighbours(q: Any, boxed: Any, other: Any, adjacency: str) -> tuple[Any, Any]:
    """Return (P, Q) of one answer, where member 0 answers q or another distribution in Q."""
    rest = boxed[1:].sum(axis=0) + (q if adjacency == "zero_out" else other)
    return boxed.mean(axis=0), rest / len(boxed)


def hockey_stick(p: Any, q: Any, ratios: Any) -> Any:
    """Return Σ (p - γ q)_+ for every γ."""
    return np.maximum(0.0, np.asarray(p) - np.multiply.outer(ratios, np.asarray(q))).sum(-1)
