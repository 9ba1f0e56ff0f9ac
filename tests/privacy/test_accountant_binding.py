"""An accountant can be charged for one mechanism, one ensemble, one N and one budget."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from proposal_cases import BOX, DELTA, POOL, proposed

from adapmixed import (
    Accountant,
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    PMixED,
    Unprotected,
)
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import (
    Caveat,
    ClippedAnswer,
    Event,
    GaussianScreening,
    PublicAnswer,
    read_ledger,
)
from adapmixed.privacy.ledger import Record


@pytest.mark.parametrize("durable", [False, True])
def test_two_holders_of_one_accountant_spend_one_budget(durable: bool, tmp_path: Path) -> None:
    """Two interleaved generators share one budget: what one spends, the other cannot."""
    pool, epsilon = ClippedLogPool(-1.0, 1.0, scale=0.1), 0.5
    trial = Accountant(DELTA, epsilon=1.0)
    trial.charge(proposed(pool))
    path = tmp_path / "ledger.db" if durable else None
    with Accountant(DELTA, epsilon=epsilon, path=path) as shared:
        shared.bind(pool, 3)
        fit = math.floor(shared.limit / trial.spent.max())
        assert 3 <= fit <= 30
        whole = 0
        for _ in range(fit):
            for _holder in ("first", "second"):
                proposal = proposed(pool)
                shared.charge(proposal)
                assert proposal.release().tokens is not None
                assert proposal._active is not None
                whole += bool(proposal._active.all())
        assert whole == fit and shared.queries == 2 * fit
        assert (shared.spent <= shared.limit).all()
        assert shared.guarantee().epsilon is not None and shared.guarantee().epsilon <= epsilon
        spent = shared.spent
    if path is not None:
        assert read_ledger(path).account.spent.tolist() == spent.tolist()  # type: ignore


def test_a_ledger_remembers_whom_it_protects(tmp_path: Path) -> None:
    for unit, words in (("user", "everything of one 'user'"), (None, "one whole shard")):
        path = tmp_path / f"{unit}.db"
        with Accountant(DELTA, path=path) as accountant:
            accountant.bind(POOL, 3, "these members", None, unit)
            with pytest.raises(ValueError, match="'unit': .* needs an accountant of its own"):
                accountant.bind(POOL, 3, "these members", None, "another")
        records: list[Record] = []
        read = read_ledger(path, seen=records.append)
        assert words in str(read.guarantee)
        assert json.loads(records[0].text)["binding"]["unit"] == unit
        assert Accountant.from_state(read.account.state()).guarantee() == read.guarantee


@pytest.mark.parametrize("durable", [False, True])
def test_an_accountant_is_bound_to_one_mechanism_ensemble_and_n(
    durable: bool, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.db" if durable else None
    accountant = Accountant(DELTA, path=path)
    accountant.bind(BOX, 3, "these members")
    accountant.bind(BOX, 3, "these members")
    for same in (np.float64(BOX.upper), int(BOX.upper)):  # numbers of another type
        accountant.bind(replace(BOX, upper=same), 3, "these members")
    wrong = [(POOL, 3, "these members"), (BOX, 4, "these members"), (BOX, 3, "others"),
             (BOX, 3, None), (ClippedMixing(0.5, 4.0, queries=11), 3, "these members")]  # fmt: skip

    def refuses(one: Accountant) -> None:
        before = one.state()
        for binding in wrong:
            with pytest.raises(ValueError, match="accountant must be charged for what it is bound"):
                one.bind(*binding)
        for unknown in (proposed(BOX), proposed(BOX, models=4)):
            with pytest.raises(ValueError, match="accountant must be charged for what it is bound"):
                one.charge(unknown)
        with pytest.raises(ValueError, match="must not be bound to a mechanism to take events"):
            one.add(PublicAnswer(1))
        assert one.state() == before

    refuses(accountant)
    if path is None:
        return
    assert accountant.charges == 1 and accountant.durable
    accountant.close()
    with Accountant(DELTA, path=path) as again:
        refuses(again)
        again.bind(BOX, 3, "these members")
        assert again.charges == 1
    assert read_ledger(path).charges == 1


@pytest.mark.parametrize(
    "event", [PublicAnswer(1), GaussianScreening(3, 1, 0.5, 1.0), Caveat("shards")]
)
def test_an_accountant_takes_events_or_proposals(event: Event) -> None:
    accountant = Accountant(DELTA).add(event)
    before = accountant.queries
    late = proposed(BOX)
    with pytest.raises(ValueError, match="must have charged nothing before it is bound"):
        accountant.charge(late)
    with pytest.raises(ValueError, match="it is not charged"):
        late.release()
    assert accountant.queries == before


@pytest.mark.parametrize(
    ("mechanism", "words"),
    [
        (PMixED(2.0, DELTA, 10, 18.0), "its charge is the same for every member"),
        (AdaPMixED(18.0, 0.2), "its losses depend on the other members"),
        (Unprotected(), "it has no bound that could be charged"),
        (ClippedMixing(0.5, 4.0), "its charges need an order"),
        (BOX, "its charges need an order"),
        (ClippedLogPool(-1.0, 1.0, queries=10), "any number of queries keeps it"),
    ],
)
def test_what_a_budget_of_every_shard_cannot_carry(mechanism: Mechanism, words: str) -> None:
    accountant, proposal = Accountant(DELTA, epsilon=2.0), proposed(mechanism)
    for use in (lambda: accountant.bind(mechanism, 3), lambda: accountant.charge(proposal)):
        with pytest.raises(ValueError, match=words):
            use()
    with pytest.raises(ValueError, match="it is not charged"):
        proposal.release()


def attained(lower: float, upper: float, models: int) -> list[tuple[float, float]]:
    """Return (P, Q) of all N members, and of those with member 0 missing, which answers q.

    There are three tokens. Every member is at a corner of the box at each, with mean 1 under q.
    """
    mass = (1 - lower) / (upper - lower)  # of q; at most 1/2
    others = models - 1
    corners = [
        (mass, upper, others * lower),
        (1 - 2 * mass, lower, others * lower),
        (mass, lower, others * upper),
    ]
    return [(w * (rest + own) / models, w * (rest + 1) / models) for w, own, rest in corners]


def largest_delta(pairs: list[tuple[float, float]], queries: int, epsilon: float) -> float:
    """Return δ of so many answers at this ε, the larger of both ways, over all outcomes."""
    found = [0.0, 0.0]
    for draws in itertools.product(pairs, repeat=queries):
        p, q = (math.prod(pair[way] for pair in draws) for way in (0, 1))
        found[0] += max(0.0, p - math.exp(epsilon) * q)
        found[1] += max(0.0, q - math.exp(epsilon) * p)
    return max(found)


LARGER = [pytest.param(models, marks=pytest.mark.slow) for models in (2, 3, 10)]


@pytest.mark.parametrize("models", [1, *LARGER])
@pytest.mark.parametrize("box", [(0.5, 2.0), (0.8, 8.0)])
def test_a_missing_member_is_covered_whatever_n_is(box: tuple[float, float], models: int) -> None:
    """N is a public constant, so a member that is removed or added changes no other's share.

    With N = 1, the neighbour is q itself. Another N is another binding, not a neighbour.
    """
    pairs = attained(*box, models)
    assert [math.fsum(distribution) for distribution in zip(*pairs, strict=True)] == pytest.approx(
        [1.0, 1.0]
    )
    for queries in (1, 3, 6):
        accountant = Accountant(DELTA).add(ClippedAnswer(*box, models, 1, budget=queries))
        for question in ("add_remove", "remove"):
            with pytest.raises(ValueError, match="adjacency must be one of"):
                accountant.guarantee(question)
        epsilon = accountant.guarantee().epsilon
        assert epsilon is not None and largest_delta(pairs, queries, epsilon) <= DELTA
        if models == 1:  # the pair is attained: the assertion above could fail
            assert largest_delta(pairs, queries, 0.9 * epsilon) > DELTA
    bound, mechanism = Accountant(DELTA), ClippedMixing(*box, queries=3)
    bound.bind(mechanism, models)
    for other in {models - 1, models + 1} - {0}:
        with pytest.raises(ValueError, match="what it is bound to, {'num_models': "):
            bound.charge(proposed(mechanism, other))
