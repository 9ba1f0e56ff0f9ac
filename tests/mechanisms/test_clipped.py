"""Individual charges and budgets: exactly the charged members contribute, each for itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exact import answered_from_q, costs, individual, log_probs
from torch import Tensor

from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.privacy import Accountant
from adapmixed.privacy.account import ShardBudget
from adapmixed.privacy.rounding import array_add_up
from adapmixed.rng import SeededRandom

DELTA = 1e-5


def bounded(mechanism: Mechanism, amount: float) -> Accountant:
    """Return an accountant with this budget for every shard."""
    assert mechanism.measure is not None
    budget = ShardBudget(amount, mechanism.measure[1])
    return Accountant(DELTA, epsilon=budget.epsilon(DELTA))


@pytest.mark.parametrize(
    "mechanism",
    [ClippedLogPool(-1.0, 1.0), ClippedMixing(0.5, 2.0, order=4.0)],
    ids=lambda one: one.name,
)
def test_members_are_admitted_position_after_position(mechanism: Mechanism) -> None:
    """A batch is charged as its positions one after the other."""
    generator, positions = torch.Generator().manual_seed(0), 12
    public = torch.randn(positions, 8, generator=generator)
    private = public + 3 * torch.randn(3, positions, 8, generator=generator)
    private[0] = public + 0.02 * (private[0] - public)  # it has budget left for longer
    ticket = mechanism.propose(private, public, rng=SeededRandom(0))
    amount = float(individual(ticket).sum(1).max()) / 3
    together, one_by_one = bounded(mechanism, amount), bounded(mechanism, amount)
    together.charge(ticket)
    found = []
    for b in range(positions):
        one = mechanism.propose(private[:, b : b + 1], public[b : b + 1], rng=SeededRandom(0))
        one_by_one.charge(one)
        found.append(one._distribution.probabilities())
    assert (together.spent == one_by_one.spent).all()
    assert (together.spent <= together.limit).all() and together.queries == positions
    assert torch.equal(ticket._distribution.probabilities(), torch.cat(found))
    assert ticket._active is not None
    assert 0 < int(ticket._active.sum()) < ticket._active.numel()


@pytest.mark.parametrize("changed", ["another", "emptied", "corners", "outside q"])
@pytest.mark.parametrize(
    ("mechanism", "amount", "top_k"),
    [
        (ClippedMixing(0.6, 1.6, order=5.0), 0.02, None),
        (ClippedMixing(0.2, 9.0, order=2.0), 0.3, 7),
        (ClippedLogPool(-9.0, 9.0, 0.1), 0.006, None),
        (ClippedLogPool(-9.0, 9.0, 0.2, public_confidence=0.4), 0.02, None),
    ],
)
def test_a_charge_does_not_depend_on_the_other_shards(
    mechanism: Mechanism, amount: float, top_k: int | None, changed: str
) -> None:
    """Proposed charges, paid charges and spent totals agree to the last bit."""
    models, answers, vocab = 6, 9, 300
    generator = torch.Generator().manual_seed(3)
    public = 2 * torch.randn(answers, vocab, generator=generator)
    private = public + torch.randn(models, answers, vocab, generator=generator)
    noise = torch.randn(models, answers, vocab, generator=generator)
    rows = {
        "another": private + 3 * noise,
        "emptied": public.expand_as(private),
        "corners": public + 40 * noise.sign(),
        "outside q": private.masked_fill(torch.arange(vocab) % 3 > 0, -torch.inf),
    }[changed]

    def charges(here: Tensor) -> np.ndarray[Any, Any]:
        """Return proposed, paid and total charges after each answer, (answers, 3, N)."""
        accountant, found = bounded(mechanism, amount), []
        for t in range(answers):
            query = here[:, t : t + 1].contiguous(), public[t : t + 1]
            ticket = mechanism.propose(*query, rng=SeededRandom(0), top_k=top_k)
            own, before = individual(ticket)[:, 0], accountant.spent if t else np.zeros(models)
            accountant.charge(ticket)
            assert ticket._active is not None
            paid = np.where(ticket._active[:, 0].numpy(), own, 0.0)
            assert (accountant.spent == array_add_up(before, paid)).all()
            found.append([own, paid, accountant.spent])
        assert (found[-1][1] == 0).any() and (found[0][1] > 0).any()  # some retire
        return np.array(found)

    before = charges(private)
    for j in range(models):
        other = private.clone()
        other[j] = rows[j]
        kept = [i for i in range(models) if i != j]
        after = charges(other)
        assert (before[:, 0, j] != after[:, 0, j]).any()
        assert (before[..., kept] == after[..., kept]).all()
    others = rows.clone()  # all of them at once
    others[2] = private[2]
    assert (before[..., 2] == charges(others)[..., 2]).all()


@pytest.mark.parametrize(
    "mechanism",
    [
        ClippedMixing(0.6, 1.6, 9, order=3.0, public_confidence=0.5),
        ClippedLogPool(-1, 1, public_confidence=0.5),
    ],
)
def test_a_sure_query_is_answered_from_q_for_nothing(mechanism: Mechanism) -> None:
    public = torch.zeros(2, 5)
    public[1, 3] = 6.0
    private = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(5))
    ticket = mechanism.propose(private, public, rng=SeededRandom(0))
    assert answered_from_q(ticket).tolist() == [False, True]
    assert [event.queries for event in costs(ticket)] == [1, 1]
    assert (individual(ticket)[:, 1] == 0).all()
    q, there = torch.log_softmax(public.double(), 1), log_probs(mechanism, private, public)
    assert torch.allclose(there[1], q[1], atol=1e-12)
    assert not torch.allclose(there[0], q[0], atol=1e-3)
