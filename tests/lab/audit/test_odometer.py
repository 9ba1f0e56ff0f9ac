"""AdaPMixED's ex-post statement on trees: answers are exact, and a wrong ε is found."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from adapmixed.mechanisms import AdaPMixED, paper
from adapmixed.privacy import LeaveOneOutLoss
from adapmixed.privacy.accountant import Account
from adapmixed.privacy.conversions import c_alpha
from adapmixed_lab.audit import odometer as audit
from adapmixed_lab.audit.odometer import Odometer, extremal

DELTA = audit.DELTA


def test_one_answer_by_hand() -> None:
    """P, Q, D_3 both ways and ε are written out for two tokens and one model inside its ball."""
    ball = AdaPMixED(3.0, 5.0, screen=None, adjacency="add_remove")
    queries = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[-2.0, 0.0]])
    odometer = Odometer(ball, *queries, 0.05, (1.0,))
    p, q = torch.tensor([2.0, 0.0]).softmax(0).double(), torch.tensor([-2.0, 0.0]).softmax(0)
    q = q.double()
    loss = max(math.log(float((a**3 / b**2).sum())) / 2 for a, b in ((p, q), (q, p)))
    cost = loss + math.log(2 / 3) - (math.log(0.05) + math.log(3)) / 2
    ((here, there, epsilon),) = odometer.branches()
    assert here == pytest.approx(p.tolist(), rel=1e-6)
    assert there == pytest.approx(q.tolist(), rel=1e-6)
    assert cost <= epsilon.min() == epsilon.max() <= cost * (1 + 2e-5)
    assert odometer.measured() == pytest.approx(max(0, float(p[0] - math.exp(cost) * q[0])))


@pytest.mark.parametrize(("models", "vocab", "depth"), [(1, 2, 4), (2, 3, 3), (3, 2, 2)])
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_branches_are_distributions(models: int, vocab: int, depth: int, adjacency: Any) -> None:
    nodes, draw = sum(vocab**level for level in range(depth)), np.random.default_rng(1)
    public, *private = torch.from_numpy(draw.normal(size=(models + 1, nodes, vocab))).float()
    ball = AdaPMixED(3.0, 0.5, screen=None, adjacency=adjacency)
    branches = [*Odometer(ball, torch.stack(private), public, 0.05, (1.0,) * depth).branches()]
    assert len(branches) == models and {array.shape for array in branches[0]} == {(vocab**depth,)}
    assert len({q.tobytes() for _, q, _ in branches}) == models  # each lacks another member
    for p, q, epsilon in branches:
        assert (p.sum(), q.sum()) == pytest.approx((1, 1), rel=1e-12)
        # ε is known before the last token is drawn, and differs from branch to branch.
        epsilons = epsilon.reshape(-1, vocab)
        assert (epsilons == epsilons[:, :1]).all() and len(set(epsilons[:, 0])) > 1


@pytest.mark.parametrize("order", [3.0, 18.0])
def test_the_probability_of_a_larger_loss_is_another_statement(order: float) -> None:
    """It is up to α (α/(α-1))^{α-1} δ, and nearly α δ here (docs/theory/adapmixed.md)."""
    here = extremal(2, "add_remove", (order,) * 3, (8 / (order - 1),) * 3, DELTA)
    most = order * (order / (order - 1)) ** (order - 1)
    assert 0.99 * order < here.exceeded() / DELTA <= most


def test_an_accountant_that_states_too_little_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    here = audit.EXTREMAL[2][1](delta=DELTA)
    several = audit.SEVERAL[0][1](delta=DELTA)
    assert here.measured() <= DELTA and several.measured() <= DELTA
    add = Account._added

    def changed(loss: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Any:
        def added(self: Account, event: Any) -> Account:
            lost = isinstance(event, LeaveOneOutLoss)
            return add(self, replace(event, loss=loss(event.loss)) if lost else event)

        return added

    with monkeypatch.context() as patch:  # less than what is lost
        patch.setattr(Account, "_added", changed(lambda loss: 0.99 * loss))
        assert here.measured() > DELTA
    conversion = "adapmixed.privacy.guarantee.c_alpha"
    with monkeypatch.context() as patch:  # docs/how-to/audit.md: 1e-5 too small
        patch.setattr(conversion, lambda *arguments: c_alpha(*arguments) - 1e-5)
        assert here.measured() > DELTA
    with monkeypatch.context() as patch:  # the whole δ for each order
        patch.setattr(conversion, lambda order, delta: c_alpha(order, 2 * delta))
        assert several.measured() > 1.5 * DELTA
    with monkeypatch.context() as patch:  # the mean of the members in place of the largest
        mean = changed(lambda loss: np.broadcast_to(loss.mean(0), loss.shape).copy())
        patch.setattr(Account, "_added", mean)
        assert here.measured() > DELTA
    with monkeypatch.context() as patch:  # the last answer in place of all
        forgetting = lambda self, event: add(replace(self, total=None), event)  # noqa: E731
        patch.setattr(Account, "_added", forgetting)
        assert here.measured() > DELTA


def test_losses_that_are_too_small_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = paper.ops.leave_one_out
    odometers = [audit.EXTREMAL[k][1](delta=DELTA) for k in (3, 4, 5)]
    monkeypatch.setattr(paper.ops, "leave_one_out", lambda *a, **b: 0.95 * losses(*a, **b))
    for here in odometers:
        assert here.measured() > DELTA
