"""renyi_divergence: upper bounds in both directions, as close as it states."""

from __future__ import annotations

import math

import cases
import checks
import mpmath as mp
import oracle
import pytest
import torch
from cases import Case

import adapmixed_ext
from adapmixed_ext import reference

CASES = cases.small() + cases.corners()
WIDE = cases.wide()
ORDERS = (1 + 1e-8, *cases.EXTREME_ORDERS)


@pytest.mark.parametrize("case", CASES, ids=cases.ids(CASES))
def test_against_the_oracle(case: Case, device: torch.device) -> None:
    case = case.to(device)
    for i in range(min(case.private.shape[0], 3)):
        found = adapmixed_ext.renyi_divergence(case.private[i], case.public, ORDERS)
        for b in range(case.public.shape[0]):
            p, q = oracle.softmax(case.private[i, b]), oracle.softmax(case.public[b])
            for k, order in enumerate(ORDERS):
                truth = oracle.renyi(p, q, order), oracle.renyi(q, p, order)
                for way in (0, 1):
                    got = found[way][b, k].item()
                    where = (way, i, b, order, got, mp.nstr(truth[way], 17))
                    assert checks.loss_holds(got, truth[way], order), where


def compare(p: torch.Tensor, q: torch.Tensor, orders: list[float], device: torch.device) -> None:
    truth = reference.renyi_divergence(p, q, orders)
    got = adapmixed_ext.renyi_divergence(p.to(device), q.to(device), orders)
    most = 600 / (torch.tensor(orders, dtype=torch.float64) - 1)
    for g, t in zip((x.cpu() for x in got), truth, strict=True):
        assert (g >= t * (1 - 1e-9)).all()
        assert ((g <= t * (1 + 1e-4) + 1e-9) | (t > most)).all()


@pytest.mark.parametrize("case", WIDE, ids=cases.ids(WIDE))
def test_wide_vocabularies(case: Case, device: torch.device) -> None:
    compare(case.private, case.public.expand_as(case.private), [*ORDERS], device)


@pytest.mark.parametrize("case", WIDE, ids=cases.ids(WIDE))
def test_wide_vocabularies_on_every_path(case: Case, isa: str) -> None:
    test_wide_vocabularies(case, torch.device("cpu"))


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
    compare(p, q, [order], device)
    compare(q, p, [order], device)


def test_rows_a_bit_apart(device: torch.device) -> None:
    for spread in (0.1, 3.0, 10.0):
        q = spread * torch.randn(1, 64, generator=torch.Generator().manual_seed(7))
        p = torch.where(torch.arange(64) % 3 > 0, q, torch.nextafter(q, q + 1))
        compare(p, q, [*ORDERS], device)


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
        p = torch.randn(*lead, 9, device=device)
        q = torch.randn(*lead, 9, device=device)
        for orders, count in ((2.0, 1), ([2.0], 1), ((1.5, 2, 7), 3), ([2.0, 3.0] * 16, 32)):
            forward, backward = adapmixed_ext.renyi_divergence(p, q, orders)
            assert forward.shape == backward.shape == (*lead, count)


def test_equal_rows_are_at_distance_zero(device: torch.device) -> None:
    equal = (*cases.ordinary()[3::10], cases.masked()[6], *cases.corners()[3:8])
    for case in equal:
        row = case.to(device).public
        for value in adapmixed_ext.renyi_divergence(row, row, ORDERS):
            assert (value == 0).all(), case.name
