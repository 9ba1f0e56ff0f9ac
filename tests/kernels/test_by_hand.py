"""Values known by hand, and properties of answers that no bound of test_operators.py states."""

from __future__ import annotations

import math
from typing import Any

import checks
import fuzzed
import oracle
import plans
import pytest
import torch
from reports import Report, on_device
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Clipping, reference

INF = math.inf
LOWER, UPPER = math.exp(-0.25), math.e


def test_single_precision_stays_below_the_optimum_by_what_it_may_cost() -> None:
    """The margin is 20 float units for the weight, and 20 for the excess (quadratic in the weight).

    See csrc/project/terms.h. Hardly any row needs the margin, so only this test would notice
    its loss.
    """
    private, public = plans.logits(5, 7, 1, 17, 1.0, 1.0)
    rows = oracle.RowPairs(private[:, 0], public, exact=True)
    for order in (2.0, 2.5):
        result = adapmixed_ext.project(private, public, order=order, radius=0.03)
        more = oracle.array(result.weight[:, 0], exact=True) / (1 - (20 + 20 / 2) * 2.0**-24)
        inside, _ = rows.sides(more, order, 0.03)
        assert inside.all()


def test_divergences_of_tokens_below_the_mask(device: torch.device) -> None:
    q = torch.tensor([[0.0, -1.0, -2.0, -1.1e4]], device=device)
    p, hole = q.clone(), q.clone()
    p[:, 3], hole[:, 3] = 0.0, -INF
    for absent in (q, hole):
        forward, backward = adapmixed_ext.renyi_divergence(p, absent, [2.0, 18.0])
        assert (forward == INF).all() and torch.isfinite(backward).all()
    for value in adapmixed_ext.renyi_divergence(q, hole, [2.0, 18.0]):
        assert (value <= 1e-9).all()


def test_shapes_of_divergences(device: torch.device) -> None:
    for lead in ((), (4,), (3, 2), (2, 1, 3), (0,), (2, 0)):
        p, q = torch.randn(2, *lead, 9, device=device)
        for orders, count in ((2.0, 1), ([2.0], 1), ((1.5, 2, 7), 3), ([2.0, 3.0] * 4, 8)):
            forward, backward = adapmixed_ext.renyi_divergence(p, q, orders)
            assert forward.shape == backward.shape == (*lead, count)


# Screening: Algorithm 1, lines 1 to 8, for given noise.


@pytest.mark.parametrize(
    "q,noise,order,divergence",
    [
        # Noise comes before re-scaling: s = (1/4 + 1/4, 1/4) is 2/3 and 1/3.
        ([0.25] * 4, [0.25, 0.0], 2.0, math.log(2 * (4 / 9 + 1 / 9))),
        ([0.25] * 4, [0.0, 0.0], 2.0, 0.0),
        # A negative entry counts 0, and one direction is tested: the other is infinite.
        ([0.5, 0.3, 0.2], [0.0, 0.0, -0.5], 18.0, math.log(5 / 4)),
        ([0.5, 0.3, 0.2], [-2.0, -2.0], 2.0, INF),
    ],
)
def test_screenings(
    q: list[float], noise: list[float], order: float, divergence: float, device: torch.device
) -> None:
    """Of two positions the other one has no noise."""
    public = torch.tensor([q, q], dtype=torch.float64).log().float().to(device)
    drawn = torch.tensor([noise, [0.0] * len(noise)], dtype=torch.float64, device=device)
    options: dict[str, Any] = {"weight": 0.5, "order": order, "top_k": len(noise)}
    screening = adapmixed_ext.screen(public[None], public, drawn, threshold=1e300, **options)
    assert screening.divergence.tolist() == [pytest.approx(divergence, rel=1e-6), 0.0]
    assert screening.passed.tolist() == [divergence < INF, True]
    at = screening.divergence[0].item()
    for threshold, passed in ((at, True), (math.nextafter(at, -1.0), False)):  # it is inclusive
        if 0 < at < INF:
            again = adapmixed_ext.screen(
                public[None], public, drawn, threshold=threshold, **options
            )
            assert again.passed[0].item() is passed


