"""The two phases of every mechanism: events first, then an answer of the law they charge."""

from __future__ import annotations

import math
import warnings
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch
from protocol_cases import MECHANISMS, MODELS, VOCAB, CountingRandom, every, logits, propose, same
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, PublicOnly
from adapmixed.mechanisms.law import Law
from adapmixed.privacy import Accountant, Caveat
from adapmixed.rng import SecureRandom, SeededRandom


@every
def test_events_are_known_before_the_token_is_drawn(name: str) -> None:
    rng = CountingRandom(1)
    proposal = propose(name, rng=rng)
    draws = rng.draws
    # Screening noise or a subset for each of the 12 positions, but no token.
    screened = "adapmixed" in name and "no-screen" not in name
    assert draws == (12 if screened or name == "pmixed-published-subsampled" else 0)
    events = proposal.events()
    assert events and same(events, proposal.events())
    assert rng.draws == draws
    tokens = proposal.release().tokens
    assert rng.draws > draws
    assert tokens is not None and tokens.dtype == torch.int64 and tokens.shape == (12,)
    assert bool(((tokens >= 0) & (tokens < VOCAB)).all())
    assert same(events, proposal.events())
    assert Accountant(1e-5).add(events).epsilon().queries == 12


@every
def test_seeded_answers_repeat(name: str) -> None:
    runs = []
    for seed in (5, 5, 6):
        proposal = propose(name, positions=40, seed=seed)
        runs.append((proposal.events(), proposal.release()))
    assert same(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1].tokens, runs[1][1].tokens)
    assert torch.equal(runs[0][1].public, runs[1][1].public)
    assert not torch.equal(runs[0][1].tokens, runs[2][1].tokens)


@every
def test_a_charge_pays_for_one_token_a_position(name: str) -> None:
    """A second release must not hand out fresh tokens that nobody charged."""
    proposal = propose(name, positions=40)
    first = proposal.release().tokens
    try:
        again = proposal.release().tokens
    except (ValueError, RuntimeError):
        return
    assert torch.equal(first, again)


@every
def test_targets_change_neither_events_nor_the_randomness_of_the_proposal(name: str) -> None:
    targets = torch.arange(12) % VOCAB
    rng = CountingRandom(5)
    scored, plain = propose(name, rng=rng, targets=targets), propose(name)
    assert same(scored.events(), plain.events())
    assert torch.equal(scored.public, plain.public)
    draws = rng.draws
    answer = scored.release()
    assert answer.tokens is None and rng.draws == draws
    assert answer.log_prob is not None and answer.log_prob.dtype == torch.float64
    assert torch.equal(answer.public, plain.release().public)


@every
def test_all_slots_active_is_the_same_as_none_given(name: str) -> None:
    everyone = torch.ones(MODELS, 12, dtype=torch.bool)
    proposal = propose(name)
    assert same(proposal.events(everyone), proposal.events())
    assert torch.equal(proposal.release(everyone).tokens, propose(name).release().tokens)


@every
def test_retired_slots_are_refused(name: str) -> None:
    """The charges are those of the whole ensemble: nothing may be answered without a slot."""
    active = torch.ones(MODELS, 12, dtype=torch.bool)
    active[1, 3] = False
    proposal = propose(name)
    for phase in (proposal.events, proposal.release):
        with pytest.raises(ValueError, match="active must be all True"):
            phase(active)
        for bad in (active[:, :5], active[None], active.T, active.to(torch.uint8)):
            with pytest.raises(
                ValueError, match=r"active must be bool of shape \(N, B\) = \(3, 12"
            ):
                phase(bad)


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
    ],
)
def test_bad_targets_are_refused_before_anything_is_charged(
    name: str, targets: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        propose(name, targets=targets)


@every
def test_no_positions(name: str) -> None:
    proposal = propose(name, positions=0)
    guarantee = Accountant(1e-5).add(proposal.events()).epsilon()
    assert guarantee.queries == 0
    answer = proposal.release()
    assert answer.tokens.shape == (0,) and answer.tokens.dtype == torch.int64
    assert answer.public.shape == (0,) and answer.public.dtype == torch.bool
    scored = propose(name, positions=0, targets=torch.empty(0, dtype=torch.int64)).release()
    assert scored.log_prob.shape == (0,) and scored.log_prob.dtype == torch.float64


@every
def test_shapes_that_do_not_fit_are_refused(name: str) -> None:
    private, public = logits(4)
    rng = SeededRandom(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for bad in (private[:, :3], private[0], private[..., :5]):
            with pytest.raises(ValueError, match="private_logits|public_logits"):
                MECHANISMS[name].propose(bad, public, rng=rng)


@every
def test_configurations_are_frozen(name: str) -> None:
    mechanism = MECHANISMS[name]
    with pytest.raises(FrozenInstanceError):
        mechanism.order = 2.0  # type: ignore[attr-defined]
    assert hash(mechanism) == hash(mechanism)
    proposal = propose(name)
    with pytest.raises(FrozenInstanceError):
        proposal.num_models = 1  # type: ignore[misc]


def test_public_only_never_reads_the_private_values() -> None:
    _, public = logits(5)
    nothing = torch.full((MODELS, 5, VOCAB), math.nan)
    proposal = PublicOnly().propose(nothing, public, rng=SeededRandom(0))
    guarantee = Accountant(1e-5).add(proposal.events()).epsilon()
    assert (guarantee.kind, guarantee.epsilon, guarantee.delta) == ("public", 0.0, 0.0)
    assert bool(proposal.public.all())
    assert proposal.release().tokens.shape == (5,)


def test_unprotected_has_no_guarantee() -> None:
    guarantee = Accountant(1e-5).add(propose("unprotected").events()).epsilon()
    assert (guarantee.kind, guarantee.epsilon) == ("none", None)


def test_logits_changed_after_proposing_are_refused() -> None:
    """The charged law is that of the proposed values."""
    public = torch.randn(3, 7)
    private = public + torch.randn(2, 3, 7)
    for changed in (private, public):
        proposal = AdaPMixED(order=4.0, target_leakage=0.1).propose(
            private, public, rng=SeededRandom(0)
        )
        changed.add_(1.0)
        with pytest.raises(ValueError, match="must not be changed between propose and release"):
            proposal.release()


def test_logits_of_inference_mode_are_kept_as_they_were_proposed() -> None:
    """They carry no counter of changes, so that a change could not be noticed."""
    with torch.inference_mode():
        public = torch.randn(3, 7)
        private = public + torch.randn(2, 3, 7)
    proposal = AdaPMixED(order=4.0, target_leakage=0.1).propose(
        private, public, rng=SeededRandom(0)
    )
    assert isinstance(proposal.law, Law)
    before = proposal.law._probabilities()
    with torch.inference_mode():
        for changed in (private, public):
            changed.neg_()
    assert torch.equal(proposal.law._probabilities(), before)
    assert proposal.release().tokens is not None


@every
def test_a_source_that_does_not_say_counts_as_seeded(name: str) -> None:
    source = SeededRandom(5)
    silent = SimpleNamespace(reserve=source.reserve)
    assert Caveat("seeded") in propose(name, rng=silent).events()
    assert Caveat("seeded") not in propose(name, rng=SecureRandom()).events()
