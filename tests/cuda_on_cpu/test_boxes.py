"""clip_project and the operators that take a Clipping: the CPU's answers up to rounding."""

from __future__ import annotations

import math

import cases
import pytest
import simulated
import torch
from test_clip_offsets import BOXES as OFFSET_BOXES
from test_clip_offsets import shifted
from torch import Tensor

import adapmixed_ext

BOXES = ((0.6, 1.65), (0.78, math.e), (0.9, 1e6), (1e-300, 3.0), (0.5, 1e60), (1.0, 2.0))
CASES = (
    cases.masked() + cases.identical() + cases.canary() + cases.corners() + cases.ordinary()[-5:]
)


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
        *(
            adapmixed_ext.leave_one_out(
                *given, orders=[2.0, 7.5], adjacency=adjacency, num_models=slots
            )
            for adjacency in ("add_remove", "zero_out")
            for slots in (len(case.private), 9)
        ),
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
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-12)


def test_the_order_of_threads_does_not_matter() -> None:
    private, public = cases.logits(9, 4, 2, 300, 2.0, 0.7)
    results = []
    for order in simulated.ORDERS:
        with simulated.kernels(*order):
            results.append(answers(cases.Case("", private, public), 0.6, 2.5, None))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_bad_rows_say_nothing() -> None:
    private, public = cases.logits(9, 3, 2, 40, 2.0, 0.7)
    private[1, 0, 3] = math.nan
    with simulated.kernels():
        got = adapmixed_ext.clip_project(private, public, lower=0.5, upper=2.0, orders=3.0)
        with pytest.raises(ValueError, match=r"private_logits\[1, 0\] contains NaN"):
            got.check()
        assert got.charge is not None and got.charge[1, 0].item() == math.inf
        mixture = adapmixed_ext.mixture(private, public, got)
        assert mixture[0].isnan().all() and not mixture[1].isnan().any()
        loss = adapmixed_ext.leave_one_out(private, public, got, orders=3.0)
        assert (loss[:, 0] == math.inf).all() and (loss[:, 1] < math.inf).all()
        other = adapmixed_ext.mixture(private.roll(1, -1), public, got)
        assert other.isnan().all()


def test_a_logit_that_becomes_nan_at_a_rare_token() -> None:
    """The box would clip it, and neither the balance nor the sum of the row would notice."""
    public = torch.zeros(1, 200)
    public[0, 7] = -20.0
    private = public.expand(4, 1, 200).clone()
    private[0, 0, :100] += 1.0
    box = adapmixed_ext.clip_project(private, public, lower=0.5, upper=2.0)
    private[0, 0, 7] = math.nan
    with simulated.kernels():
        assert adapmixed_ext.mixture(private, public, box).isnan().all()
        loss = adapmixed_ext.leave_one_out(private, public, box, orders=[18.0])
    assert (loss == math.inf).all()
    with pytest.raises(ValueError):
        adapmixed_ext.mixture(private, public, box)
    with pytest.raises(ValueError):
        adapmixed_ext.leave_one_out(private, public, box, orders=[18.0])


@pytest.mark.parametrize("offsets", ((-8.7e5, 9.3e5), (9.9e5, 9.9e5)))
def test_large_logits(offsets: tuple[float, float]) -> None:
    """All rows of a position sum alike: see tests/kernels/test_clip_offsets.py."""
    private, public = shifted(*cases.logits(31, 3, 1, 60, 3.0, 1.5), offsets)
    for k, (lower, upper) in enumerate(OFFSET_BOXES):
        sums = []
        with simulated.kernels(*simulated.ORDERS[k % len(simulated.ORDERS)]):
            for row in private.split(1):
                own = adapmixed_ext.clip_project(row, public, lower=lower, upper=upper)
                sums.append(adapmixed_ext.mixture(row, public, own).sum().item())
        assert max(sums) - min(sums) <= 1e-12, (lower, upper, sums)
        assert max(abs(x - 1) for x in sums) <= 1e-12 + 2.0**-52 * 1e6
