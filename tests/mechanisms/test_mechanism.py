"""Propose, charge, release: no draw before its charge, and one charge pays for one draw."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exact import settled, stated
from mechanism_cases import (
    KINDS,
    MECHANISMS,
    MODELS,
    VOCAB,
    CountingRandom,
    every,
    logits,
    propose,
    same,
)
from torch import Tensor

from adapmixed.commands.options import kinds
from adapmixed.mechanisms import (
    Allowance,
    Answer,
    ClippedLogPool,
    Origin,
    PublicOnly,
    Ticket,
    shaped,
)
from adapmixed.privacy import Accountant, BudgetSpentError, Caveat, read_ledger
from adapmixed.rng import SecureRandom, SeededRandom

REFUSED: list[tuple[str, str, list[Any]]] = [
    ("adapmixed", "order", [1.0, math.inf, math.nan, "18"]),
    ("adapmixed", "target_leakage", [-0.1, math.nan, math.inf]),
    ("adapmixed", "screen", ["private"]),
    ("adapmixed", "screen_weight", [1.5, -0.5]),
    ("adapmixed", "threshold", [-1.0, math.nan]),
    ("adapmixed", "screen_top_k", [0, True, 2.0]),
    ("adapmixed", "loss_orders", [(2.0, 1.0), (2.0, 2.0), [2.0]]),
    ("adapmixed", "adjacency", ["replace_one"]),
    ("pmixed", "epsilon", [0.0, math.inf, math.nan, 1.7]),
    ("pmixed", "queries", [0, 1.0, True]),
    ("unprotected-pool", "scale", [0.0, 101.0, math.nan]),
    ("clipped-mixing", "public_confidence", [-0.1, 1.1, math.nan, "1"]),
    ("clipped-log-pool", "public_confidence", [-0.1, 1.1, math.nan, "1"]),
]


@pytest.mark.parametrize(("name", "field", "values"), REFUSED)
def test_settings_that_are_not_allowed_raise(name: str, field: str, values: list[Any]) -> None:
    """Their limits are in `test_limits.py`."""
    for value in values:
        with pytest.raises(ValueError, match=f"{field} must be"):
            replace(MECHANISMS[name], **{field: value})


def charged(ticket: Ticket) -> Answer:
    Accountant(1e-5).charge(ticket)
    return ticket.release()


def test_every_mechanism_is_tested() -> None:
    assert {mechanism.name for mechanism in MECHANISMS.values()} >= {*kinds()}


@every
@pytest.mark.parametrize("scored", [False, True])
def test_an_answer_is_charged_once_and_released_once(name: str, scored: bool) -> None:
    """Tokens, log p, the distribution and the outcome of a screening all need the charge."""
    targets = torch.arange(12) % VOCAB if scored else None
    rng = CountingRandom(5)
    ticket = propose(name, rng=rng, targets=targets)
    draws, events = rng.draws, stated(ticket)
    # Noise or a subset for each of the 12 positions, but no token.
    noisy = "adapmixed" in name and "no-screen" not in name
    noisy |= name in ("pmixed-published-subsampled", "noisy-aggregation")
    assert draws == (12 if noisy else 0)
    for early in (ticket.release, lambda: ticket._distribution):
        with pytest.raises(ValueError, match="must be charged before its release .* is proposed"):
            early()
    assert not hasattr(ticket, "public") and not hasattr(ticket, "tokens")
    accountant = Accountant(1e-5)
    accountant.charge(ticket)
    assert accountant.queries == 12 and rng.draws == draws
    answer, before = ticket.release(), accountant.state()
    drawn = rng.draws
    for other in (accountant, Accountant(1e-5)):
        with pytest.raises(ValueError, match="must be charged once, got one that is charged"):
            other.charge(ticket)
    assert ticket.release() is answer and accountant.state() == before
    assert rng.draws == drawn and (drawn > draws) is not scored
    assert events and same(events, stated(ticket))
    # Seeded answers repeat. Targets change neither events nor the randomness of the proposal.
    plain = propose(name)
    assert same(events, stated(plain))
    again = charged(plain)
    assert torch.equal(answer.public, again.public)
    if scored:
        assert answer.tokens is None and answer.log_prob.dtype == torch.float64
    else:
        assert answer.tokens.dtype == torch.int64 and answer.tokens.shape == (12,)
        assert torch.equal(answer.tokens, again.tokens)
        assert bool(((answer.tokens >= 0) & (answer.tokens < VOCAB)).all())


@every
@pytest.mark.parametrize("last", ["charged", "failed"])
def test_a_charge_is_begun_once_and_ends_once(name: str, last: str) -> None:
    """Nobody else can read the costs, or have a second answer released for the same charge."""
    rng = CountingRandom(1)
    ticket = propose(name, rng=rng)
    draws = rng.draws

    def pay(events: Any, charges: Any) -> None:
        for again in (lambda: ticket.charge(pay), lambda: Accountant(1e-5).charge(ticket)):
            with pytest.raises(ValueError, match="must be charged once, .* is being charged"):
                again()
        for early in (ticket.release, lambda: ticket._distribution):
            with pytest.raises(ValueError, match="before its release .* it is being charged"):
                early()
        if last == "failed":
            raise KeyboardInterrupt

    if last == "charged":
        ticket.charge(pay)
        assert ticket.release().tokens is not None
    else:
        with pytest.raises(KeyboardInterrupt):
            ticket.charge(pay)
        with pytest.raises(ValueError, match="it is not charged .its charge failed"):
            ticket.release()
        assert rng.draws == draws
    with pytest.raises(ValueError, match="must be charged once, got one that is"):
        ticket.charge(lambda events, charges: None)


@every
def test_a_charge_is_written_replayed_and_refused_at_the_budget(name: str, tmp_path: Path) -> None:
    mechanism, path = MECHANISMS[name], tmp_path / "ledger.db"
    if mechanism.planned_queries is not None:
        mechanism = replace(mechanism, queries=20)  # type: ignore[call-arg]
    with Accountant(1e-5, path=path) as accountant:
        ticket = mechanism.propose(*logits(12), rng=SecureRandom())
        accountant.charge(ticket)
        read = read_ledger(path)
        assert read.guarantee == accountant.guarantee() and read.charges == 2
        found = read.guarantee.kind, read.guarantee.adjacency
        assert found == KINDS.get(name, ("fixed", "zero_out"))
        *_, last = read.records()
        assert same(last.events(), stated(ticket))
    with Accountant(1e-5, path=path) as accountant:
        late = mechanism.propose(*logits(12), rng=SecureRandom())
        if mechanism.planned_queries is None:
            accountant.charge(late)
            assert accountant.queries == read_ledger(path).account.queries == 24
            return
        with pytest.raises(BudgetSpentError, match="queries must stay within the 20 .* got 24"):
            accountant.charge(late)
        with pytest.raises(ValueError, match="it is not charged .its charge failed"):
            late.release()
        assert accountant.queries == 12 and accountant.charges == 2


@every
def test_rows_are_independent(name: str) -> None:
    """The answer and the costs of a position are the same without the rest of its batch."""
    private, public = logits(7)
    together = settled(MECHANISMS[name].propose(private, public, rng=SeededRandom(5)))
    for b in range(7):
        rng = SeededRandom(5)
        rng.skip_to(b if propose(name, rng=CountingRandom(5))._rng.draws else 0)
        row = settled(MECHANISMS[name].propose(private[:, b : b + 1], public[b : b + 1], rng=rng))
        mine, theirs = row._distribution, together._distribution
        assert torch.equal(mine.probabilities()[0], theirs.probabilities()[b])
        for cost in ("charges", "losses"):
            here, there = getattr(mine, cost), getattr(theirs, cost)
            assert here is None or torch.equal(here[:, 0], there[:, b])


@every
def test_bad_targets_raise_before_anything_is_proposed(name: str) -> None:
    for targets, message in (
        (torch.full((12,), VOCAB), r"targets must be tokens in \[0, 6\), got 6"),
        (torch.tensor([0] * 11 + [-1]), r"targets must be tokens in \[0, 6\), got -1"),
        (torch.zeros(11, dtype=torch.int64), r"targets must be torch.int64 of shape \(12,\)"),
        (torch.zeros(12, 1, dtype=torch.int64), r"targets must be torch.int64 of shape \(12,\)"),
        (torch.zeros(12, dtype=torch.int32), "targets must be torch.int64 .* got torch.int32"),
        ([0] * 12, "targets must be a torch.Tensor, got "),
    ):
        with pytest.raises(ValueError, match=message):
            propose(name, targets=targets)


def test_public_only_never_reads_the_private_values() -> None:
    nothing, accountant = torch.full((MODELS, 5, VOCAB), math.nan), Accountant(1e-5)
    ticket = PublicOnly().propose(nothing, logits(5)[1], rng=SeededRandom(0))
    accountant.charge(ticket)
    guarantee = accountant.guarantee()
    assert (guarantee.kind, guarantee.epsilon, guarantee.delta) == ("public", 0.0, 0.0)
    assert bool(ticket.release().public.all())


@every
@pytest.mark.parametrize("shape", [{}, {"top_k": 5}, {"temperature": 0.5}], ids=str)
def test_logits_changed_after_proposing_have_no_effect(name: str, shape: dict[str, Any]) -> None:
    """The charged distribution is that of the proposed values."""
    mechanism, settings = MECHANISMS[name], {"targets": torch.arange(3)} | shape
    expected = charged(mechanism.propose(*logits(3), rng=SeededRandom(0), **settings)).log_prob
    private, public = logits(3)
    together = torch.stack([*private, public])  # in one memory
    for rows in ((private, public), (together[:-1], together[-1])):
        ticket = mechanism.propose(*rows, rng=SeededRandom(0), **settings)
        for tensor in rows:
            tensor.mul_(-3.0)
        assert torch.equal(charged(ticket).log_prob, expected)


@every
def test_a_source_that_does_not_say_counts_as_seeded(name: str) -> None:
    silent = SimpleNamespace(reserve=SeededRandom(5).reserve)
    assert Caveat("seeded") in stated(propose(name, rng=silent))
    assert Caveat("seeded") not in stated(propose(name, rng=SecureRandom()))


def test_threads_can_neither_charge_nor_draw_twice() -> None:
    """A release either raises or returns the one answer, also during the charge."""
    for _ in range(50):
        rng, start = CountingRandom(3), threading.Barrier(4)
        ticket = propose("clipped-log-pool", rng=rng)
        accountants = Accountant(1e-5), Accountant(1e-5)

        def attempt(
            payer: Accountant | None, ticket: Ticket = ticket, start: threading.Barrier = start
        ) -> tuple[bool, Tensor | None]:
            start.wait(10)
            try:
                if payer is not None:
                    payer.charge(ticket)
                return True, ticket.release().tokens
            except ValueError:
                return False, None

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(attempt, (None, *accountants, None)))
        tokens = ticket.release().tokens
        assert [answer[0] for answer in answers[1:3]].count(True) == 1 and rng.draws == 1
        assert all(drawn is None or drawn is tokens for _, drawn in answers)
        assert sorted(accountant.queries for accountant in accountants) == [0, 12]


# Queries charged before their rows exist: as many are released as were charged, of one kind.

POOL = ClippedLogPool(-0.5, 0.5, 1.5, queries=100)
KNOWN = Origin("ab" * 32, ("names",))


def proposed(
    positions: int, mechanism: ClippedLogPool = POOL, origin: Origin = KNOWN, rng: Any = None
) -> Ticket:
    rows = shaped(*logits(positions))
    return mechanism.propose_rows(rows, rng=rng or SecureRandom(), origin=origin)


def prepaid(queries: int, origin: Origin = KNOWN) -> Allowance:
    allowance = Allowance(POOL, MODELS, origin)
    allowance.add(queries)
    return allowance


def test_a_charge_ahead_costs_what_its_answers_would(tmp_path: Path) -> None:
    ahead, after = Accountant(1e-5, path=tmp_path / "ledger"), Accountant(1e-5)
    count = prepaid(0)
    ahead.charge_ahead(count, 12)
    after.charge(proposed(12))
    assert ahead.guarantee() == after.guarantee()
    assert ahead.state()["counts"][0] == after.state()["counts"][0]
    ahead.charge_ahead(count, 5)
    assert (ahead.queries, ahead.charges) == (17, 3)  # the binding and two charges
    with pytest.raises(BudgetSpentError):
        ahead.charge_ahead(count, 84)
    assert ahead.queries == count.left == 17
    assert read_ledger(tmp_path / "ledger").account.queries == 17
    seeded = Accountant(1e-5)
    seeded.charge_ahead(Allowance(POOL, MODELS, KNOWN, seeded=True), 3)
    assert seeded.guarantee().caveats == ("seeded", "names")


def test_what_has_no_cost_in_advance_is_refused() -> None:
    for mechanism in MECHANISMS.values():
        if isinstance(mechanism, ClippedLogPool):
            continue
        with pytest.raises(ValueError, match="must be ClippedLogPool to be charged in advance"):
            Allowance(mechanism, MODELS)
    budgeted, plain = Accountant(1e-5, epsilon=4.0), Accountant(1e-5)
    for accountant, changes, words in (
        (budgeted, {"mechanism": replace(POOL, queries=None)}, "events"),
        (plain, {"mechanism": replace(POOL, public_confidence=0.5)}, "public_confidence"),
        (plain, {"num_models": 0}, "num_models"),
        (plain, {"queries": 0}, "queries"),
    ):
        before = accountant.state()
        arguments: Any = {"mechanism": POOL, "num_models": MODELS, "queries": 1} | changes
        queries = arguments.pop("queries")
        with pytest.raises(ValueError, match=f"{words} must be"):
            accountant.charge_ahead(Allowance(**arguments), queries)
        assert accountant.state() == before


def test_as_many_queries_are_released_as_were_charged() -> None:
    count = prepaid(0)
    with pytest.raises(BudgetSpentError, match="0 are, got 1"):
        count.charge(proposed(1))
    count.add(5)
    for positions, left in ((2, 3), (0, 3), (3, 0)):
        ticket = proposed(positions)
        count.charge(ticket)
        tokens = ticket.release().tokens
        assert tokens is not None and len(tokens) == positions and count.left == left
        for payer in (count, Accountant(1e-5)):
            with pytest.raises(ValueError, match="must be charged once"):
                payer.charge(ticket)
    late = proposed(4)
    count.add(3)
    with pytest.raises(BudgetSpentError, match="3 are, got 4"):
        count.charge(late)
    count.add(9)
    with pytest.raises(ValueError, match="its charge failed"):
        late.release()
    with pytest.raises(ValueError, match="must be charged once"):
        count.charge(late)
    assert count.left == 12


@pytest.mark.parametrize(
    "other",
    [
        {"mechanism": replace(POOL, scale=1.6)},
        {"mechanism": replace(POOL, queries=101)},
        {"origin": Origin("cd" * 32, ("names",))},
        {"origin": Origin(None, ("names",))},
        {"origin": replace(KNOWN, active_tokens=4)},
        # The ledger would otherwise state a guarantee without the assumption it rests on.
        {"rng": SeededRandom(0)},
        {"origin": Origin(KNOWN.ensemble, ("base", "names"))},
    ],
)
def test_another_mechanism_ensemble_or_caveat_is_not_paid_for(other: dict[str, Any]) -> None:
    count, ticket = prepaid(8), proposed(1, **other)
    with pytest.raises(ValueError, match="that were charged in advance"):
        count.charge(ticket)
    with pytest.raises(ValueError, match="its charge failed"):
        ticket.release()
    with pytest.raises(ValueError, match="that were charged in advance"):
        Allowance(POOL, MODELS + 1, KNOWN).charge(proposed(0))
    assert count.left == 8
    count.charge(proposed(1, origin=Origin(KNOWN.ensemble, ())))  # fewer caveats are covered
    assert count.left == 7


def test_threads_share_a_count() -> None:
    count, start = prepaid(50), threading.Barrier(4)

    def draw(_: int) -> int:
        start.wait()
        released = 0
        for _ in range(40):
            ticket = proposed(1)
            try:
                count.charge(ticket)
            except BudgetSpentError:
                continue
            ticket.release()
            released += 1
        return released

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(draw, range(4))) == 50
    assert count.left == 0
