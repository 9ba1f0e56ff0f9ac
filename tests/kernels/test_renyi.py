"""renyi_divergence: both directions, from order 1 (KL) to inf (max-divergence)."""

from __future__ import annotations

import math

import cases
import mpmath as mp
import oracle
import pytest
import torch
from cases import Case
from mpmath import mpf

import adapmixed_ext
from adapmixed_ext import reference

SMALL = cases.small()
CORNERS = cases.corners()
WIDE = cases.wide()
ORDERS = (1.0, *cases.EXTREME_ORDERS, math.inf)


@pytest.mark.parametrize("case", SMALL, ids=cases.ids(SMALL))
def test_against_the_oracle(case: Case, device: torch.device) -> None:
    compare(case, device, close=True)


@pytest.mark.parametrize("case", CORNERS, ids=cases.ids(CORNERS))
def test_corners_are_never_under_reported(case: Case, device: torch.device) -> None:
    compare(case, device, close=False)


def compare(case: Case, device: torch.device, close: bool) -> None:
    case = case.to(device)
    for i in range(min(case.private.shape[0], 3)):
        forward, backward = adapmixed_ext.renyi_divergence(case.private[i], case.public, ORDERS)
        for value in (forward, backward):
            assert value.dtype == torch.float64
            assert value.shape == (case.public.shape[0], len(ORDERS))
        for b in range(case.public.shape[0]):
            p, q = oracle.softmax(case.private[i, b]), oracle.softmax(case.public[b])
            for k, order in enumerate(ORDERS):
                for name, value, truth in (
                    ("forward", forward, oracle.renyi(p, q, order)),
                    ("backward", backward, oracle.renyi(q, p, order)),
                ):
                    check(value[b, k].item(), truth, (name, i, b, order), close)


def check(got: float, truth: mpf, where: object, close: bool) -> None:
    if mp.isinf(truth):
        assert got == math.inf, where
    else:
        where = (where, got, mp.nstr(truth, 17))
        assert got >= 0 and mpf(got) >= truth * (1 - 1e-6) - 1e-12, where
        assert not close or mpf(got) <= truth * (1 + 1e-5) + 1e-12, where


@pytest.mark.parametrize("case", WIDE, ids=cases.ids(WIDE))
def test_wide_vocabularies(case: Case, device: torch.device) -> None:
    public = case.public.expand_as(case.private)
    truth = reference.renyi_divergence(case.private, public, ORDERS)
    got = adapmixed_ext.renyi_divergence(case.private.to(device), public.to(device), ORDERS)
    for g, t in zip(got, truth, strict=True):
        torch.testing.assert_close(g.cpu(), t, rtol=1e-5, atol=1e-12)


def test_shapes(device: torch.device) -> None:
    for lead in ((), (4,), (3, 2), (2, 1, 3), (0,), (2, 0)):
        p = torch.randn(*lead, 9, device=device)
        q = torch.randn(*lead, 9, device=device)
        for orders, count in ((2.0, 1), ([2.0], 1), ((1, 2, math.inf), 3)):
            forward, backward = adapmixed_ext.renyi_divergence(p, q, orders)
            assert forward.shape == backward.shape == (*lead, count)


def test_directions_swap_with_the_arguments(device: torch.device) -> None:
    case = cases.masked()[1].to(device)
    q = case.public.expand_as(case.private)
    forward, backward = adapmixed_ext.renyi_divergence(case.private, q, ORDERS)
    again = adapmixed_ext.renyi_divergence(q, case.private, ORDERS)
    torch.testing.assert_close(again[0], backward, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(again[1], forward, rtol=1e-6, atol=1e-12)
    assert torch.isfinite(forward).all() and torch.isinf(backward).all()


def test_equal_rows_are_at_distance_zero(device: torch.device) -> None:
    for case in (cases.ordinary()[3], cases.ordinary()[13], cases.masked()[6]):
        row = case.to(device).public
        for value in adapmixed_ext.renyi_divergence(row, row, ORDERS):
            assert (value == 0).all()


def test_closed_form_of_two_tokens(device: torch.device) -> None:
    """P = (1/2, 1/2), Q = (1/4, 3/4): D_2 = log(1/4 * 4 + 1/4 * 4/3) = log(4/3)."""
    p = torch.zeros(2, device=device)
    q = torch.tensor([0.0, math.log(3.0)], device=device)
    forward, backward = adapmixed_ext.renyi_divergence(p, q, [2.0, 1.0, math.inf])
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    back = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    truth = [math.log(4 / 3), kl, math.log(2)]
    truth_back = [math.log(2 / 16 + 18 / 16), back, math.log(1.5)]
    torch.testing.assert_close(forward.cpu().tolist(), truth, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(backward.cpu().tolist(), truth_back, rtol=1e-6, atol=0.0)
