"""renyi_divergence, beyond what test_contract.py checks: rare and masked tokens, and shapes."""

from __future__ import annotations

import math

import cases
import checks
import pytest
import torch
from cases import Case, Plan
from checks import OnDevice, Report
from torch import Tensor

import adapmixed_ext

ORDERS = cases.EXTREME_ORDERS


def compare(p: Tensor, q: Tensor, orders: tuple[float, ...], device: torch.device) -> None:
    report, case = Report(), Case("pairs", p[None], q, orders=orders)
    checks.check_renyi_divergence(case, Plan(), OnDevice(device), report)
    assert not report.failures, report.failures[:5]


@pytest.mark.parametrize("order", [2.0, 3.0, 18.0, 256.0, 1024.0])
def test_a_rare_token_makes_up_the_divergence(order: float, device: torch.device) -> None:
    """Its p is e^-29 to e^-59 and its term near 1: what floats lose of log p and t counts most."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand(2000, 3, generator=generator)
    rare = 59.5 - 30 * drawn[:, 0] ** 3
    apart = (rare + 2 * drawn[:, 1] - 1).div(order - 1).clamp(max=29.0)
    log_q = (rare + apart).clamp(max=59.5)
    offset = 40 * drawn[:, 2] - 20
    p = torch.stack([offset, apart - log_q + offset, *[offset - 4] * 30], -1)
    q = torch.stack([offset + 0.1, offset + 0.1 - log_q, *[offset - 3.9] * 30], -1)
    compare(p, q, (order,), device)


def test_rows_a_bit_apart(device: torch.device) -> None:
    for spread in (0.1, 3.0, 10.0):
        q = spread * torch.randn(1, 64, generator=torch.Generator().manual_seed(7))
        p = torch.where(torch.arange(64) % 3 > 0, q, torch.nextafter(q, q + 1))
        compare(p, q, ORDERS, device)


def test_tokens_below_the_mask_are_absent(device: torch.device) -> None:
    q = torch.tensor([[0.0, -1.0, -2.0, -1.1e4]], device=device)
    p, hole = q.clone(), q.clone()
    p[:, 3], hole[:, 3] = 0.0, -math.inf
    for absent in (q, hole):
        forward, backward = adapmixed_ext.renyi_divergence(p, absent, [2.0, 18.0])
        assert (forward == math.inf).all() and torch.isfinite(backward).all()
    for value in adapmixed_ext.renyi_divergence(q, hole, [2.0, 18.0]):
        assert (value <= 1e-9).all()


def test_shapes(device: torch.device) -> None:
    for lead in ((), (4,), (3, 2), (2, 1, 3), (0,), (2, 0)):
        p, q = torch.randn(2, *lead, 9, device=device)
        for orders, count in ((2.0, 1), ([2.0], 1), ((1.5, 2, 7), 3), ([2.0, 3.0] * 4, 8)):
            forward, backward = adapmixed_ext.renyi_divergence(p, q, orders)
            assert forward.shape == backward.shape == (*lead, count)


def test_equal_rows_are_at_distance_zero(device: torch.device) -> None:
    for case in (*cases.ordinary()[3::10], cases.masked()[6], *cases.corners()[3:8]):
        row = case.to(device).public
        for value in adapmixed_ext.renyi_divergence(row, row, ORDERS):
            assert (value == 0).all(), case.name
