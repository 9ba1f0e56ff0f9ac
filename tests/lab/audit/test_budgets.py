"""The trees that mechanisms answer: transcripts are exact, and a wrong charge is seen."""

import math
from dataclasses import replace

import pytest

from adapmixed.mechanisms import ClippedLogPool, clipped
from adapmixed.privacy.accountant import Account
from adapmixed.privacy.composition import ShardBudget
from adapmixed_lab.audit import budgets as audit
from adapmixed_lab.audit.budgets import ENDLESS, ZCDP_ORDERS, Tree


@pytest.mark.parametrize("asked", [audit.POOLS[1], audit.MIXINGS[1]])
def test_the_leaves_are_a_distribution_and_no_shard_spends_more_than_it_has(asked: Tree) -> None:
    tree = replace(asked, seed=3, amount=0.1)
    here, there = tree.leaves(), tree.leaves(0)
    assert len(here) == 3**5 and here.keys() == there.keys()
    for leaves in (here, there):
        assert math.fsum(mass for mass, _ in leaves.values()) == pytest.approx(1.0, rel=1e-12)
        most = max(after.spent.max() for _, after in leaves.values())
        assert most <= tree.budget.amount * (1 + 1e-12)
    # An emptied shard spends rounding errors alone, and the others spend the same as before.
    spent, emptied = (
        {h: tuple(after.spent.tolist()) for h, (_, after) in leaves.items()}
        for leaves in (here, there)
    )
    assert max(first for first, *_ in emptied.values()) < 1e-9
    assert all(costs[1:] == emptied[history][1:] for history, costs in spent.items())
    assert len(set(spent.values())) > 3
    # One shape restricts the answers: only its tokens have a probability, in both worlds.
    kept = {history for history, (mass, _) in here.items() if mass > 0}
    assert kept == {history for history, (mass, _) in there.items() if mass > 0}
    assert 0 < len(kept) < len(here)
    # Some shard has run out somewhere: with a larger budget it would have spent more.
    free = replace(tree, amount=ENDLESS).leaves()
    assert any(tuple(free[history][1].spent.tolist()) != costs for history, costs in spent.items())


def test_one_answer_by_hand() -> None:
    """D_α is written out for two tokens, one model and a budget that is not spent."""
    tree = Tree(1, 2, 1, ClippedLogPool(-1.0, 1.0), 9.0, 4)
    private, public = tree.node(())
    q = public.double().softmax(0)
    ratio = private[0].double().log_softmax(0) - q.log()
    p = q * ratio.clamp(-1.0, 1.0).exp()
    p = p / p.sum()
    largest = max(
        math.log(float((a**order / b ** (order - 1)).sum())) / (order - 1) / order
        for a, b in ((p, q), (q, p))
        for order in ZCDP_ORDERS
    )
    assert tree.divergence() == pytest.approx(largest / 9.0, rel=1e-5)


def test_a_charge_that_is_too_small_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = replace(audit.POOLS[0], amount=0.05)
    assert tree.divergence() <= 1.0
    charged = clipped.individual_rho
    monkeypatch.setattr(clipped, "individual_rho", lambda *arguments: 0.4 * charged(*arguments))
    assert tree.divergence() > 1.0


@pytest.mark.slow
def test_an_accountant_that_lets_too_much_through_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = audit.EXTREMAL[1]
    for_epsilon = ShardBudget.for_epsilon
    with monkeypatch.context() as patch:  # a budget larger than its ε allows

        def larger(*arguments: object) -> ShardBudget:
            budget = for_epsilon(*arguments)  # type: ignore[arg-type]
            return replace(budget, amount=1.3 * budget.amount)

        patch.setattr(ShardBudget, "for_epsilon", larger)
        assert audit._extremal_tree(*setting).divergence() > 1.2
    with monkeypatch.context() as patch:  # charges that are a fifth too small
        patch.setattr(clipped, "charge_rounding", lambda *_: (-0.2, 0.0))
        assert audit._extremal_tree(*setting).divergence() > 1.2
    with monkeypatch.context() as patch:  # what was spent before is forgotten
        admit = Account.admit
        patch.setattr(
            Account, "admit", lambda self, charge: admit(replace(self, total=None), charge)
        )
        with pytest.raises(ValueError, match="charge must keep every shard within its budget"):
            audit._extremal_tree(*setting).divergence()
        added = Account._added
        patch.setattr(
            Account, "_added", lambda self, event: added(replace(self, total=None), event)
        )
        assert audit._extremal_tree(*setting).divergence() > 1.2
    with monkeypatch.context() as patch:  # an exhausted member answers all the same
        patch.setattr(
            "adapmixed.mechanisms.Ticket._distribution",
            property(lambda self: self._proposed),
        )
        assert audit._extremal_tree(*setting).divergence() > 1.2
    assert audit._extremal_tree(*setting).divergence() <= 1.0
