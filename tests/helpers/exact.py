"""What a proposal holds without a charge, and values with 60 digits or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np
import torch
from oracle import Mixtures
from torch import Tensor

from adapmixed.mechanisms import Answer, Mechanism, Ticket
from adapmixed.privacy import Caveat
from adapmixed.rng import SeededRandom


def exactly(function: Any) -> Any:
    """Evaluate `function` of mpmath numbers with 60 digits."""
    with mpmath.workdps(60):
        return mpmath.mpf(function())


def assert_just_above(value: float, exact: Any, tolerance: float = 1e-11) -> None:
    """Assert that `value` is at least the exact one, and exceeds it by rounding alone."""
    with mpmath.workdps(60):
        assert value >= exact
        assert value - exact <= tolerance * abs(exact) + mpmath.mpf(10) ** -300


def stated(proposal: Ticket) -> Sequence[Any]:
    """Return the events that an accountant would get, without a charge."""
    return proposal._events


def individual(proposal: Ticket) -> np.ndarray:
    """Return the (N, B) individual charges, without a charge."""
    assert proposal._charges is not None
    return proposal._charges


def settled(proposal: Ticket, active: Any = None) -> Ticket:
    """Return the proposal, made ready for release without a charge."""
    proposal.charge(lambda events, charges: active)
    return proposal


def costs(proposal: Ticket) -> list[Any]:
    """Return the events of a proposal, without their note about a seeded source."""
    events = stated(proposal)
    caveats = [event for event in events if isinstance(event, Caveat)]
    assert caveats == [Caveat(name) for name in ("seeded", "shards", "base")]
    return [event for event in events if not isinstance(event, Caveat)]


def uncharged(proposal: Ticket) -> Answer:
    """Return the answer without a charge, for tests with more queries than a plan allows."""
    return settled(proposal).release()


def answered_from_q(proposal: Ticket) -> Tensor:
    """Return which queries q answers, (B,) bool, which is secret before the charge."""
    public, rows = proposal._proposed.public, proposal._proposed.rows.public
    return torch.zeros(len(rows), dtype=torch.bool) if public is None else public


def losses(proposal: Ticket) -> Tensor:
    """Return AdaPMixED's realised losses, (N, B, K)."""
    found = proposal._proposed.losses
    assert found is not None
    return found


def mixtures(proposal: Ticket) -> Mixtures:
    """Return the members' distributions and their mean, with the weights of the proposal."""
    rows = proposal._proposed.rows  # members do not speak about the tail
    projection: Any = proposal._proposed.projection
    return Mixtures.of_weights(rows.private, rows.public, projection.weight, exact=True)


def log_probs(
    mechanism: Mechanism, private: Tensor, public: Tensor, *, seed: int = 0, **shape: Any
) -> Tensor:
    """Return log p of every token as released, (B, V), from one proposal per token and one seed."""
    columns = []
    for token in range(public.shape[1]):
        targets, rng = torch.full((len(public),), token), SeededRandom(seed)
        proposal = mechanism.propose(private, public, targets=targets, rng=rng, **shape)
        columns.append(uncharged(proposal).log_prob)
    return torch.stack(columns, dim=1)