def test_screenings_of_models_that_leave_the_kept_tokens(device: torch.device) -> None:
    """The scores are what remains of q plus a p_i far below q, never a difference of the two."""
    infinite, report = 0, Report()
    for seed in range(100):
        case, noise, options = fuzzed.far_from_public(seed)
        got = on_device(device).screen(case.private, case.public, noise, **options)
        checks.check_screening(case, noise, options, got, report)
        infinite += math.isinf(got.divergence.item())
    assert not report.failures, report.failures[:5]
    assert 2 <= infinite <= 40


# Boxes.


def clip(private: Tensor, public: Tensor, **options: Any) -> Clipping:
    settings = {"lower": LOWER, "upper": UPPER, "orders": [1.01, 3.0, 18.0]} | options
    return adapmixed_ext.clip_project(private, public, **settings)


def rows(seed: int = 0, models: int = 5, vocab: int = 70) -> tuple[Tensor, Tensor]:
    private, public = plans.logits(seed, models, 3, vocab, 2.0, 0.8)
    private[1, :, 7], private[2, 1, 9] = -INF, 12.0
    private[3] = public
    return private, public


def test_no_feasible_distribution_is_nearer() -> None:
    """No random x with c q <= x <= C q has a smaller KL(p||x) or KL(x||p)."""
    private, public = rows()
    private[1, :, 7] = -3.0
    p, q = private.double().softmax(-1), public.double().softmax(-1)
    bar = reference.clip_project(private, public, lower=LOWER, upper=UPPER)
    ours = (p * (p / bar).log()).sum(-1), (bar * (bar / p).log()).sum(-1)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 0.1, 1.0, 5.0) * 3:
        noise = size * torch.randn(private.shape, generator=generator)
        x = reference.clip_project(
            (bar * noise.exp()).log(), public, lower=LOWER, upper=UPPER
        )  # feasible: inside the box, with sum 1
        assert ((x >= LOWER * q * (1 - 1e-12)) & (x <= UPPER * q * (1 + 1e-12))).all()
        assert ((p * (p / x).log()).sum(-1) >= ours[0] - 1e-9).all()
        assert ((x * (x / p).log()).sum(-1) >= ours[1] - 1e-9).all()


def test_members_that_take_no_part_are_charged_alike() -> None:
    private, public = rows(seed=5)
    nobody = torch.zeros(private.shape[:2], dtype=torch.bool)
    whole, idle = (clip(private, public, active=active) for active in (None, nobody))
    assert whole.charge is not None and idle.charge is not None
    assert torch.equal(idle.charge, whole.charge)
    assert (adapmixed_ext.leave_one_out(private, public, idle, orders=3.0) == 0).all()
    bare = clip(private, public, orders=None)
    assert bare.check().charge is None and torch.equal(bare.log_scale, whole.log_scale)


def test_a_box_without_room_charges_nothing() -> None:
    for lower, upper in ((1.0, 5.0), (0.2, 1.0)):
        none = clip(*rows(), lower=lower, upper=upper)
        assert none.charge is not None and (none.charge == 0).all()
        assert (none.lower, none.upper) == (1.0, 1.0)


def test_a_nan_among_far_tokens_is_noticed(isa: str) -> None:
    public, private = torch.tensor([[0.0, -20.0, -1.0]]), torch.tensor([[[0.0, -20.5, -1.2]]])
    clipping = clip(private, public)
    private[0, 0, 1] = math.nan
    with pytest.raises(ValueError, match="projection must belong to these logits"):
        adapmixed_ext.mixture(private, public, clipping)


def test_long_rows_sum_alike(isa: str) -> None:
    """Adding a row up in one chain would be off by more than 1e-12, in one direction."""
    vocab = 2**20
    public, private = torch.zeros(1, vocab), torch.zeros(3, 1, vocab)
    levels = ((0.1, 0.3), (0.3, 5.0), (0.001, 0.3))
    for row, (share, height) in zip(private, levels, strict=True):
        row[0, : int(share * vocab)] += height
    whole = clip(private, public, lower=0.1, upper=250.0)
    for i in range(3):
        bar = adapmixed_ext.mixture(private[i : i + 1], public, checks.row_of(whole, i))
        assert abs(math.fsum(bar[0].tolist()) - 1) <= 2.5e-13
