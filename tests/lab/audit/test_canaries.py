"""Planted secrets: the trained adapters, what the attacks see, and that a leak is found."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Unprotected
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit import canaries
from adapmixed_lab.audit.canaries import (
    CUSTOMERS,
    SAID_AS,
    SECRETS,
    Audit,
    Planted,
    flight_dialogue,
    game,
    likelihoods,
    planted,
    train,
)
from adapmixed_lab.audit.search import chi_square, chi_square_limit
from adapmixed_lab.audit.tokens import TINY

BOX = ClippedMixing(0.8, 1.5, queries=1)


@pytest.fixture
def extreme(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    """Yield members that are sure of three tokens each, of SECRETS equally likely under q."""
    public = torch.zeros(SECRETS)
    private = 20 * sum(torch.eye(SECRETS).roll(shift, 1) for shift in range(3))
    members = Planted(private, public)
    monkeypatch.setattr(canaries, "planted", lambda: members)
    yield members


def test_a_booking_number_changes_nothing_but_itself() -> None:
    here, there = (flight_dialogue("customer 3", number) for number in ("38170", "38179"))
    assert here.identifier == there.identifier == "customer 3"
    assert here.text.replace(SAID_AS + "38170", SAID_AS + "38179") == there.text != here.text
    assert here == flight_dialogue("customer 3", "38170")
    texts = {flight_dialogue(f"customer {i}", "38170").text for i in range(50)}
    assert len(texts) == 50


@pytest.mark.slow
def test_an_adapter_depends_on_its_own_shard_alone_and_remembers_its_secret() -> None:
    members = planted()
    single = train([6])
    assert torch.equal(single.private[0], members.private[6])
    assert torch.equal(single.public, members.public)
    assert members.private.shape == (SECRETS, len(members.public))
    # Its likeliest token beside the public row's is one that no other adapter prefers so.
    preferred = (members.private.softmax(1) / members.public.softmax(0)).argmax(1)
    assert len(set(preferred.tolist())) > SECRETS // 2


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_turning_a_coin_changes_one_member(adjacency: str, extreme: Planted) -> None:
    audit = Audit(game(BOX, adjacency, TINY), 1)
    (worlds, _), outcomes = audit.worlds(extreme), audit.outcomes()
    assert len({tuple(coins) for coins in outcomes}) == 2**CUSTOMERS
    for here, coins in enumerate(outcomes):
        for shard in range(CUSTOMERS):
            member = worlds[shard, here]
            other = extreme.private[shard + CUSTOMERS]
            tails = extreme.public if adjacency == "zero_out" else other
            assert torch.equal(member, extreme.private[shard] if coins[shard] else tails)


def test_answers_are_those_of_the_run_s_world() -> None:
    private = torch.tensor([[[3.0, 0.0, 0.0], [0.0, 0.0, 3.0]]])
    worlds = private, torch.zeros(3)
    world = np.array([0, 1] * 1000)
    seen = canaries.answers(Unprotected(), worlds, world, 5, SeededRandom(1))
    assert (seen.sum(1) == 5).all()
    for index, shares in enumerate(canaries.laws(Unprotected(), worlds)):
        counts = seen[world == index].sum(0).tolist()
        statistic, freedom = chi_square(counts, shares.tolist())
        assert statistic < chi_square_limit(freedom)


def test_guesses_are_those_of_the_likelihood() -> None:
    """The odds of one run agree with Bayes' rule written out."""
    audit = Audit(game(BOX, "zero_out", TINY), 3)
    generator = np.random.default_rng(3)
    shares = generator.dirichlet(np.ones(4), 2**CUSTOMERS)
    seen = generator.multinomial(3, shares[7])[None]
    posterior = np.prod(shares**seen, axis=1)
    np.testing.assert_allclose(np.exp(likelihoods(shares, seen))[0], posterior, rtol=1e-12)
    heads = np.array([posterior[side].sum() for side in audit.outcomes().T]) / posterior.sum()
    np.testing.assert_allclose(audit.odds(shares, seen)[0], np.log(heads / (1 - heads)), atol=1e-12)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize(
    ("stated", "running"),
    [
        (BOX, ClippedMixing(0.5, 3.0, queries=1)),
        (ClippedLogPool(-0.2, 0.4, queries=1), ClippedLogPool(-0.2, 0.4, 3.0, queries=1)),
    ],
)
@pytest.mark.slow
def test_more_than_is_stated_is_broken(
    stated: ClippedMixing, running: ClippedMixing, adjacency: str, extreme: Planted
) -> None:
    def measured(audit: Audit) -> float:
        return audit.measure(30_000, np.random.default_rng(5), SeededRandom(5))

    honest = Audit(game(stated, adjacency, TINY), 1)
    broken = Audit(game(stated, adjacency, TINY, running), 1)
    claimed = honest.game.claimed()
    assert 0.3 * claimed < measured(honest) <= claimed < measured(broken)
