"""project, beyond what test_contract.py checks: exact weights, and the margin below the optimum."""

from __future__ import annotations

import cases
import oracle
import torch

import adapmixed_ext


def test_single_precision_stays_below_the_optimum_by_what_it_may_cost() -> None:
    """The margin is 20 float units for the weight, and 20 for the excess (quadratic in the weight).

    See csrc/project/terms.h. Hardly any row needs the margin, so only this test would notice
    its loss.
    """
    private, public = cases.logits(5, 7, 1, 17, 1.0, 1.0)
    for order in (2.0, 2.5):
        result = adapmixed_ext.project(private, public, order=order, radius=0.03)
        for i in range(len(private)):
            more = oracle.mpf(result.weight[i, 0].item()) / (1 - (20 + 20 / 2) * 2.0**-24)
            assert oracle.Ball(private[i, 0], public[0]).admits(more, order, 0.03)


def test_a_token_the_public_model_excludes_leaves_weight_zero(device: torch.device) -> None:
    by_name = {case.name: case.to(device) for case in cases.masked()}
    for name, kept in (("masked-public", 0), ("masked-mixed", 1)):
        case = by_name[name]
        result = adapmixed_ext.project(case.private, case.public, order=18.0, radius=3.6)
        assert (result.weight[:kept] > 0).all()
        assert (result.weight[kept:] == 0).all()


def test_a_model_equal_to_the_public_one_keeps_weight_one(device: torch.device) -> None:
    case = {case.name: case.to(device) for case in cases.identical()}["equal-to-public"]
    for order, radius in cases.balls(cases.EXTREME_ORDERS):
        result = adapmixed_ext.project(case.private, case.public, order=order, radius=radius)
        assert (result.weight == 1).all(), (order, radius)


def test_radius_zero_admits_nothing(device: torch.device) -> None:
    case = cases.ordinary()[3].to(device)
    result = adapmixed_ext.project(case.private, case.public, order=3.0, radius=0.0)
    assert (result.weight == 0).all()
