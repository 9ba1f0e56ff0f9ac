"""ClippedLogPool whose N is a public constant: a model that is missing is a slot that is empty."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from exact import costs
from test_enumerated import GRIDS, both_ways, everything, law
from torch import Tensor

from adapmixed.audit.bounds import attack, present_target
from adapmixed.audit.search import Array, Shape
from adapmixed.audit.search import both_ways as larger
from adapmixed.audit.target import Target, largest
from adapmixed.mechanisms import ClippedLogPool, Shaped
from adapmixed.mechanisms.base import Proposal
from adapmixed.privacy import Accountant, bounded_range_rho
from adapmixed.rng import SeededRandom

SETTING = (-0.25, 0.5, 2.0)
ORDERS = (1.5, 2.0, 9.0)
RULES: list[dict[str, object]] = [{}, {"top_k": 5}, {"sure_above": 0.3}]


def drawn(seed: int, models: int, vocab: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = 2 * torch.randn(6, vocab, generator=generator)
    private = public + torch.randn(models, 6, vocab, generator=generator)
    private[0, 0, 3] = -torch.inf
    return private, public


def proposed(mechanism: ClippedLogPool | Shaped, private: Tensor, public: Tensor) -> Proposal:
    return mechanism.propose(private, public, rng=SeededRandom(0))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("more", [0, 3])
def test_no_missing_model_costs_more_than_an_emptied_slot(grid: str, more: int) -> None:
    """Over all rows of a grid; not so where N is the number of models that are there."""
    private, public = everything(*GRIDS[grid])
    slots = len(private) + more
    lower, upper, scale = SETTING
    rho = bounded_range_rho(scale, lower, upper, slots, "add_remove", constant_models=True)
    assert rho == bounded_range_rho(scale, lower, upper, slots, "zero_out")
    constant = ClippedLogPool(*SETTING, num_models=slots)
    worst: dict[bool, float] = {True: 0.0, False: 0.0}
    for mechanism in (constant, replace(constant, num_models=None)):
        here = law(mechanism, private, public)
        for i in range(len(private)):
            others = torch.cat((private[:i], private[i + 1 :]))
            there = law(mechanism, others if len(others) else public[None], public)
            for order in ORDERS:
                found = float((both_ways(here, there, order) / order).max())
                known = mechanism is constant
                worst[known] = max(worst[known], found)
    assert 0.05 * rho < worst[True] <= rho + 1e-14
    if len(private) > 1:
        assert worst[False] > 1.5 * rho  # the control


@pytest.mark.parametrize("rules", RULES)
def test_a_missing_model_is_an_emptied_slot_to_the_last_bit(rules: dict[str, object]) -> None:
    """So that all that is proved of an emptied slot holds, rounding and other charges included."""
    private, public = drawn(1, 4)
    mechanism = ClippedLogPool(*SETTING, num_models=7, **rules)  # type: ignore[arg-type]
    emptied = private.clone()
    emptied[2] = public
    rest = torch.cat((private[:2], private[3:]))
    whole, missing = proposed(mechanism, emptied, public), proposed(mechanism, rest, public)
    assert torch.equal(law(mechanism, emptied, public), law(mechanism, rest, public))
    assert whole.charges is not None and missing.charges is not None
    assert torch.equal(whole.charges[[0, 1, 3]], missing.charges)
    # A slot that a filter has retired is as good as missing, too.
    active = torch.ones(4, 6, dtype=torch.bool)
    active[2] = False
    kept = proposed(mechanism, private, public)._retirement
    assert kept is not None
    for token in range(public.shape[1]):
        targets = torch.full((6,), token)
        found = kept.law(active).log_prob(targets)
        assert torch.equal(found, missing.law.log_prob(targets))


@pytest.mark.parametrize("slots", [4, 9])
def test_the_divisor_is_the_constant(slots: int) -> None:
    private, public = drawn(2, 4)
    lower, upper, scale = SETTING
    logs = [torch.log_softmax(rows.double(), -1) for rows in (private, public)]
    clipped = (logs[0] - logs[1]).clamp(lower, upper)
    expected = torch.log_softmax(logs[1] + scale / slots * clipped.sum(0), -1)
    found = law(ClippedLogPool(*SETTING, num_models=slots), private, public)
    assert torch.allclose(found, expected, atol=1e-9)


def searched(mechanism: ClippedLogPool, models: int, slots: int) -> Target:
    lower, upper, scale = SETTING
    rho = bounded_range_rho(scale, lower, upper, slots, "add_remove", constant_models=True)

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return largest([larger(p, q, order) / (order * rho) for order in ORDERS])

    return Target("pool", "true D_α / (α ρ)", mechanism, Shape(models, 4), "add_remove", ratio)


@pytest.mark.parametrize(("models", "slots"), [(1, 2), (2, 2), (3, 5)])
@pytest.mark.parametrize("rules", RULES)
def test_no_search_exceeds_the_bound(models: int, slots: int, rules: dict[str, object]) -> None:
    constant = ClippedLogPool(*SETTING, num_models=slots, **rules)  # type: ignore[arg-type]
    found = attack(searched(constant, models, slots), 25, np.random.default_rng(3))
    assert 0.9 < found <= 1 + 1e-9
    if models == slots:
        counted = searched(replace(constant, num_models=None), models, slots)
        assert attack(counted, 25, np.random.default_rng(3)) > 1.5


def test_the_control_of_the_audit_is_caught() -> None:
    assert attack(present_target(), 20, np.random.default_rng(5)) > 3


def test_events_say_whether_n_is_a_constant() -> None:
    private, public = drawn(3, 3)
    pools = [ClippedLogPool(*SETTING, 20, num_models=number) for number in (3, None, 5)]
    events = [costs(proposed(one, private, public))[0] for one in pools]
    assert [event.num_models for event in events] == [3, 3, 5]
    assert [event.constant_models for event in events] == [True, False, True]  # type: ignore[union-attr]
    for one, other in pairwise(events):
        with pytest.raises(ValueError, match="must be the same in every"):
            Accountant(1e-5).add([one, other])
    unplanned = [replace(event, budget=None) for event in events[:2]]
    with pytest.raises(ValueError, match="constant_models must be the same .* False after True"):
        Accountant(1e-5).add(unplanned)
    known, counted = (Accountant(1e-5, adjacency="add_remove").add(one) for one in events[:2])
    assert known.epsilon().epsilon == Accountant(1e-5).add(events[1]).epsilon().epsilon
    assert (known.epsilon().epsilon or 0.0) < (counted.epsilon().epsilon or 0.0)
    assert "num_models, by which the pool is divided, is a public constant" in str(known.epsilon())
    assert "public constant" not in str(counted.epsilon()) + str(known.epsilon("zero_out"))


def test_settings_in_words() -> None:
    """What was written before there was the setting is what it is called without it."""
    plain, known = ClippedLogPool(*SETTING), ClippedLogPool(*SETTING, num_models=4)
    assert repr(plain) == (
        "ClippedLogPool(lower=-0.25, upper=0.5, scale=2.0, queries=None, top_k=None, "
        "sure_above=None)"
    )
    assert repr(known) == repr(plain)[:-1] + ", num_models=4)"
    private, public = drawn(4, 5)
    for mechanism in (known, Shaped(known, temperature=0.5)):
        with pytest.raises(ValueError, match="num_models must be at least .* there, 5, got 4"):
            proposed(mechanism, private, public)
    for wrong in (0, -1, 2.0, True, "4"):
        with pytest.raises(ValueError, match="num_models must be"):
            ClippedLogPool(*SETTING, num_models=wrong)  # type: ignore[arg-type]
