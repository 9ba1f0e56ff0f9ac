"""leave_one_out of an ensemble that is spread over several ranks: mean_excess is given."""

from __future__ import annotations

import math
from dataclasses import replace

import cases
import checks
import pytest
import torch
from checks import ADJACENCIES

import adapmixed_ext

ORDERS = cases.ORDERS


def test_a_spread_ensemble_equals_the_whole(device: torch.device) -> None:
    """Each rank knows its own models and the sum of all excesses."""
    case = cases.ordinary()[2].to(device)
    projection = adapmixed_ext.project(case.private, case.public, order=3.0, radius=0.5)
    p, q = torch.softmax(case.private.double(), -1), torch.softmax(case.public.double(), -1)
    mean = (projection.weight.unsqueeze(-1) * (p / q - 1)).mean(0)
    for adjacency in ADJACENCIES:
        whole = adapmixed_ext.leave_one_out(
            case.private, case.public, projection, orders=ORDERS, adjacency=adjacency
        )
        for part in (slice(0, 3), slice(3, 7), slice(6, 7)):
            local = adapmixed_ext.leave_one_out(
                case.private[part], case.public, projection.weight[part], orders=ORDERS,
                adjacency=adjacency, num_models=7, mean_excess=mean,
            )  # fmt: skip
            torch.testing.assert_close(local, whole[part], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_loss_hidden_by_the_sum_of_all_ranks_is_infinite(
    adjacency: str, device: torch.device
) -> None:
    """One model is all but 10^-k of a token's mixture: never less than the truth."""
    orders = [1.5, 2.0, 18.0, 64.0]
    kinds = set()
    for digits in range(1, 15):
        for rare in (0.0, -300.0, -720.0):
            public = torch.tensor([[0.0, 1.0, -0.5, rare - digits * math.log(10.0)]])
            private = public.expand(3, 1, 4).clone()
            private[0, 0, 3], private[1, 0, 1] = rare, 0.5
            weight = torch.full((3, 1), 0.5, dtype=torch.float64)
            log_p, log_q = (torch.log_softmax(z.double(), -1) for z in (private, public))
            mean = (weight.unsqueeze(-1) * torch.expm1(log_p - log_q)).mean(0)
            loss = adapmixed_ext.leave_one_out(
                private.to(device), public.to(device), weight.to(device), orders=orders,
                adjacency=adjacency, mean_excess=mean.to(device),
            ).cpu()  # fmt: skip
            for i in range(3):
                for k, order in enumerate(orders):
                    exact = checks.exact_loss(
                        private[:, 0], public[0], weight[:, 0], 1 - weight[:, 0], i, order,
                        adjacency,
                    )  # fmt: skip
                    got = loss[i, 0, k].item()
                    hidden = i == 0 and digits > 5 and got == math.inf
                    assert hidden or checks.loss_holds(got, exact), (digits, rare, i, order, got)
                    kinds.add(hidden)
    assert kinds == {False, True}


def test_ratios_that_ranks_add_up(device: torch.device) -> None:
    """Σ p̄_i/q: of all tokens at once, far below the range of q, and exactly 1 where p_i = q."""
    case = cases.ordinary()[2].to(device)
    private, public = case.private.clone(), case.public.clone()
    private[1] = public
    public[0, :3] = torch.tensor([-2000.0, -math.inf, -900.0])
    private[:, 0, :3] = torch.tensor([-2000.5, -math.inf, -901.0])
    private[2, 0, 2] = -math.inf
    projection = adapmixed_ext.project(private, public, order=3.0, radius=0.5)
    found = adapmixed_ext.density_ratio_sum(private, public, projection)
    log_p = torch.log_softmax(private.double(), -1)
    log_q = torch.log_softmax(public.double(), -1)
    log_ratio = torch.where(torch.isneginf(log_q), 0.0, log_p - log_q)
    weight, complement = projection.weight.unsqueeze(-1), projection.complement.unsqueeze(-1)
    expected = (weight * log_ratio.exp() + complement).sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    own = adapmixed_ext.Projection(*(field[1:2] for field in vars(projection).values()))
    own = replace(own, public_lse=projection.public_lse)
    assert torch.equal(
        adapmixed_ext.density_ratio_sum(public[None], public, own), torch.ones_like(found)
    )
    # q (1 + mean excess) is the mixture, and losses are those of all rows.
    whole = adapmixed_ext.mixture(private, public, projection)
    torch.testing.assert_close(log_q.exp() * found / len(private), whole, rtol=1e-12, atol=0.0)
    losses = adapmixed_ext.leave_one_out(private, public, projection, orders=ORDERS)
    spread = adapmixed_ext.leave_one_out(
        private, public, projection, orders=ORDERS, mean_excess=found / len(private) - 1.0
    )
    torch.testing.assert_close(spread, losses, rtol=1e-5, atol=1e-12)
