"""project: the largest weight inside the Rényi ball, approached from below."""

from __future__ import annotations

import math
from functools import cache

import cases
import checks
import oracle
import pytest
import torch
from cases import Case

import adapmixed_ext
from adapmixed_ext import reference

SMALL = cases.small()
CORNERS = cases.corners()
WIDE = cases.wide()


@pytest.mark.parametrize("case", SMALL, ids=cases.ids(SMALL))
def test_feasible_and_nearly_maximal(case: Case, device: torch.device) -> None:
    check_grid(case.to(device), cases.ORDERS, maximal=True)


@pytest.mark.parametrize("case", SMALL, ids=cases.ids(SMALL))
def test_feasible_at_extreme_orders(case: Case, device: torch.device) -> None:
    check_grid(case.to(device), (256.0, 1024.0), maximal=False)


@pytest.mark.parametrize("case", CORNERS, ids=cases.ids(CORNERS))
def test_corners_are_feasible(case: Case, device: torch.device) -> None:
    check_grid(case.to(device), cases.EXTREME_ORDERS, maximal=False)


def check_grid(case: Case, orders: tuple[float, ...], maximal: bool) -> None:
    private, public = case.private, case.public
    balls = {(i, b): oracle.Ball(private[i, b], public[b]) for i, b in distinct_rows(case)}
    for order, radius in cases.balls(orders):
        result = adapmixed_ext.project(private, public, order=order, radius=radius).check()
        weight, complement = result.weight.cpu(), result.complement.cpu()
        assert weight.dtype == complement.dtype == torch.float64
        assert weight.shape == complement.shape == private.shape[:2]
        for (i, b), ball in balls.items():
            w, c = weight[i, b].item(), complement[i, b].item()
            where = f"row ({i}, {b}) order {order} radius {radius}: {w!r}, {c!r}"
            assert 0 <= w <= 1 and 0 <= c <= 1 and abs(w + c - 1) < 1e-15, where
            assert (w == 1) == (c == 0), where
            assert ball.admits(w, c, order, radius), where
            if maximal:
                assert not checks.weight_fault(ball, w, c, order, radius), where


def distinct_rows(case: Case) -> list[tuple[int, int]]:
    """Return one index of each distinct pair of rows, because the oracle is slow."""
    seen: dict[tuple[float, ...], tuple[int, int]] = {}
    for i, b in case.rows:
        key = (*case.private[i, b].tolist(), *case.public[b].tolist())
        seen.setdefault(key, (i, b))
    return list(seen.values())


def ranged() -> list[Case]:
    """Return rows with small and large differences, rare tokens, and log-sum-exps far from 0."""
    plans = [(0.1, 0.05, 5), (1.0, 0.01, 17), (3.0, 0.6, 17), (10.0, 3.0, 9)]
    result = []
    for seed, (spread, noise, vocab) in enumerate(plans):
        private, public = cases.logits(40 + seed, 2, 1, vocab, spread, noise)
        private[1] = private[1].double().sub(700.0).float()
        name = f"spread{spread}-noise{noise}"
        result.append(Case(name, private, public + 300.0 * (seed % 2)))
    by_name = {case.name: case for case in (*cases.canary(), *cases.masked())}
    return [*result, by_name["canary-N4"], by_name["masked-one-model"]]


@pytest.mark.parametrize("order", [1.01, 2.0, 64.0, 1024.0])
@pytest.mark.parametrize("radius", [1e-9, 1e-7, 1e-5, 1e-4, 1e-2, 0.5])
def test_radii_around_the_least_one(order: float, radius: float, device: torch.device) -> None:
    """Weights are near the optimum from a radius of 1e-5 on, and feasible below it."""
    for case in ranged():
        moved = case.to(device)
        result = adapmixed_ext.project(moved.private, moved.public, order=order, radius=radius)
        for i, b in case.rows:
            ball = oracle.Ball(case.private[i, b], case.public[b])
            w, c = result.weight[i, b].item(), result.complement[i, b].item()
            fault = checks.weight_fault(ball, w, c, order, radius)
            assert not fault, (fault, case.name, (i, b), w, c)


def test_single_precision_stays_below_the_optimum_by_what_it_may_cost() -> None:
    """The margin is 20 float units for the weight, and 20 for the excess (quadratic in the weight).

    See csrc/project/terms.h. Hardly any row needs the margin, so only this test would notice
    its loss.
    """
    private, public = cases.logits(5, 7, 1, 17, 1.0, 1.0)
    for order in (2.0, 2.5):
        result = adapmixed_ext.project(private, public, order=order, radius=0.03)
        for i in range(len(private)):
            optimum, _ = oracle.Ball(private[i, 0], public[0]).optimum(order, 0.03)
            below = float(1 - result.weight[i, 0].item() / optimum)
            assert (20 + 20 / 2) * 2.0**-24 <= below <= checks.weight_tolerance(order), (order, i)


@cache  # a whole vocabulary takes seconds
def optimum(index: int, order: float, radius: float) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.project(WIDE[index].private, WIDE[index].public, order=order, radius=radius)


