"""What a server says of its answers: for every mechanism, with and without a ledger's charges."""

from __future__ import annotations

import pytest
import torch

from adapmixed.commands.options import mechanism_of
from adapmixed.commands.serve import promise, promised
from adapmixed.mechanisms import Mechanism, Origin, Rows
from adapmixed.privacy import Accountant, Guarantee
from adapmixed.rng import SecureRandom

MODELS, DELTA = 4, 1e-5
KNOWN, UNKNOWN = Origin("ab" * 32, ()), Origin("ab" * 32, ("base",))
GROWS = "has no limit and grows with every answer"
DISJOINT, BASE = "Disjointness of the shards was not verified", "The public model was not compared"
FIXED = "adapmixed loss=fixed target_leakage=0.02"
POOL = "clipped-log-pool lower=-0.25 upper=1 scale=2"
BOX = "clipped-mixing lower=0.8 upper=1.5"
CONFIDENCES = ("none", "0", "0.4", "1")


def made(text: str, epsilon: float | None = None) -> Mechanism:
    return mechanism_of(text, delta=DELTA, epsilon=epsilon, queries=1, way="zero_out")


def answer(
    accountant: Accountant, mechanism: Mechanism, queries: int, origin: Origin = KNOWN
) -> None:
    """Charge answers to rows of four tokens, whose likeliest public token has probability 0.7."""
    public = torch.tensor([0.7, 0.1, 0.1, 0.1]).log().expand(queries, 4).clone()
    private = public.expand(MODELS, queries, 4) + torch.randn(MODELS, queries, 4)
    rows = Rows(private, public, None, 4)
    accountant.charge(mechanism.propose_rows(rows, rng=SecureRandom(), origin=origin))


def gated(mechanism: Mechanism, epsilon: float | None = None) -> Guarantee:
    """Return the guarantee of all answers to come, as the gate sees it."""
    return promised(Accountant(DELTA, epsilon=epsilon), mechanism, MODELS, KNOWN)


@pytest.mark.parametrize(
    "text", [FIXED, *(f"{POOL} queries=none public_confidence={one}" for one in CONFIDENCES)]
)
def test_without_a_plan_epsilon_has_no_limit(text: str) -> None:
    mechanism = made(text)
    found = gated(mechanism)
    assert found.kind == "fixed" and not found.limited
    with pytest.raises(ValueError, match=f"^--allow-weak must be given .* {GROWS}"):
        promise(Accountant(DELTA), mechanism, MODELS, KNOWN, allow_weak=False)


@pytest.mark.parametrize("text", [FIXED, f"{POOL} queries=none"])
def test_a_growing_epsilon_is_that_of_the_ledger(text: str) -> None:
    """The line gave ε of one answer and the number of all."""
    accountant, mechanism = Accountant(DELTA), made(text)
    empty = promise(accountant, mechanism, MODELS, UNKNOWN)
    assert GROWS in empty and "ε = " not in empty and BASE in empty and "weak guarantee" in empty
    answer(accountant, mechanism, 200)
    line = promise(accountant, mechanism, MODELS, KNOWN)
    assert GROWS in line and line.endswith(str(accountant.guarantee()))
    assert "The 200 answered queries are" in line
    assert accountant.queries == 200  # the trial charged a copy


def test_public_answers_are_not_those_to_come() -> None:
    """A ledger of public answers alone has ε = 0, which the next answer can end."""
    accountant, mechanism = Accountant(DELTA), made(f"{POOL} queries=none public_confidence=0.4")
    answer(accountant, mechanism, 3)
    assert accountant.guarantee().kind == "public"
    line = promise(accountant, mechanism, MODELS, UNKNOWN)
    assert GROWS in line and "the 3 answered queries used public values only" in line
    assert BASE in line


