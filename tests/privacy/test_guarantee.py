"""Guarantees: their sentences, the display of ε, errors and caveats."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from privacy_cases import DELTA, bound, random_losses

from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Guarantee,
    IndividualCharge,
    PublicAnswer,
    UnprotectedAnswer,
)
from adapmixed.privacy.accountant import Account
from adapmixed.privacy.composition import ShardBudget
from adapmixed.privacy.events import CAVEATS, Binding
from adapmixed.privacy.guarantee import sum_of
from adapmixed.rng import SeededRandom


def test_sentences_say_what_is_promised_and_what_is_not():
    realised = str(Accountant(DELTA).add(random_losses(4)).guarantee())
    for words in (
        "δ = 1e-05",
        "one whole shard",
        "zero-out",
        "Rényi order 18",
        "40 answered queries",
        "data-dependent and ex-post",
        "depends on the private data and must not be published",
        "not (ε, δ)-DP with a constant ε",
        "covers the removal of a member, not the addition",
    ):
        assert words in realised
    assert "replace-one" not in realised  # the statement about records needs a constant ε
    fixed = str(Accountant(DELTA).add(bound()).guarantee())
    exact = "for tokens drawn from the exact mixture"
    assert exact in fixed and exact in realised
    pool = Accountant(DELTA).add(BoundedRangeAnswer(1.0, -1.0, 1.0, 10, 5)).guarantee()
    assert pool.kind == "fixed" and exact not in str(pool)  # its rounding is charged
    assert "zero-out" in fixed and "fixed in advance" in fixed
    split = str(Accountant(DELTA).add(random_losses(4, orders=(2.0, 18.0))).guarantee())
    assert "δ split over the Rényi orders 2, 18" in split
    published = str(Accountant(DELTA).add(bound(published=True)).guarantee())
    assert "known to be invalid" in published and "no privacy guarantee follows" in published
    nothing = str(Accountant(DELTA).add(UnprotectedAnswer(2)).guarantee())
    assert "no privacy guarantee" in nothing and "ε =" not in nothing
    public = str(Accountant(DELTA).add(PublicAnswer(1)).guarantee())
    assert "ε = 0, δ = 0" in public and "1 answered query" in public


def test_answers_of_a_bounded_range_state_replace_one_at_the_same_delta():
    """The clause is what an accountant of replace-one states, for a plan and for a budget."""
    plan = BoundedRangeAnswer(2.0, -0.25, 1.0, 64, 508, 508)
    guarantee = Accountant(DELTA).add(plan).guarantee()
    replaced = Accountant(DELTA, adjacency="replace_one").add(plan).guarantee()
    assert guarantee.replaced == replaced.epsilon and replaced.replaced is None
    assert "(replace-one) is covered with ε = 3.792 at δ = 1e-05." in str(guarantee)

    mechanism = ClippedLogPool(-0.25, 1.0, 2.0)
    accountant = Accountant(DELTA, epsilon=2.0)
    rows = torch.zeros(4, 1, 3)
    accountant.charge(mechanism.propose(rows, rows[0], rng=SeededRandom(0)))
    budget = ShardBudget.for_epsilon(2.0, DELTA, None, largest=mechanism.largest_charge(4))
    guarantee = accountant.guarantee()
    assert guarantee.replaced == budget.epsilon(DELTA, "replace_one") > 2 * guarantee.epsilon

    for other in (ClippedAnswer(0.9, 1.1, 4, 5, 5), bound()):
        assert Accountant(DELTA).add(other).guarantee().replaced is None
    with pytest.raises(ValueError, match="replaced must be"):
        replace(guarantee, replaced=-1.0)


CHANGED = "inside one shard (replace-one) is"


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [
        (0.92400001, "ε = 0.9241 at"),
        (0.875, "ε = 0.875 at"),
        (12345.1, "ε = 12350 at"),
        (0.0, "ε = 0 at"),
        # (2ε, (1 + e^ε) δ), and nothing if that is no statement.
        (1.882, f"{CHANGED} covered with ε = 3.764 at δ = 7.6e-05."),
        (1.875, f"{CHANGED} covered with ε = 3.75 at δ = 7.6e-05."),  # of 7.5208e-05
        (0.0, f"{CHANGED} covered with ε = 0 at δ = 2e-05."),
        (11.5, f"{CHANGED} covered with ε = 23 at δ = 0.99."),
        (11.6, f"{CHANGED} not covered by this statement; adjacency='replace_one' states its own"),
        (math.inf, f"{CHANGED} not covered by this statement."),
    ],
)
def test_displayed_epsilon_is_rounded_up(epsilon, words):
    assert words in str(Guarantee(epsilon, DELTA, "fixed", "zero_out", "renyi", 3.0))


@pytest.mark.parametrize(
    ("epsilon", "delta", "words"),
    [
        (10.0, 1e-3, ()),
        (10.1, 1e-3, ("ε above 10",)),
        (1.0, 0.5, ("δ above 0.001",)),
        (4426.0, 0.5, ("ε above 10", "δ above 0.001")),
        (math.inf, 1e-5, ("ε above 10",)),
    ],
)
def test_a_weak_guarantee_warns(epsilon, delta, words):
    guarantee = Guarantee(epsilon, delta, "fixed", "zero_out", "renyi", 3.0, caveats=("base",))
    assert len(guarantee.warnings) == len(words) + 1  # and the caveat
    for word, warning in zip(words, guarantee.warnings, strict=False):
        assert f"Warning, a weak guarantee: {word}" in warning and warning in str(guarantee)
    assert math.exp(10) > 22_000


def test_no_warning_depends_on_a_private_epsilon():
    """Warnings of a data-dependent guarantee are printed, its ε is not."""
    for epsilon in (1.0, 4426.0):
        assert not Guarantee(epsilon, 0.5, "data-dependent, ex-post", "zero_out").warnings


def test_every_caveat_has_its_sentence():
    for name in CAVEATS:
        accountant = Accountant(DELTA).add([bound(), Caveat(name)])
        guarantee = accountant.guarantee()
        assert guarantee.caveats == (name,) and guarantee.warnings[0] in str(guarantee)
        assert str(guarantee).endswith(guarantee.warnings[0])
    every = Accountant(DELTA).add([bound(), *map(Caveat, reversed(CAVEATS)), Caveat("base")])
    assert every.guarantee().caveats == tuple(CAVEATS)
    assert len(set(every.guarantee().warnings)) == len(CAVEATS)


def test_a_unit_of_ones_own_is_named_wherever_the_shard_was():
    plan = BoundedRangeAnswer(2.0, 0.0, 1.0, 20, 1, budget=16)
    individual = IndividualCharge(None, np.full((20, 1), 1e-6))
    user, text = "'user'", "reference text"
    for way, unit, words in (
        ("zero_out", user, "private for everything of one 'user' with ε"),
        ("zero_out", user, "all text of one 'user' is removed and its member answers the public"),
        ("zero_out", user, "Any change of the records of one 'user' (replace-one) is covered"),
        ("replace_one", user, "neighbouring: any change of the records of one 'user' (replace"),
        ("zero_out", text, "private for one whole reference text with ε"),
        ("zero_out", text, "one reference text is emptied and its member answers the public"),
        ("zero_out", text, "Any change of one reference text (replace-one) is covered"),
        ("replace_one", text, "neighbouring: any change of one reference text (replace-one)"),
    ):
        for epsilon, event in ((None, plan), (1.0, individual)):
            stated = Accountant(DELTA, epsilon=epsilon, adjacency=way).add(event).guarantee()
            named = str(replace(stated, unit=unit))
            assert words in named and "shard" in str(stated) and "shard" not in named
            assert replace(stated, unit="shard") == stated
    with pytest.raises(ValueError, match="unit must be the name of one protected unit, got ''"):
        replace(stated, unit="")


def test_a_sum_is_about_a_shard_unless_all_parts_are_about_one_unit() -> None:
    def account(unit: str | None) -> Account:
        binding = Binding("pool", 4, None, None, None, None, unit)
        answer = BoundedRangeAnswer(1.0, -1.0, 1.0, 4, 1, 10)
        return Account(1e-5, None, "zero_out").added([binding, answer])

    user, shard, lost = account("user"), account(None), Guarantee(1.0, 1e-5, "fixed", "zero_out")
    assert sum_of([user, user], [])[0].unit == "'user'"
    assert sum_of([user, shard], [])[0].unit == sum_of([user], [lost])[0].unit == "shard"
