"""The trees that mechanisms answer: laws of transcripts, and that a wrong charge is seen."""

import math

import numpy as np
import pytest

from adapmixed.audit import filter as audit
from adapmixed.audit.mechanism_trees import Tree
from adapmixed.mechanisms import ClippedLogPool, clipped, log_pool
from adapmixed.privacy import FilterBudget


def test_the_leaves_are_a_law_and_an_emptied_slot_spends_nothing() -> None:
    tree, _ = audit._tree(audit.POOLS[1], 3, 0.1, counts=True)
    here, there = tree.leaves(), tree.leaves(0)
    assert len(here) == 3**5 and here.keys() == there.keys()
    for leaves in (here, there):
        assert math.fsum(leaf.mass for leaf in leaves.values()) == pytest.approx(1.0, rel=1e-12)
    differing = {
        tuple(np.subtract(leaf.counts, there[history].counts)) for history, leaf in here.items()
    }
    assert differing <= {(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)} and len(differing) > 1


def test_one_answer_by_hand() -> None:
    """Two tokens, one model, no filter in the way: D_2 written out."""
    budget = FilterBudget("zcdp", 9.0, 1e-5)
    tree = Tree((ClippedLogPool(-1.0, 1.0),), 4, 1, 2, 1, budget)
    private, public = tree.node(())
    q = public.double().softmax(0)
    ratio = private[0].double().log_softmax(0) - q.log()
    p = q * ratio.clamp(-1.0, 1.0).exp()
    p = p / p.sum()
    pairs = ((p, q), (q, p))
    largest = max(math.log(float((a**2 / b).sum())) for a, b in pairs)
    assert tree.divergence((2.0,)) == pytest.approx(largest / 18.0, rel=1e-5)


@pytest.mark.parametrize("setting", [audit.POOLS[0], audit.MIXINGS[0]])
def test_counts_that_are_not_paid_for_are_seen(
    setting: audit.Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = [audit._tree(setting, seed, 0.05, counts=True) for seed in (1, 2)]
    assert all(tree.divergence(orders) <= 1.0 for tree, orders in trees)
    monkeypatch.setattr(FilterBudget, "reserved", 0.0)
    assert max(tree.divergence(orders) for tree, orders in trees) > 1.0


def test_a_charge_that_is_too_small_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, orders = audit._tree(audit.POOLS[0], 1, 0.05)
    assert tree.divergence(orders) <= 1.0
    charged = log_pool.individual_rho
    monkeypatch.setattr(log_pool, "individual_rho", lambda *given: 0.4 * charged(*given))
    assert tree.divergence(orders) > 1.0


@pytest.mark.parametrize("setting", audit.EXTREMAL)
def test_an_extremal_tree_uses_up_its_budget(
    setting: tuple[int, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Charges that are a fifth too small let one answer more through, which then shows."""
    orders = (audit.ORDER,)
    assert 0.95 < audit._extremal_tree(*setting).divergence(orders) <= 1.0
    assert audit._extremal_tree(*setting, told=audit.UNDERSTATED).divergence(orders) > 1.2
    monkeypatch.setattr(clipped.ops, "loss_error", -0.2)
    assert audit._extremal_tree(*setting).divergence(orders) > 1.2
