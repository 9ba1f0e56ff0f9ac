"""clip_project and the operators that take a Clipping: the CPU's answers up to rounding."""

from __future__ import annotations

import contextlib
import math

import cases
import pytest
import simulated
import torch
from oracle_clip import check_charges, check_row
from torch import Tensor

import adapmixed_ext

BOXES = ((0.6, 1.65), (0.78, math.e), (0.9, 9e5), (0.0, 50.0), (1.0, 2.0))
CASES = cases.masked() + cases.canary() + cases.ordinary()[-5:]


def answers(case: cases.Case, lower: float, upper: float, active: Tensor | None) -> list[Tensor]:
    clipping = adapmixed_ext.clip_project(
        case.private, case.public, lower=lower, upper=upper, orders=[1.5, 18.0], active=active,
        num_models=7,
    )  # fmt: skip
    clipping.check()
    assert clipping.charge is not None
    given = case.private, case.public, clipping
    targets = torch.arange(len(case.public)) % case.public.shape[1]
    return [
        clipping.charge, adapmixed_ext.mixture(*given),
        adapmixed_ext.log_prob(*given, targets),
        adapmixed_ext.leave_one_out(*given, orders=[2.0, 7.5], num_models=9),
        adapmixed_ext.leave_one_out(*given, orders=[2.0, 7.5], adjacency="zero_out"),
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=cases.ids(CASES))
def test_like_the_cpu(case: cases.Case) -> None:
    active = torch.arange(case.private[..., 0].numel()).reshape(case.private.shape[:2]) % 3 != 1
    for k, box in enumerate(BOXES):
        mask = active if k % 2 else None
        expected = answers(case, *box, mask)
        with simulated.kernels(*simulated.ORDERS[k % len(simulated.ORDERS)]):
            got = answers(case, *box, mask)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-9)


def test_rows_of_a_position_sum_alike() -> None:
    """See tests/kernels/test_clip_offsets.py."""
    private, public = cases.logits(31, 3, 1, 60, 3.0, 1.5)
    for k, (lower, upper) in enumerate(((0.6, 1.65), (0.97, 40.0), (1.0 - 1e-9, 1.0 + 1e-9))):
        sums = []
        with simulated.kernels(*simulated.ORDERS[k]):
            for row in private.split(1):
                own = adapmixed_ext.clip_project(row, public, lower=lower, upper=upper)
                sums.append(adapmixed_ext.mixture(row, public, own).sum().item())
        assert max(sums) - min(sums) <= 1e-12 and abs(max(sums) - 1) <= 1e-12, sums


@pytest.mark.parametrize("gap", [200.0, 550.0, 2_000.0])
def test_scales_as_large_as_they_get(gap: float) -> None:
    """A row with nearly all its mass on one token: the others need s near e^gap, or are absent."""
    private, public = cases.logits(32, 5, 2, 40, 3.0, 1.0)
    private[..., 1:] -= gap
    given = {"lower": 0.5, "upper": 1.5, "orders": [2.0, 18.0]}
    expected = adapmixed_ext.clip_project(private, public, **given)
    with simulated.kernels():
        got = adapmixed_ext.clip_project(private, public, **given)
    assert (expected.log_scale > gap - 100).all()
    torch.testing.assert_close(got.log_scale, expected.log_scale, rtol=1e-9, atol=0.0)
    torch.testing.assert_close(got.charge, expected.charge, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_all_kernels_agree_on_what_counts_as_absent(on_gpu: bool) -> None:
    """A logit that is exactly 600 below the log-sum-exp is there; a copy of the public row is q."""
    public = torch.tensor([[0.0, -46.0, -30.0]])
    private = torch.tensor([[[-700.0, 0.0, -600.0]]])
    rare = torch.tensor([[0.0, -1.0, -650.0]])
    with simulated.kernels() if on_gpu else contextlib.nullcontext():
        found = adapmixed_ext.clip_project(private, public, lower=0.0, upper=1e6, orders=[8.0])
        assert found.charge is not None
        check_charges(found, check_row(private, public, found, 0, 0), 0, 0, [8.0], 1)
        log_prob = adapmixed_ext.log_prob(private, public, found, torch.tensor([2]))
        mixture = adapmixed_ext.mixture(private, public, found)
        assert log_prob.exp().item() == pytest.approx(mixture[0, 2].item())
        copy = adapmixed_ext.clip_project(rare[None], rare, lower=0.0, upper=2.0, orders=[64.0])
        assert copy.charge is not None and copy.charge.item() == 0
        answer = adapmixed_ext.mixture(rare[None], rare, copy).log()
        torch.testing.assert_close(answer, rare.double().log_softmax(-1))
        loss = adapmixed_ext.leave_one_out(
            rare[None], rare, copy, orders=[64.0], adjacency="zero_out"
        )
    assert loss.item() == 0
