"""leave_one_out, beyond what test_contract.py checks: losses of 0, and one order."""

from __future__ import annotations

import cases
import pytest
import torch

import adapmixed_ext


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("models", [2, 3, 7])
def test_identical_models_lose_next_to_nothing(
    models: int, dtype: torch.dtype, device: torch.device
) -> None:
    for vocab in (17, 1000):
        row, public = cases.logits(3, 1, 2, vocab, 3.0, 1.0)
        private = row.expand(models, 2, vocab).to(dtype).to(device)
        public = public.to(dtype).to(device)
        projection = adapmixed_ext.project(private, public, order=18.0, radius=3.6)
        clipping = adapmixed_ext.clip_project(private, public, lower=0.6, upper=1.65)
        for weights in (projection, torch.full((models, 2), 0.3, device=device).double(), clipping):
            loss = adapmixed_ext.leave_one_out(private, public, weights, orders=cases.ORDERS)
            assert (loss <= 1e-11).all(), (vocab, loss.max().item())


def test_weight_zero_loses_nothing_under_zero_out(device: torch.device) -> None:
    case = cases.ordinary()[2].to(device)
    weights = torch.zeros(case.private.shape[:2], dtype=torch.float64, device=device)
    weights[1] = 0.5
    loss = adapmixed_ext.leave_one_out(
        case.private, case.public, weights, orders=cases.ORDERS, adjacency="zero_out"
    )
    assert (loss[weights == 0] == 0).all() and (loss[1] > 0).all()


def test_orders_may_be_one_number(device: torch.device) -> None:
    case = cases.ordinary()[3].to(device)
    projection = adapmixed_ext.project(case.private, case.public, order=3.0, radius=0.5)
    one = adapmixed_ext.leave_one_out(case.private, case.public, projection, orders=3.0)
    many = adapmixed_ext.leave_one_out(case.private, case.public, projection, orders=[2, 3])
    assert one.shape == (*case.private.shape[:2], 1)
    torch.testing.assert_close(one[..., 0], many[..., 1], rtol=1e-4, atol=1e-9)
