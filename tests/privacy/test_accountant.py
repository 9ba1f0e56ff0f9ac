"""An accountant is charged for one mechanism, one ensemble and N, by one process, once a ticket."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from privacy_cases import DELTA
from processes import ended

from adapmixed import (
    Accountant,
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    PMixED,
    PublicOnly,
    Unprotected,
)
from adapmixed.errors import BudgetSpentError
from adapmixed.mechanisms import Mechanism, Ticket
from adapmixed.privacy import (
    Caveat,
    Event,
    GaussianScreening,
    PublicAnswer,
    read_ledger,
)
from adapmixed.privacy.events import to_json
from adapmixed.rng import SecureRandom, SeededRandom

POOL, BOX = ClippedLogPool(-1.0, 1.0), ClippedMixing(0.5, 4.0, queries=10)


def proposed(
    mechanism: Mechanism, models: int = 3, positions: int = 1, seed: int = 0, rng: Any = None
) -> Ticket:
    """Return a ticket over a few random logits."""
    generator = torch.Generator().manual_seed(seed)
    private = 3 * torch.randn(models, positions, 8, generator=generator)
    public = torch.randn(positions, 8, generator=generator)
    return mechanism.propose(private, public, rng=rng or SecureRandom())


def test_a_ticket_shows_public_constants_alone() -> None:
    """Private attributes hold the bits of the screening and the costs."""
    ticket = proposed(AdaPMixED(18.0, 0.2))
    shown = {name for name in vars(ticket) if not name.startswith("_")}
    assert shown == {"mechanism", "num_models", "origin"}
    assert {name for name in dir(ticket) if not name.startswith("_")} == shown | {
        "charge",
        "release",
    }


def test_a_forked_child_spends_nothing() -> None:
    accountant, waiting = Accountant(DELTA), proposed(BOX)

    def work() -> None:
        for use in (
            lambda: accountant.charge(waiting),
            lambda: accountant.charge_ahead(POOL, 3, 1),
            lambda: accountant.add(PublicAnswer(1)),
            lambda: accountant.bind(PublicOnly(), 3),
        ):
            with pytest.raises(ValueError, match="in the process that made it"):
                use()

    assert ended(work) == 0
    accountant.charge(waiting)
    assert accountant.queries == 1


def test_public_answers_cost_nothing_under_a_budget_of_every_shard(tmp_path: Path) -> None:
    with Accountant(DELTA, epsilon=2.0, path=tmp_path / "ledger") as accountant:
        for count in (1, 2):
            ticket = proposed(PublicOnly())
            accountant.charge(ticket)
            assert ticket.release().tokens.shape == (1,) and accountant.queries == count
        assert accountant.guarantee().epsilon == 0 and not accountant.spent.any()


def test_what_raises_writes_nothing(tmp_path: Path) -> None:
    """Neither the failed charge is written nor the binding that would come before it."""
    path = tmp_path / "ledger.db"
    with Accountant(DELTA, path=path) as accountant:
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        spent, seeds = BudgetSpentError, r"rng must be SecureRandom\(\) if charges go to a ledger"
        for wrong, kind, words in (
            (proposed(BOX, positions=11), spent, "queries must stay within the 10"),
            (proposed(replace(POOL, queries=2), 3, 3), spent, "queries must stay within the 2"),
            (
                proposed(replace(BOX, queries=None)),
                ValueError,
                "queries must be given to ClippedMix",
            ),
            (proposed(BOX, rng=SeededRandom(1)), ValueError, seeds),
        ):
            with pytest.raises(kind, match=words):
                accountant.charge(wrong)
            with pytest.raises(ValueError, match="it is not charged"):
                wrong.release()
        for use in (
            lambda: accountant.add([Caveat("seeded")]),
            lambda: accountant.charge_ahead(POOL, 3, 1, seeded=True),
        ):
            with pytest.raises(ValueError, match=seeds):
                use()
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
        assert accountant.charges == 0 and accountant.state()["counts"] == []
        accountant.charge(proposed(BOX))
    assert read_ledger(path).charges == 2  # the binding and the charge
    in_memory = Accountant(DELTA)
    in_memory.charge(proposed(BOX, rng=SeededRandom(1)))
    assert "seeded" in in_memory.guarantee().caveats


def test_a_ledger_remembers_whom_it_protects(tmp_path: Path) -> None:
    for unit, words in (("user", "everything of one 'user'"), (None, "one whole shard")):
        path = tmp_path / f"{unit}.db"
        with Accountant(DELTA, path=path) as accountant:
            accountant.bind(POOL, 3, "these members", None, unit)
            with pytest.raises(ValueError, match="unit='another'.* needs an accountant of its own"):
                accountant.bind(POOL, 3, "these members", None, "another")
        read = read_ledger(path)
        assert words in str(read.guarantee)
        assert json.loads(list(read.records())[1].text)["events"][0]["unit"] == unit
        assert Accountant.from_state(to_json(read.account)).guarantee() == read.guarantee


def test_an_accountant_is_bound_to_one_mechanism_ensemble_and_n(tmp_path: Path) -> None:
    """Also after its ledger was opened again, or its state was read."""
    path = tmp_path / "ledger.db"
    accountant = Accountant(DELTA, path=path)
    for same in (BOX.upper, np.float64(BOX.upper), int(BOX.upper)):  # numbers of another type
        accountant.bind(replace(BOX, upper=same), 3, "these members", 7)
    bound: list[Any] = [BOX, 3, "these members", 7]
    others = POOL, replace(BOX, queries=11), replace(BOX, upper=BOX.upper + 1)
    wrong = [*((0, one) for one in others), (1, 4), (2, "others"), (2, None), (3, 8)]

    def refuses(one: Accountant) -> None:
        before = one.state()
        for at, value in wrong:
            with pytest.raises(ValueError, match="charged for what it is bound to") as caught:
                one.bind(*bound[:at], value, *bound[at + 1 :])
            assert "these members" not in str(caught.value)  # a digest of the members
        with pytest.raises(ValueError, match="accountant must be charged for what it is bound to"):
            one.charge(proposed(BOX))
        with pytest.raises(ValueError, match="must not be bound to a mechanism to take events"):
            one.add(PublicAnswer(1))
        one.bind(*bound)
        assert one.state() == before

    refuses(accountant)
    refuses(Accountant.from_state(accountant.state()))
    assert accountant.charges == 1 and accountant.durable
    accountant.close()
    with Accountant(DELTA, path=path) as again:
        refuses(again)
        assert again.charges == read_ledger(path).charges == 1


@pytest.mark.parametrize(
    "event", [PublicAnswer(1), GaussianScreening(3, 1, 0.5, 1.0), Caveat("shards")]
)
def test_an_accountant_takes_events_or_tickets(event: Event) -> None:
    accountant, late = Accountant(DELTA).add(event), proposed(BOX)
    before = accountant.queries
    with pytest.raises(ValueError, match="must have charged nothing before it is bound"):
        accountant.charge(late)
    with pytest.raises(ValueError, match="it is not charged"):
        late.release()
    assert accountant.queries == before


@pytest.mark.parametrize(
    ("mechanism", "settings", "words"),
    [
        (PMixED(2.0, DELTA, 10, 18.0), {"epsilon": 2.0}, "its charge is the same for every member"),
        (AdaPMixED(18.0, 0.2), {"epsilon": 2.0}, "its losses depend on the other members"),
        (
            AdaPMixED(18.0, 0.2, None),
            {"epsilon": 2.0},
            "epsilon must be None for AdaPMixED, got 2.0",
        ),
        (Unprotected(), {"epsilon": 2.0}, "it has no bound that could be charged"),
        (BOX, {"epsilon": 2.0}, "its charges need an order"),
        (replace(POOL, queries=10), {"epsilon": 2.0}, "queries must be None if .* got 10: any num"),
        (replace(BOX, queries=None), {}, "queries must be given to ClippedMixing"),
        (
            AdaPMixED(18.0, 0.2),
            {"adjacency": "replace_one"},
            "adjacency must be 'zero_out' for Ada",
        ),
        (PMixED(2.0, 1e-6, 10, 18.0), {}, "delta must be the mechanism's own, 1e-06"),
    ],
)
def test_mechanisms_without_a_guarantee_under_the_settings(
    mechanism: Mechanism, settings: dict[str, Any], words: str
) -> None:
    accountant, ticket = Accountant(DELTA, **settings), proposed(mechanism)
    for use in (lambda: accountant.bind(mechanism, 3), lambda: accountant.charge(ticket)):
        with pytest.raises(ValueError, match=words):
            use()
    with pytest.raises(ValueError, match="it is not charged"):
        ticket.release()
    assert accountant.queries == 0