PLAN, BUDGET = "Up to 50 answered queries", "All answers (7 so far)"
STATED: list[tuple[str, float | None, str, str]] = [
    # mechanism, epsilon of every shard, the kind of guarantee, words of the line
    ("adapmixed", None, "data-dependent, ex-post", "depends on the private data"),
    ("adapmixed screen=none", None, "data-dependent, ex-post", "depends on the private data"),
    ("pmixed epsilon=3 order=8 queries=50", None, "fixed", PLAN),
    ("public", None, "public", "the 7 answered queries"),
    ("unprotected", None, "none", "no privacy guarantee"),
    *((f"{POOL} queries=50 public_confidence={one}", None, "fixed", PLAN) for one in CONFIDENCES),
    *((f"{BOX} queries=50 public_confidence={one}", None, "fixed", PLAN) for one in CONFIDENCES),
    *((f"{POOL} public_confidence={one}", 2.0, "fixed", BUDGET) for one in CONFIDENCES),
    *((f"{BOX} order=8 public_confidence={one}", 2.0, "fixed", BUDGET) for one in CONFIDENCES),
]


@pytest.mark.parametrize(("text", "epsilon", "kind", "words"), STATED)
def test_what_is_stated(text: str, epsilon: float | None, kind: str, words: str) -> None:
    """The guarantee that was fixed in advance is the gate's and the line's; others are allowed."""
    accountant = Accountant(DELTA, epsilon=epsilon)
    mechanism = made(text if epsilon is None else f"{text} queries=none", epsilon)
    found = gated(mechanism, epsilon)
    assert found.kind == kind and found.limited
    if kind in ("fixed", "public") and (found.epsilon or 0.0) <= 10:
        promise(accountant, mechanism, MODELS, KNOWN, allow_weak=False)
    else:
        with pytest.raises(ValueError, match="^--allow-weak must be given to serve this mechanism"):
            promise(accountant, mechanism, MODELS, KNOWN, allow_weak=False)
    if words == PLAN:
        plain = gated(made(text.split(" public_confidence")[0]))
        assert found == plain and found.budget == 50 and found.epsilon
    if words == BUDGET:
        assert (found.method, found.epsilon) == ("per-shard budget", 2.0)
    answer(accountant, mechanism, 7)
    line = promise(accountant, mechanism, MODELS, KNOWN)
    assert words in line and (kind != "fixed" or line == str(accountant.guarantee()))
    free = words == PLAN and text.endswith(("=0", "=0.4"))
    assert ("not counting 7 from public values only" in line) == free


@pytest.mark.parametrize(
    ("text", "epsilon"),
    [(f"{POOL} queries=9", None), (f"{POOL} queries=none", None), (FIXED, None),
     (f"{POOL} queries=none", 2.0), ("adapmixed", None)],
)  # fmt: skip
def test_caveats_of_the_ledger_and_of_the_ensemble(text: str, epsilon: float | None) -> None:
    accountant, mechanism = Accountant(DELTA, epsilon=epsilon), made(text, epsilon)
    answer(accountant, mechanism, 2, Origin(KNOWN.ensemble, ("shards", "positions")))
    line = promise(accountant, mechanism, MODELS, UNKNOWN)
    assert DISJOINT in line and "named by positions" in line and BASE in line
    assert line.count(DISJOINT) == 1


def test_a_plan_that_is_spent() -> None:
    accountant, mechanism = Accountant(DELTA), made(f"{POOL} queries=3")
    answer(accountant, mechanism, 3, UNKNOWN)
    assert promise(accountant, mechanism, MODELS, UNKNOWN) == str(accountant.guarantee())


@pytest.mark.parametrize("loss", ["fixed", "data-dependent"])
@pytest.mark.parametrize("screen", ["noisy", "public"])
def test_the_gate_does_not_depend_on_chance(loss: str, screen: str) -> None:
    """Noise decides which answers pass a screening, and the others are public."""
    mechanism = made(f"adapmixed loss={loss} screen={screen} threshold=0 sigma=5")
    kinds = {gated(mechanism).kind for _ in range(20)}
    assert kinds == {"fixed" if loss == "fixed" else "data-dependent, ex-post"}