@pytest.mark.parametrize("index", range(len(WIDE)), ids=cases.ids(WIDE))
def test_wide_vocabularies(index: int, device: torch.device) -> None:
    case = WIDE[index]
    for order, radius in ((3.0, 0.03), (2.5, 0.03), (17.5, 1e-3), (18.0, 3.6), (64.0, 9.5)):
        weight, _ = optimum(index, order, radius)
        moved = case.to(device)
        result = adapmixed_ext.project(moved.private, moved.public, order=order, radius=radius)
        got = result.weight.cpu()
        assert (got <= weight * (1 + 1e-9)).all(), (order, radius)
        assert (got >= weight * (1 - checks.weight_tolerance(order))).all(), (order, radius)


@pytest.mark.parametrize("index", range(len(WIDE)), ids=cases.ids(WIDE))
def test_wide_vocabularies_on_every_path(index: int, isa: str) -> None:
    test_wide_vocabularies(index, torch.device("cpu"))


def just_unlisted() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row with a target of e^20 and 598 tokens just too rare for the list of tokens."""
    vocab, target = 600, math.exp(20.0)
    p = torch.full((vocab,), 0.5 / (vocab - 2), dtype=torch.float64)
    q = p**2 * vocab / (0.6 * target * 1e-6)
    p[-2:] = torch.tensor([0.4, 0.1])
    q[-2] = 0.16 * 0.45**2 / target
    q[-1] = 1 - q[:-1].sum()
    return p.log().float(), q.log().float()


def pair(private: list[float], public: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(private), torch.tensor(public)


def far_apart() -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-sum-exps 600 apart: rounding z - z_0 in floats gave a weight above the optimum."""
    private = torch.tensor([0.2969741225242615, 1.254364013671875, 0.23730520904064178])
    return private, torch.tensor([601.1116943359375, 588.3486938476562, 600.4000854492188])


@pytest.mark.parametrize(
    "rows,order,radius",
    [
        (just_unlisted(), 2.0, 20.0),
        (far_apart(), 8.0, 0.5),
        # An order that floats do not tell from 1, logits that were not exact minus the centre of
        # their row, rows that differ by one bit, and a step that ended among the least floats.
        (pair([0.0, -0.018886566162109375], [0.0, -15.117728233337402]), 1.00000003, 1.0),
        (pair([0.0, -189.16920471191406], [401.0, 126.83079528808594]), 18.0, 1.0),
        (pair([36.18584442138672, 2.4780069e-05], [36.18584442138672, 2.4780067e-05]), 2.0, 0.0),
        (pair([0.0, -5.878195762634277], [0.0, -15.677648544311523]), 60.0, 2.34826360443032),
    ],
)
def test_rows_that_once_failed(
    rows: tuple[torch.Tensor, torch.Tensor], order: float, radius: float, device: torch.device
) -> None:
    private, public = rows
    result = adapmixed_ext.project(
        private[None, None].to(device), public[None].to(device), order=order, radius=radius
    )
    found = result.weight.item(), result.complement.item()
    if order < 1.01:  # far from the optimum
        assert oracle.Ball(private, public).admits(*found, order, radius), found
    else:
        assert not checks.weight_fault(oracle.Ball(private, public), *found, order, radius), found


def test_log_sum_exps(device: torch.device) -> None:
    for case in (*cases.ordinary(), *cases.masked(), *cases.wide()):
        moved = case.to(device)
        result = adapmixed_ext.project(moved.private, moved.public, order=2.0, radius=0.5)
        for lse, logits in (
            (result.private_lse, case.private), (result.public_lse, case.public)
        ):  # fmt: skip
            assert lse.dtype == torch.float64
            exact = torch.logsumexp(logits.double(), -1)
            torch.testing.assert_close(lse.cpu(), exact, rtol=0.0, atol=1e-7)


def test_a_token_the_public_model_excludes_leaves_weight_zero(device: torch.device) -> None:
    by_name = {case.name: case.to(device) for case in cases.masked()}
    result = project(by_name["masked-public"])
    assert (result.weight == 0).all() and (result.complement == 1).all()
    result = project(by_name["masked-mixed"])
    assert result.weight[0, 0] > 0
    assert (result.weight[1:] == 0).all() and (result.complement[1:] == 1).all()


def test_a_model_equal_to_the_public_one_keeps_weight_one(device: torch.device) -> None:
    case = {case.name: case.to(device) for case in cases.identical()}["equal-to-public"]
    for order, radius in cases.balls(cases.EXTREME_ORDERS):
        result = adapmixed_ext.project(case.private, case.public, order=order, radius=radius)
        assert (result.weight == 1).all() and (result.complement == 0).all(), (order, radius)


def test_radius_zero_admits_nothing(device: torch.device) -> None:
    case = cases.ordinary()[3].to(device)
    result = adapmixed_ext.project(case.private, case.public, order=3.0, radius=0.0)
    assert (result.weight == 0).all() and (result.complement == 1).all()


def project(case: Case) -> adapmixed_ext.Projection:
    return adapmixed_ext.project(case.private, case.public, order=18.0, radius=3.6)
