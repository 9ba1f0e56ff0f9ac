"""N is a public constant: emptied and exhausted members answer alike, each charged for itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from exact import answered_from_q, costs, individual, log_probs, settled
from torch import Tensor

from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.privacy import Accountant
from adapmixed.privacy.composition import ShardBudget
from adapmixed.privacy.conversions import add_up
from adapmixed.rng import SeededRandom

SETTING = (-0.25, 0.5, 2.0)
CHARGED: dict[str, Mechanism] = {
    "pool": ClippedLogPool(*SETTING),
    "sure pool": ClippedLogPool(*SETTING, public_confidence=0.5),
    "box": ClippedMixing(0.6, 1.7, order=4.0),
    "sure box": ClippedMixing(0.6, 1.7, order=4.0, public_confidence=0.5),
}


def drawn(seed: int, models: int, vocab: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = 2 * torch.randn(6, vocab, generator=generator)
    public[5] *= 0.2  # a row that is surely not confident
    private = public + torch.randn(models, 6, vocab, generator=generator)
    private[0, 0, 3] = -torch.inf
    return private, public


def exhausted(mechanism: Mechanism, models: int, member: int) -> Accountant:
    """Return an accountant with one shard that has spent its budget; the others spent nothing."""
    accountant = Accountant(1e-5, epsilon=50.0)
    accountant.bind(mechanism, models)
    spent = np.zeros(models)
    spent[member] = accountant.limit
    accountant._kept = replace(accountant._account, total=spent)
    return accountant


@pytest.mark.parametrize("shape", [{}, {"top_k": 5}, {"temperature": 0.7}], ids=str)
@pytest.mark.parametrize("models", [1, 4])
@pytest.mark.parametrize("name", CHARGED)
def test_emptied_and_exhausted_members_answer_alike_to_the_last_bit(
    name: str, models: int, shape: dict[str, Any]
) -> None:
    """Scores, tokens, public answers and the charges of every other shard are the same."""
    mechanism, (private, public), member = CHARGED[name], drawn(1, models), models // 2
    emptied = private.clone()
    emptied[member] = public  # also what a missing member answers
    others = [i for i in range(models) if i != member]
    runs = []
    for rows, make in (
        (private, partial(exhausted, mechanism, models, member)),
        (emptied, partial(Accountant, 1e-5, epsilon=50.0)),
        (emptied, partial(exhausted, mechanism, models, member)),
    ):
        answers = []
        for token in (None, *range(public.shape[1])):
            targets, accountant = None if token is None else torch.full((6,), token), make()
            ticket = mechanism.propose(rows, public, rng=SeededRandom(3), targets=targets, **shape)
            accountant.charge(ticket)
            answers.append(ticket.release())
        spent = accountant.spent[others]
        runs.append((answers, spent, ticket._distribution.probabilities()))
    for answers, spent, probabilities in runs[1:]:
        assert (spent == runs[0][1]).all() and (spent > 0).all()
        assert torch.equal(probabilities, runs[0][2])
        for answer, other in zip(answers, runs[0][0], strict=True):
            for field in ("tokens", "log_prob", "public"):
                here, there = getattr(answer, field), getattr(other, field)
                assert here is there is None or torch.equal(here, there)
    whole = settled(mechanism.propose(private, public, rng=SeededRandom(3), **shape))._distribution
    assert not torch.equal(whole.probabilities(), runs[0][2])


# Individual charges and budgets: the charged members contribute, each for itself.


def bounded(mechanism: Mechanism, amount: float) -> Accountant:
    """Return an accountant with this budget for every shard."""
    budget = ShardBudget(amount, mechanism.charge_order)
    return Accountant(1e-5, epsilon=budget.epsilon(1e-5))


@pytest.mark.parametrize(
    "mechanism",
    [ClippedLogPool(-1.0, 1.0), ClippedMixing(0.5, 2.0, order=4.0)],
    ids=lambda mechanism: mechanism.name,
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
    separate = []
    for b in range(positions):
        single = mechanism.propose(private[:, b : b + 1], public[b : b + 1], rng=SeededRandom(0))
        one_by_one.charge(single)
        separate.append(single._distribution.probabilities())
    assert (together.spent == one_by_one.spent).all()
    assert (together.spent <= together.limit).all() and together.queries == positions
    assert torch.equal(ticket._distribution.probabilities(), torch.cat(separate))
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
        accountant, steps = bounded(mechanism, amount), []
        for t in range(answers):
            query = here[:, t : t + 1].contiguous(), public[t : t + 1]
            ticket = mechanism.propose(*query, rng=SeededRandom(0), top_k=top_k)
            due, before = individual(ticket)[:, 0], accountant.spent if t else np.zeros(models)
            accountant.charge(ticket)
            assert ticket._active is not None
            paid = np.where(ticket._active[:, 0].numpy(), due, 0.0)
            assert (accountant.spent == add_up(before, paid)).all()
            steps.append([due, paid, accountant.spent])
        assert (steps[-1][1] == 0).any() and (steps[0][1] > 0).any()  # some retire
        return np.array(steps)

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
