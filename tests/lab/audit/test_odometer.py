"""AdaPMixED's ex-post statement on trees: answers are exact, and a wrong ε is found."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from adapmixed.mechanisms import AdaPMixED, adapmixed
from adapmixed.privacy import account
from adapmixed.privacy.conversions import c_alpha
from adapmixed_lab.audit import odometer as audit
from adapmixed_lab.audit.odometer import Odometer, extremal

DELTA = audit.DELTA


def tree(models: int = 2, vocab: int = 2, depth: int = 3, **settings: Any) -> Odometer:
    return Odometer(ball(**settings), models, vocab, depth, 0.05)


def ball(leakage: float = 0.5, **settings: Any) -> AdaPMixED:
    """Return an AdaPMixED, by default with the paper's leave-one-out."""
    return AdaPMixED(3.0, leakage, screen=None, **{"adjacency": "add_remove"} | settings)


def test_one_answer_by_hand() -> None:
    """P, Q, D_3 both ways and ε are written out for two tokens and one model inside its ball."""
    one = replace(tree(1, depth=1), mechanism=ball(5.0))
    queries = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[-2.0, 0.0]])
    p, q = torch.tensor([2.0, 0.0]).softmax(0).double(), torch.tensor([-2.0, 0.0]).softmax(0)
    q = q.double()
    loss = max(math.log(float((a**3 / b**2).sum())) / 2 for a, b in ((p, q), (q, p)))
    cost = loss + math.log(2 / 3) - (math.log(0.05) + math.log(3)) / 2
    ((here, there, epsilon),) = one.branches(queries)
    assert here[0] == pytest.approx(p.tolist(), rel=1e-6)
    assert there[0] == pytest.approx(q.tolist(), rel=1e-6)
    assert cost <= epsilon.min() == epsilon.max() <= cost * (1 + 2e-5)
    assert one.measured(queries) == pytest.approx(max(0, float(p[0] - math.exp(cost) * q[0])))


@pytest.mark.parametrize(("models", "vocab", "depth"), [(1, 2, 4), (2, 3, 3), (3, 2, 2)])
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_branches_are_distributions(models: int, vocab: int, depth: int, adjacency: str) -> None:
    here = tree(models, vocab, depth, adjacency=adjacency)
    queries = here.queries(
        np.random.default_rng(1).normal(size=(1, here.nodes * (models + 1) * vocab))
    )
    found = list(here.branches(queries))
    assert len(found) == models and {one.shape for one in found[0]} == {(1, vocab**depth)}
    for p, q, epsilon in found:
        assert (p.sum(), q.sum()) == pytest.approx((1, 1), rel=1e-12)
        # ε is known before the last token is drawn, and differs from branch to branch.
        epsilons = epsilon.reshape(-1, vocab)
        assert (epsilons == epsilons[:, :1]).all() and len(set(epsilons[:, 0])) > 1
    # The search's own ε is the accountants'.
    assert here.estimated(*queries) == pytest.approx(found[0][2], rel=1e-9)


@pytest.mark.slow
def test_a_search_comes_near_delta() -> None:
    generators = [np.random.default_rng(3) for _ in range(2)]
    first, second = (tree().search(40, generator) for generator in generators)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert 0.95 < tree().measured(first) / 0.05 <= 1.0


@pytest.mark.parametrize(("what", "setting"), audit.EXTREMAL)
@pytest.mark.slow
def test_an_extremal_tree_uses_up_delta(what: str, setting: Callable[..., Any]) -> None:
    here, queries = setting(delta=DELTA)
    assert 0.99 < here.measured(queries) / DELTA <= 1.0
    assert replace(here, told=(0.8,) * here.depth).measured(queries) > 1.2 * DELTA
    assert replace(here, told=(0.0,) + (1.0,) * (here.depth - 1)).measured(queries) > 1.1 * DELTA


@pytest.mark.parametrize(("what", "setting"), audit.SEVERAL)
def test_the_best_order_afterwards_breaks_delta_on_adapmixed_itself(
    what: str, setting: Callable[..., Any]
) -> None:
    here, queries = setting(delta=DELTA)
    assert 0.96 < here.measured(queries) / DELTA <= 1.0
    count = len(here.mechanism.loss_orders)
    chosen, queries = setting(delta=count * DELTA)
    assert 0.96 * count < chosen.measured(queries) / DELTA <= count
    # The same ensembles with δ split over the orders, which is the statement as it is made.
    assert replace(chosen, delta=DELTA).measured(queries) <= DELTA


@pytest.mark.parametrize("order", [3.0, 18.0])
def test_the_probability_of_a_larger_loss_is_another_statement(order: float) -> None:
    """It is up to α (α/(α-1))^{α-1} δ, and nearly α δ here (docs/theory/adapmixed.md)."""
    here, queries = extremal(2, "add_remove", (order,) * 3, (8 / (order - 1),) * 3, DELTA)
    most = order * (order / (order - 1)) ** (order - 1)
    assert 0.99 * order < here.exceeded(queries) / DELTA <= most


def test_an_accountant_that_states_too_little_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    here, queries = audit.EXTREMAL[2][1](delta=DELTA)
    several, asked = audit.SEVERAL[0][1](delta=DELTA)
    assert here.measured(queries) <= DELTA and several.measured(asked) <= DELTA
    add = account.Losses.add

    def changed(loss: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Any:
        return lambda self, event: add(self, replace(event, loss=loss(event.loss)))

    with monkeypatch.context() as patch:  # less than what is lost
        patch.setattr(account.Losses, "add", changed(lambda loss: 0.99 * loss))
        assert here.measured(queries) > DELTA
    conversion = "adapmixed.privacy.guarantee.c_alpha"
    with monkeypatch.context() as patch:  # docs/how-to/audit.md: 1e-5 too small
        patch.setattr(conversion, lambda *given: c_alpha(*given) - 1e-5)
        assert here.measured(queries) > DELTA
    with monkeypatch.context() as patch:  # the whole δ for each order
        patch.setattr(conversion, lambda order, delta: c_alpha(order, 2 * delta))
        assert several.measured(asked) > 1.5 * DELTA
    with monkeypatch.context() as patch:  # the mean of the members in place of the largest
        mean = changed(lambda loss: np.broadcast_to(loss.mean(0), loss.shape).copy())
        patch.setattr(account.Losses, "add", mean)
        assert here.measured(queries) > DELTA
    with monkeypatch.context() as patch:  # the last answer in place of all
        forgetting = lambda self, event: add(replace(self, total=0 * self.total), event)  # noqa: E731
        patch.setattr(account.Losses, "add", forgetting)
        assert here.measured(queries) > DELTA


def test_losses_that_are_too_small_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = adapmixed.ops.leave_one_out
    found = [audit.EXTREMAL[k][1](delta=DELTA) for k in (3, 4, 5)]
    monkeypatch.setattr(adapmixed.ops, "leave_one_out", lambda *a, **b: 0.95 * losses(*a, **b))
    for here, queries in found:
        assert here.measured(queries) > DELTA
