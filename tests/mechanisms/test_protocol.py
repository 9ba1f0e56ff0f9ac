"""Propose, charge, release: no draw before its charge, and one charge pays for one draw."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exact import answered_from_q, stated
from protocol_cases import MECHANISMS, MODELS, VOCAB, CountingRandom, every, logits, propose, same
from torch import Tensor

from adapmixed.mechanisms import Answer, PublicOnly, Ticket
from adapmixed.privacy import Accountant, Caveat
from adapmixed.rng import SecureRandom, SeededRandom


def charged(proposal: Ticket) -> Answer:
    Accountant(1e-5).charge(proposal)
    return proposal.release()


@every
def test_events_are_known_before_the_token_is_drawn(name: str) -> None:
    rng = CountingRandom(1)
    proposal = propose(name, rng=rng)
    draws = rng.draws
    # Screening noise or a subset for each of the 12 positions, but no token.
    screened = "adapmixed" in name and "no-screen" not in name
    assert draws == (12 if screened or name == "pmixed-published-subsampled" else 0)
    events = stated(proposal)
    assert events and same(events, stated(proposal))
    accountant = Accountant(1e-5)
    accountant.charge(proposal)
    assert accountant.guarantee().queries == 12
    assert rng.draws == draws
    tokens = proposal.release().tokens
    assert rng.draws > draws
    assert tokens is not None and tokens.dtype == torch.int64 and tokens.shape == (12,)
    assert bool(((tokens >= 0) & (tokens < VOCAB)).all())
    assert same(events, stated(proposal))


@every
def test_nothing_is_released_before_the_charge(name: str) -> None:
    """Tokens, log p, the distribution and the outcome of a screening all need the charge."""
    for targets in (None, torch.zeros(12, dtype=torch.int64)):
        rng = CountingRandom(1)
        proposal = propose(name, rng=rng, targets=targets)
        draws = rng.draws
        with pytest.raises(ValueError, match="must be charged before its release .* is proposed"):
            proposal.release()
        with pytest.raises(ValueError, match="must be charged before its release .* is proposed"):
            _ = proposal._distribution
        assert rng.draws == draws
        assert not hasattr(proposal, "public") and not hasattr(proposal, "tokens")
        charged(proposal)


def test_answers_to_logits_of_an_unknown_ensemble_are_not_verified() -> None:
    accountant = Accountant(1e-5)
    accountant.charge(propose("clipped-mixing", rng=SecureRandom()))
    assert accountant.guarantee().caveats == ("shards", "base")


@every
def test_a_second_charge_raises_and_costs_nothing(name: str) -> None:
    proposal, accountant = propose(name), Accountant(1e-5)
    accountant.charge(proposal)
    before = accountant.state()
    for other in (accountant, Accountant(1e-5)):
        with pytest.raises(ValueError, match="must be charged once, got one that is charged"):
            other.charge(proposal)
    assert accountant.state() == before
    tokens = proposal.release().tokens
    with pytest.raises(ValueError, match="must be charged once"):
        accountant.charge(proposal)
    assert proposal.release().tokens is tokens


@every
def test_a_charge_is_begun_once_and_ends_once(name: str) -> None:
    """Nobody else can read the costs, or have a second answer released for the same charge."""
    for last in ("settled", "failed"):
        proposal = propose(name)

        def pay(events: Any, charges: Any, proposal: Ticket = proposal, last: str = last) -> None:
            for again in (lambda: proposal.charge(pay), lambda: Accountant(1e-5).charge(proposal)):
                with pytest.raises(ValueError, match="must be charged once, .* is being charged"):
                    again()
            for early in (proposal.release, lambda: proposal._distribution):
                with pytest.raises(ValueError, match="before its release .* it is being charged"):
                    early()
            if last == "failed":
                raise KeyboardInterrupt

        if last == "settled":
            proposal.charge(pay)
            assert proposal.release().tokens is not None
        else:
            with pytest.raises(KeyboardInterrupt):
                proposal.charge(pay)
            with pytest.raises(ValueError, match="its charge failed"):
                proposal.release()
        with pytest.raises(ValueError, match="must be charged once, got one that is"):
            proposal.charge(lambda events, charges: None)


@every
def test_a_failed_charge_kills_the_proposal(name: str) -> None:
    bound = Accountant(1e-5)
    bound.charge(propose("clipped-log-pool" if name != "clipped-log-pool" else "public"))
    before = bound.state()
    rng = CountingRandom(1)
    proposal = propose(name, rng=rng)
    draws = rng.draws
    with pytest.raises(ValueError, match="must be charged for what it is bound to"):
        bound.charge(proposal)
    assert bound.state() == before
    with pytest.raises(ValueError, match="it is not charged .its charge failed"):
        proposal.release()
    with pytest.raises(ValueError, match="must be charged once, got one that is not charged"):
        Accountant(1e-5).charge(proposal)
    assert rng.draws == draws


@every
def test_seeded_answers_repeat(name: str) -> None:
    runs = []
    for seed in (5, 5, 6):
        proposal = propose(name, positions=40, seed=seed)
        runs.append((stated(proposal), charged(proposal)))
    assert same(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1].tokens, runs[1][1].tokens)
    assert torch.equal(runs[0][1].public, runs[1][1].public)
    assert not torch.equal(runs[0][1].tokens, runs[2][1].tokens)


@every
def test_a_charge_pays_for_one_token_a_position(name: str) -> None:
    """A second release gives no new tokens without a charge."""
    rng = CountingRandom(5)
    proposal = propose(name, positions=40, rng=rng)
    first, draws = charged(proposal), rng.draws
    for _ in range(3):
        assert proposal.release() is first
    assert rng.draws == draws


@every
def test_targets_change_neither_events_nor_the_randomness_of_the_proposal(name: str) -> None:
    targets = torch.arange(12) % VOCAB
    rng = CountingRandom(5)
    scored, plain = propose(name, rng=rng, targets=targets), propose(name)
    assert same(stated(scored), stated(plain))
    assert torch.equal(answered_from_q(scored), answered_from_q(plain))
    draws = rng.draws
    answer = charged(scored)
    assert answer.tokens is None and rng.draws == draws
    assert answer.log_prob is not None and answer.log_prob.dtype == torch.float64
    assert torch.equal(answer.public, charged(plain).public)


@every
@pytest.mark.parametrize(
    "targets,message",
    [
        (torch.full((12,), VOCAB), r"targets\[0\] must be a token in \[0, 6\), got 6"),
        (torch.tensor([0] * 11 + [-1]), r"targets\[11\] must be a token in \[0, 6\), got -1"),
        (torch.zeros(11, dtype=torch.int64), r"targets must be torch.int64 of shape \(12,\)"),
        (torch.zeros(12, 1, dtype=torch.int64), r"targets must be torch.int64 of shape \(12,\)"),
        (torch.zeros(12, dtype=torch.int32), "targets must be torch.int64 .* got torch.int32"),
        (torch.zeros(12), "targets must be torch.int64 .* got torch.float32"),
        ([0] * 12, "targets must be a torch.Tensor, got list"),
    ],
)
def test_bad_targets_raise_before_anything_is_charged(
    name: str, targets: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        propose(name, targets=targets)


def test_public_only_never_reads_the_private_values() -> None:
    _, public = logits(5)
    nothing = torch.full((MODELS, 5, VOCAB), math.nan)
    proposal = PublicOnly().propose(nothing, public, rng=SeededRandom(0))
    accountant = Accountant(1e-5)
    accountant.charge(proposal)
    guarantee = accountant.guarantee()
    assert (guarantee.kind, guarantee.epsilon, guarantee.delta) == ("public", 0.0, 0.0)
    answer = proposal.release()
    assert bool(answer.public.all()) and answer.tokens.shape == (5,)


@every
@pytest.mark.parametrize("shape", [{}, {"top_k": 5}, {"temperature": 0.5}], ids=str)
def test_logits_changed_after_proposing_have_no_effect(name: str, shape: dict[str, Any]) -> None:
    """The charged distribution is that of the proposed values."""
    mechanism, settings = MECHANISMS[name], {"targets": torch.arange(3)} | shape
    expected = charged(mechanism.propose(*logits(3), rng=SeededRandom(0), **settings)).log_prob
    private, public = logits(3)
    together = torch.stack([*private, public])  # in one memory
    for rows in ((private, public), (together[:-1], together[-1])):
        proposal = mechanism.propose(*rows, rng=SeededRandom(0), **settings)
        for one in rows:
            one.mul_(-3.0)
        assert torch.equal(charged(proposal).log_prob, expected)


@every
def test_a_source_that_does_not_say_counts_as_seeded(name: str) -> None:
    source = SeededRandom(5)
    silent = SimpleNamespace(reserve=source.reserve)
    assert Caveat("seeded") in stated(propose(name, rng=silent))
    assert Caveat("seeded") not in stated(propose(name, rng=SecureRandom()))


def test_threads_cannot_charge_one_answer_twice() -> None:
    for _ in range(50):
        proposal, start = propose("clipped-log-pool"), threading.Barrier(2)
        accountants = Accountant(1e-5), Accountant(1e-5)

        def attempt(
            accountant: Accountant, proposal: Ticket = proposal, start: threading.Barrier = start
        ) -> Tensor | None:
            start.wait(10)
            try:
                accountant.charge(proposal)
            except ValueError:
                return None
            return proposal.release().tokens

        with ThreadPoolExecutor(2) as pool:
            drawn = [tokens for tokens in pool.map(attempt, accountants) if tokens is not None]
        assert len(drawn) == 1
        assert sorted(one.queries for one in accountants) == [0, 12]


def test_threads_cannot_draw_twice_for_one_charge() -> None:
    """A release either raises or returns the one answer, also during the charge."""
    for _ in range(50):
        rng = CountingRandom(3)
        proposal, start = propose("clipped-log-pool", rng=rng), threading.Barrier(3)

        def attempt(
            name: str, proposal: Ticket = proposal, start: threading.Barrier = start
        ) -> Tensor | None:
            start.wait(10)
            try:
                if name == "charge":
                    Accountant(1e-5).charge(proposal)
                return proposal.release().tokens
            except ValueError:
                return None

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(attempt, ("release", "charge", "release")))
        tokens = proposal.release().tokens
        assert found[1] is tokens and all(one is None or one is tokens for one in found)
        assert rng.draws == 1
