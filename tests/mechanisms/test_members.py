"""Per-shard budgets: exactly the charged members contribute to an answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact import individual, log_probs, settled
from torch import Tensor

from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism, Ticket
from adapmixed.privacy import Accountant
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.rounding import array_add_up
from adapmixed.rng import SecureRandom, SeededRandom

MODELS, POSITIONS, VOCAB, DELTA = 3, 2, 8, 1e-5
CHARGED = [ClippedLogPool(-1.0, 1.0), ClippedMixing(0.5, 2.0, order=4.0)]
charged = pytest.mark.parametrize("mechanism", CHARGED, ids=lambda one: one.name)


def logits(positions: int = POSITIONS) -> tuple[Tensor, Tensor]:
    """Return logits whose first member is nearer to the public model than the others."""
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(positions, VOCAB, generator=generator)
    private = public + 3 * torch.randn(MODELS, positions, VOCAB, generator=generator)
    private[0] = public + 0.02 * (private[0] - public)
    return private, public


def proposed(mechanism: Mechanism, positions: int = POSITIONS, **targets: Tensor) -> Ticket:
    return mechanism.propose(*logits(positions), rng=SeededRandom(0), **targets)


def bounded(mechanism: Mechanism, amount: float) -> Accountant:
    """Return an accountant with this budget for every shard."""
    assert mechanism.measure is not None
    budget = ShardBudget(mechanism.measure[0], amount, mechanism.measure[1])
    return Accountant(DELTA, epsilon=budget.epsilon(DELTA))


def first_alone(mechanism: Mechanism) -> Accountant:
    """Return an accountant whose budget only the first member's charges keep."""
    return bounded(mechanism, 1.5 * float(individual(proposed(mechanism))[0].sum()))


def active(*members: int) -> np.ndarray:
    found = np.zeros((MODELS, POSITIONS), dtype=np.bool_)
    found[list(members)] = True
    return found


@charged
def test_the_charged_members_alone_are_released(mechanism: Mechanism) -> None:
    """Draws, scores and charges are of the same members."""
    accountant, proposal = first_alone(mechanism), proposed(mechanism)
    accountant.charge(proposal)
    own = individual(proposal)
    assert (accountant.spent[1:] == 0).all()
    assert accountant.spent[0] == pytest.approx(own[0].sum(), rel=1e-12)
    assert proposal._active is not None and (proposal._active.numpy() == active(0)).all()
    assert accountant.spent[0] == array_add_up(own[0, :1], own[0, 1:])[0]
    private, public = logits()
    alone = torch.stack([private[0], public, public])
    expected = log_probs(mechanism, alone, public)
    there = settled(mechanism.propose(alone, public, rng=SeededRandom(0)))
    found = [one._distribution.probabilities() for one in (proposal, there)]
    assert torch.equal(*found)
    assert torch.equal(proposal.release().tokens, there.release().tokens)
    for token in range(VOCAB):
        scored = proposed(mechanism, targets=torch.full((POSITIONS,), token))
        first_alone(mechanism).charge(scored)
        assert torch.equal(scored.release().log_prob, expected[:, token])


@charged
def test_nobody_is_charged_whose_member_answered_the_public_distribution(
    mechanism: Mechanism,
) -> None:
    """If all members are exhausted, the answers go on, cost nothing, and are q."""
    accountant = bounded(mechanism, float(individual(proposed(mechanism)).min()) / 2)
    for _ in range(3):
        proposal = proposed(mechanism)
        accountant.charge(proposal)
        assert (accountant.spent == 0).all()
        q = logits()[1].double().softmax(1)
        torch.testing.assert_close(proposal._distribution.probabilities(), q, rtol=1e-13, atol=0.0)
        answer = proposal.release()
        # It is private that a member is exhausted, so nothing says so.
        assert not bool(answer.public.any())
    assert accountant.queries == 3 * POSITIONS


@charged
def test_an_answer_does_not_tell_who_contributed(mechanism: Mechanism) -> None:
    """An answer shows that a public rule answered, but not that all members are exhausted."""
    own = individual(proposed(mechanism))
    for amount in (own.min() / 2, 1.5 * own[0].sum(), own.sum()):
        proposal = proposed(mechanism)
        bounded(mechanism, float(amount)).charge(proposal)
        answer = proposal.release()
        assert not bool(answer.public.any())
        assert answer.log_prob is None and answer.tokens is not None
    assert set(vars(answer)) == {"tokens", "log_prob", "public"}


@charged
def test_members_are_admitted_position_after_position(mechanism: Mechanism) -> None:
    """A batch is charged as its positions one after the other."""
    positions = 12
    own = individual(proposed(mechanism, positions))
    amount = float(own.sum(1).max()) / 3
    together, one_by_one = bounded(mechanism, amount), bounded(mechanism, amount)
    proposal = proposed(mechanism, positions)
    together.charge(proposal)
    private, public = logits(positions)
    found = []
    for b in range(positions):
        one = mechanism.propose(private[:, b : b + 1], public[b : b + 1], rng=SeededRandom(0))
        one_by_one.charge(one)
        found.append(one._distribution.probabilities())
    assert (together.spent == one_by_one.spent).all()
    assert (together.spent <= together.limit).all() and together.queries == positions
    assert torch.equal(proposal._distribution.probabilities(), torch.cat(found))
    assert proposal._active is not None
    assert 0 < int(proposal._active.sum()) < proposal._active.numel()


@charged
def test_without_a_budget_all_members_answer(mechanism: Mechanism) -> None:
    planned = type(mechanism)(**vars(mechanism) | {"queries": 9})
    proposal, accountant = proposed(planned), Accountant(DELTA)
    accountant.charge(proposal)
    assert proposal._active is None
    expected = log_probs(mechanism, *logits()).exp()
    torch.testing.assert_close(
        proposal._distribution.probabilities(), expected, rtol=1e-13, atol=0.0
    )
    with pytest.raises(ValueError, match="spent needs an accountant with epsilon="):
        _ = accountant.spent


def test_a_budget_cannot_be_outrun_by_releasing_first() -> None:
    """An answer drawn from all members but charged to the active ones must be impossible."""
    mechanism = ClippedLogPool(-1.0, 1.0, scale=0.1)
    generator = torch.Generator().manual_seed(0)
    private, public = 3 * torch.randn(MODELS, 1, VOCAB, generator=generator), torch.zeros(1, VOCAB)
    accountant = bounded(mechanism, 1e-2)
    for _ in range(200):
        proposal = mechanism.propose(private, public, rng=SecureRandom())
        with pytest.raises(ValueError, match="must be charged before its release"):
            proposal.release()
        accountant.charge(proposal)
        tokens = proposal.release().tokens
        with pytest.raises(ValueError, match="must be charged once"):
            accountant.charge(proposal)
        assert proposal.release().tokens is tokens
        assert (accountant.spent <= accountant.limit).all()
    assert proposal._active is not None and not bool(proposal._active.any())
    last = proposal._distribution.probabilities()
    torch.testing.assert_close(last, torch.full_like(last, 1 / VOCAB), rtol=1e-13, atol=0.0)
