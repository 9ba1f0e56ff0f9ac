"""Guarantees: their sentences, how ε is shown, what is refused, what drawing adds to δ."""

import math
from dataclasses import replace

import mpmath
import pytest
from accountant_cases import DELTA, bound, random_losses

from adapmixed.privacy import Accountant, Guarantee, PublicAnswer, UnprotectedAnswer
from adapmixed.privacy.guarantee import format_epsilon


def test_sentences_say_what_is_promised_and_what_is_not():
    realised = str(Accountant(DELTA).add(random_losses(4)).epsilon())
    for words in (
        "δ = 1e-05",
        "one whole shard",
        "add/remove",
        "per_model",
        "Rényi order 18",
        "40 answered queries",
        "data-dependent and ex-post",
        "depends on the private data and must not be published",
        "not (ε, δ)-DP with a constant ε",
        "covers the removal of a member, not the addition",
    ):
        assert words in realised
    assert "replace-one" not in realised  # the step to records needs a constant ε
    fixed = str(Accountant(DELTA).add(bound()).epsilon())
    assert "zero-out" in fixed and "(2ε, (1 + e^ε) δ)" in fixed and "fixed in advance" in fixed
    split = str(Accountant(DELTA).add(random_losses(4, orders=(2.0, 18.0))).epsilon())
    assert "δ split over the Rényi orders 2, 18" in split
    published = str(Accountant(DELTA).add(bound(published=True)).epsilon())
    assert "known to be invalid" in published and "no privacy guarantee follows" in published
    nothing = str(Accountant(DELTA).add(UnprotectedAnswer(2)).epsilon())
    assert "no privacy guarantee" in nothing and "ε =" not in nothing
    public = str(Accountant(DELTA).add(PublicAnswer(1)).epsilon())
    assert "ε = 0, δ = 0" in public and "1 answered query" in public


@pytest.mark.parametrize(
    ("epsilon", "shown"), [(0.92400001, "0.9241"), (0.875, "0.875"), (12345.1, "12350"), (0.0, "0")]
)
def test_displayed_epsilon_is_rounded_up(epsilon, shown):
    guarantee = Guarantee(epsilon, DELTA, "fixed", "shard", "zero_out", "per_model", 3.0)
    assert f"ε = {shown} at" in str(guarantee)


def test_guarantee_is_validated():
    good = {
        "epsilon": 1.0,
        "delta": DELTA,
        "kind": "fixed",
        "unit": "shard",
        "adjacency": "zero_out",
        "rule": "per_model",
        "order": 3.0,
    }
    Guarantee(**good)
    for change in (
        {"kind": "strong"},
        {"epsilon": None},
        {"epsilon": -1.0},
        {"epsilon": math.nan},
        {"delta": 2.0},
        {"adjacency": "swap"},
        {"rule": "best"},
        {"kind": "none"},
    ):
        with pytest.raises(ValueError, match=" must be "):
            Guarantee(**{**good, **change})


def test_what_drawing_by_integer_weights_adds() -> None:
    """(1 + e^ε) T V 2^-99 of what may be answered, never less; nothing where it is in ε already."""
    for epsilon, queries, vocab in ((8.0, 99_840, 128_256), (0.0, 1, 2), (700.0, 5, 10)):
        stated = Guarantee(epsilon, 1e-5, "fixed", "shard", "zero_out", None, None, queries=queries)
        exact = (1 + mpmath.exp(epsilon)) * queries * vocab / mpmath.mpf(2) ** 99
        found = stated.drawn_delta(vocab)
        assert min(1, exact) <= found <= min(1, exact * (1 + mpmath.mpf(2) ** -40))
        planned = replace(stated, queries=1, budget=queries)
        assert planned.drawn_delta(vocab) == found
        assert replace(stated, method="filter").drawn_delta(vocab) == 0.0
    unprotected = Guarantee(None, 1.0, "none", "shard", None, None, None, queries=3)
    assert unprotected.drawn_delta(7) == 0.0
    with pytest.raises(ValueError, match="vocab_size must be an integer >= 1, got 0"):
        stated.drawn_delta(0)


def test_a_sentence_says_what_drawing_adds() -> None:
    """Where tokens of private laws are drawn and ε does not hold it, as a multiple of V."""
    words = (
        "Drawing tokens by integer weights adds at most {} V to δ, V the size of the vocabulary."
    )
    fixed = Guarantee(1.0, 1e-5, "fixed", "shard", "zero_out", None, None, queries=2**40)
    # (1 + e) 2^40 2^-99 to four digits, rounded up.
    assert words.format("6.451e-18") in str(fixed)
    for other in (
        Accountant(DELTA).add(random_losses(4)).epsilon(),
        replace(fixed, budget=7, queries=1),
        replace(fixed, caveats=("seeded",)),
    ):
        assert words.format(format_epsilon(other.drawn_delta(1))) in str(other)
    for other in (
        Accountant(DELTA).add(PublicAnswer(1)).epsilon(),
        Accountant(DELTA).add(UnprotectedAnswer(1)).epsilon(),
        Accountant(DELTA).add(bound(published=True)).epsilon(),
        replace(fixed, method="filter"),
        replace(fixed, epsilon=math.inf),
        replace(fixed, queries=0),
    ):
        assert "integer weights" not in str(other)
