"""Careless uses of accountants and proposals: each raises, or pays for one answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_cases import ends
from proposal_cases import BOX, DELTA, POOL, proposed

from adapmixed import Accountant, AdaPMixED, ClippedLogPool, ClippedMixing, PublicOnly
from adapmixed.errors import BudgetSpentError
from adapmixed.privacy import PublicAnswer, read_ledger
from adapmixed.rng import SeededRandom


def test_a_proposal_shows_public_constants_alone() -> None:
    """Private attributes hold the bits of the screening and the costs."""
    proposal = proposed(AdaPMixED(18.0, 0.2))
    shown = {name: value for name, value in vars(proposal).items() if not name.startswith("_")}
    assert set(shown) == {"mechanism", "num_models", "origin"}
    public = {name for name in dir(proposal) if not name.startswith("_")}
    assert public == {*shown, "charge", "release"}


def test_a_forked_child_spends_nothing() -> None:
    with Accountant(DELTA) as accountant:
        waiting = proposed(BOX)

        def work() -> None:
            for ask in (
                lambda: accountant.charge(waiting),
                lambda: accountant.charge_ahead(POOL, 3, 1),
                lambda: accountant.add(PublicAnswer(1)),
                lambda: accountant.bind(PublicOnly(), 3),
            ):
                with pytest.raises(ValueError, match="in the process that made it"):
                    ask()

        assert ends(work) == 0
        accountant.charge(waiting)
        assert accountant.queries == 1


def test_a_seeded_source_never_charges_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Accountant(DELTA, path=path) as accountant:
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        seeded = proposed(BOX, rng=SeededRandom(1))
        with pytest.raises(ValueError, match=r"rng must be SecureRandom\(\) if charges go to a"):
            accountant.charge(seeded)
        with pytest.raises(ValueError, match="it is not charged"):
            seeded.release()
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
        assert accountant.charges == 0 and accountant.state()["account"]["binding"] is None
        accountant.charge(proposed(BOX))
    in_memory = Accountant(DELTA)
    in_memory.charge(proposed(BOX, rng=SeededRandom(1)))
    assert "seeded" in in_memory.guarantee().caveats
    assert "no privacy guarantee" in str(in_memory.guarantee())


def test_what_raises_writes_nothing(tmp_path: Path) -> None:
    """Neither the failed charge is written nor the binding that would come before it."""
    path = tmp_path / "ledger.db"
    with Accountant(DELTA, path=path) as accountant:
        for wrong in (
            proposed(BOX, positions=11),
            proposed(ClippedLogPool(-1.0, 1.0, queries=2), 3, 3),
        ):
            with pytest.raises(BudgetSpentError):
                accountant.charge(wrong)
        with pytest.raises(ValueError, match="queries must be given to ClippedMixing"):
            accountant.charge(proposed(ClippedMixing(0.5, 4.0)))
        assert accountant.charges == 0
    assert read_ledger(path).charges == 0
