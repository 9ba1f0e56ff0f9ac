"""The charged slots are the released ones, in whichever order the two phases are called."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism, Proposal
from adapmixed.privacy import Accountant, FilterBudget, IndividualCharge, PerModelFilter
from adapmixed.rng import SecureRandom, SeededRandom

MODELS, POSITIONS, VOCAB = 3, 2, 8
FILTERED = [ClippedLogPool(-1.0, 1.0), ClippedMixing(0.5, 2.0, charge_order=4.0)]
filtered = pytest.mark.parametrize("mechanism", FILTERED, ids=lambda one: one.name)


def proposed(mechanism: Mechanism, positions: int = POSITIONS) -> Proposal:
    generator = torch.Generator().manual_seed(0)
    private = 3 * torch.randn(MODELS, positions, VOCAB, generator=generator)
    public = torch.randn(positions, VOCAB, generator=generator)
    return mechanism.propose(private, public, rng=SeededRandom(0))


def slots(*retired: tuple[int, int]) -> Tensor:
    active = torch.ones(MODELS, POSITIONS, dtype=torch.bool)
    for slot in retired:
        active[slot] = False
    return active


def charged(proposal: Proposal, active: Tensor) -> list[IndividualCharge]:
    return [one for one in proposal.events(active) if isinstance(one, IndividualCharge)]


@filtered
def test_after_a_release_from_all_slots_all_are_charged(mechanism: Mechanism) -> None:
    proposal = proposed(mechanism)
    fixed, tokens = proposal.events(), proposal.release().tokens
    for active in (slots((0, 0)), slots((1, 0), (2, 1)), torch.zeros_like(slots())):
        with pytest.raises(ValueError, match=r"active must be all True after release\(\)"):
            proposal.events(active)
        with pytest.raises(ValueError, match=r"active must be all True after release\(\)"):
            proposal.release(active)
    (event,) = charged(proposal, slots())
    assert proposal.individual_charges is not None
    assert (event.charge == proposal.individual_charges.numpy()).all()
    assert proposal.events() == fixed
    for again in (proposal.release(), proposal.release(slots())):
        assert again.tokens is tokens


@filtered
def test_the_charged_slots_alone_are_released(mechanism: Mechanism) -> None:
    active, other = slots((0, 0)), slots((0, 0), (1, 1))
    with pytest.raises(ValueError, match=r"got a mask before events\(active\) was called"):
        proposed(mechanism).release(active)
    proposal = proposed(mechanism)
    proposal.events()  # looking at the fixed charge fixes no slots
    (event,) = charged(proposal, active)
    assert (event.charge > 0).tolist() == active.tolist()
    for wrong in (other, slots()):
        for phase in (proposal.events, proposal.release):
            with pytest.raises(ValueError, match=r"the first events\(active\) has charged, got an"):
                phase(wrong)
    with pytest.raises(ValueError, match="has charged, got None"):
        proposal.release()
    with pytest.raises(ValueError, match="got another set of slots"):
        proposal.events()  # the charge of an answer from all slots
    tokens = proposal.release(active).tokens
    assert proposal.release(active.clone()).tokens is tokens
    assert (charged(proposal, active)[0].charge == event.charge).all()
    with pytest.raises(ValueError, match="got another set of slots"):
        proposal.events(other)


@filtered
def test_an_answer_does_not_tell_who_contributed(mechanism: Mechanism) -> None:
    """That all are exhausted depends on the private data; that a public rule answered does not."""
    for active in (slots(), slots((0, 0)), torch.zeros_like(slots())):
        proposal = proposed(mechanism)
        proposal.events(active)
        assert not bool(proposal.release(active).public.any())


@filtered
def test_a_mask_changed_in_place_is_another_one(mechanism: Mechanism) -> None:
    proposal, active = proposed(mechanism), slots((0, 0))
    (event,) = charged(proposal, active)
    before = event.charge.copy()
    active.fill_(True)
    with pytest.raises(ValueError, match="got another set of slots"):
        proposal.release(active)
    assert (event.charge == before).all()
    assert proposal.release(slots((0, 0))).tokens is not None


@filtered
def test_copies_share_slots_and_answer(mechanism: Mechanism) -> None:
    proposal = proposed(mechanism)
    tokens = proposal.release().tokens
    for one in (copy.copy(proposal), replace(proposal)):
        with pytest.raises(ValueError, match="active must be all True"):
            one.events(slots((0, 0)))
        assert one.release().tokens is tokens


def test_threads_cannot_charge_for_one_answer_and_draw_another() -> None:
    """Whichever comes first fixes the slots; the other one is refused."""
    for _ in range(50):
        proposal, start = proposed(FILTERED[0]), threading.Barrier(2)

        def attempt(
            name: str, proposal: Proposal = proposal, start: threading.Barrier = start
        ) -> str | None:
            start.wait(10)
            try:
                if name == "release":
                    proposal.release()
                else:
                    proposal.events(slots((0, 0)))
            except ValueError:
                return None
            return name

        with ThreadPoolExecutor(2) as pool:
            done = [name for name in pool.map(attempt, ("release", "events")) if name]
        assert len(done) == 1


def test_a_filter_cannot_be_outrun_by_releasing_first() -> None:
    """Answers that were drawn from all slots and charged to the active ones alone."""
    budget = FilterBudget("zcdp", 1e-4, 1e-5)
    kept, accountant = PerModelFilter(MODELS, budget), Accountant(1e-5, filter_budget=budget)
    accountant.attach(kept)
    generator = torch.Generator().manual_seed(0)
    private, public = 3 * torch.randn(MODELS, 1, VOCAB, generator=generator), torch.zeros(1, VOCAB)
    for _ in range(200):
        proposal = ClippedLogPool(-1.0, 1.0, scale=0.1).propose(private, public, rng=SecureRandom())
        assert proposal.individual_charges is not None
        active = torch.from_numpy(kept.admit(proposal.individual_charges.numpy()))
        proposal.release()
        if not bool(active.all()):
            break
        accountant.add(proposal.events(active))
    assert not bool(active.all())
    with pytest.raises(ValueError, match=r"call events\(active\) before release\(active\)"):
        proposal.events(active)
