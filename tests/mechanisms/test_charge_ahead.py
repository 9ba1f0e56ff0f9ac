"""Queries charged before their rows exist: as many are released as were charged, of one kind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from protocol_cases import MECHANISMS, MODELS, VOCAB, CountingRandom, logits

from adapmixed.mechanisms import Allowance, ClippedLogPool, Origin, Ticket, shaped
from adapmixed.privacy import Accountant, BudgetSpentError
from adapmixed.privacy.ledger import read_ledger
from adapmixed.rng import SecureRandom, SeededRandom

POOL = ClippedLogPool(-0.5, 0.5, 1.5, queries=100)
KNOWN = Origin("ab" * 32, ("names",))
OTHERS = [one for one in MECHANISMS.values() if not isinstance(one, ClippedLogPool)]


def proposed(
    positions: int, mechanism: ClippedLogPool = POOL, origin: Origin = KNOWN, rng: Any = None
) -> Ticket:
    rows = shaped(*logits(positions))
    return mechanism.propose_rows(rows, rng=rng or SecureRandom(), origin=origin)


def prepaid(queries: int, origin: Origin = KNOWN) -> Allowance:
    found = Allowance(POOL, MODELS, origin)
    found.add(queries)
    return found


def test_a_charge_ahead_costs_what_its_answers_would(tmp_path: Path) -> None:
    ahead, after = Accountant(1e-5, path=tmp_path / "ledger"), Accountant(1e-5)
    ahead.charge_ahead(POOL, MODELS, 12, KNOWN)
    after.charge(proposed(12))
    assert ahead.guarantee() == after.guarantee()
    assert ahead.state()["account"]["binding"] == after.state()["account"]["binding"]
    assert ahead.guarantee().caveats == ("names",)
    ahead.charge_ahead(POOL, MODELS, 5, KNOWN)
    assert (ahead.queries, ahead.charges) == (17, 3)  # the binding and two charges
    assert read_ledger(tmp_path / "ledger").account.queries == 17


@pytest.mark.parametrize("mechanism", OTHERS, ids=lambda one: repr(one)[:40])
def test_other_mechanisms_have_no_cost_in_advance(mechanism: Any) -> None:
    accountant = Accountant(1e-5)
    charged = lambda: accountant.charge_ahead(mechanism, MODELS, 1)  # noqa: E731
    for made in (charged, lambda: Allowance(mechanism, MODELS)):
        with pytest.raises(ValueError, match="must be ClippedLogPool to be charged in advance"):
            made()


def test_per_shard_budgets_are_not_charged_in_advance() -> None:
    accountant = Accountant(1e-5, epsilon=4.0)
    before = accountant.state()
    with pytest.raises(ValueError, match="epsilon must be None for queries that are charged in ad"):
        accountant.charge_ahead(replace(POOL, queries=None), MODELS, 3)
    assert accountant.state() == before


@pytest.mark.parametrize("bad", [{"num_models": 0}, {"queries": 0}, {"queries": 1.5}], ids=str)
def test_bad_numbers_are_not_charged(bad: dict[str, Any]) -> None:
    accountant = Accountant(1e-5)
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        accountant.charge_ahead(POOL, **{"num_models": MODELS, "queries": 1} | bad)
    assert accountant.state() == Accountant(1e-5).state()


def test_a_ledger_takes_no_seeded_charge_ahead(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rng must be SecureRandom\(\)"):
        Accountant(1e-5, path=tmp_path / "ledger").charge_ahead(POOL, MODELS, 3, KNOWN, seeded=True)
    accountant = Accountant(1e-5)
    accountant.charge_ahead(POOL, MODELS, 3, KNOWN, seeded=True)
    assert accountant.guarantee().caveats == ("seeded", "names")


def test_as_many_queries_are_released_as_were_charged() -> None:
    count = prepaid(0)
    with pytest.raises(BudgetSpentError, match="0 are, got 1"):
        count.charge(proposed(1))
    count.add(5)
    for positions, left in ((2, 3), (0, 3), (3, 0)):
        proposal = proposed(positions)
        count.charge(proposal)
        tokens = proposal.release().tokens
        assert tokens is not None and len(tokens) == positions
        assert bool(((tokens >= 0) & (tokens < VOCAB)).all()) and count.left == left
    with pytest.raises(BudgetSpentError):
        count.charge(proposed(1))


def test_a_refused_proposal_is_never_released_and_costs_nothing() -> None:
    count, rng = prepaid(3), CountingRandom(1)
    proposal = proposed(4)
    with pytest.raises(BudgetSpentError, match="3 are, got 4"):
        count.charge(proposal)
    with pytest.raises(ValueError, match="its charge failed"):
        proposal.release()
    count.add(9)
    with pytest.raises(ValueError, match="must be charged once"):
        count.charge(proposal)
    assert count.left == 12 and rng.draws == 0


def test_a_proposal_is_paid_for_once() -> None:
    count, proposal = prepaid(8), proposed(4)
    count.charge(proposal)
    with pytest.raises(ValueError, match="must be charged once"):
        count.charge(proposal)
    with pytest.raises(ValueError, match="must be charged once"):
        Accountant(1e-5).charge(proposal)
    assert count.left == 4


@pytest.mark.parametrize(
    "other",
    [
        {"mechanism": replace(POOL, scale=1.6)},
        {"mechanism": replace(POOL, queries=101)},
        {"mechanism": replace(POOL, queries=None)},
        {"origin": Origin("cd" * 32, ("names",))},
        {"origin": Origin(None, ("names",))},
    ],
)
def test_another_mechanism_or_ensemble_is_not_paid_for(other: dict[str, Any]) -> None:
    count, proposal = prepaid(8), proposed(1, **other)
    with pytest.raises(ValueError, match="that were charged in advance"):
        count.charge(proposal)
    with pytest.raises(ValueError, match="its charge failed"):
        proposal.release()
    with pytest.raises(ValueError, match="that were charged in advance"):
        Allowance(POOL, MODELS + 1, KNOWN).charge(proposed(0))
    assert count.left == 8


def test_a_caveat_must_have_been_charged() -> None:
    """The ledger would otherwise state a guarantee without the assumption it rests on."""
    count = prepaid(8)
    with pytest.raises(ValueError, match=r"no caveat .* got \['seeded'\]"):
        count.charge(proposed(1, rng=SeededRandom(0)))
    with pytest.raises(ValueError, match=r"no caveat .* got \['base'\]"):
        count.charge(proposed(1, origin=Origin(KNOWN.ensemble, ("base", "names"))))
    count.charge(proposed(1, origin=Origin(KNOWN.ensemble, ())))
    assert count.left == 7


def test_threads_share_a_count() -> None:
    count, start = prepaid(50), threading.Barrier(4)

    def draw() -> int:
        start.wait()
        released = 0
        for _ in range(40):
            proposal = proposed(1)
            try:
                count.charge(proposal)
            except BudgetSpentError:
                continue
            proposal.release()
            released += 1
        return released

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda _: draw(), range(4))) == 50
    assert count.left == 0
