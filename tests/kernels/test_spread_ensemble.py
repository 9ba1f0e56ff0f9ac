"""leave_one_out of an ensemble that is spread over several ranks: mean_excess is given."""

from __future__ import annotations

import math

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
