"""log_pool, and mixture and log_prob of a LogPool, against the oracles and by their properties."""

from __future__ import annotations

import math

import cases
import mpmath as mp
import oracle
import pools
import pytest
import torch
from cases import Case
from checks import Report
from mpmath import mpf
from pools import SETTINGS, Setting
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import LogPool

SMALL = cases.small()
USUAL = SETTINGS[0]


def pool_of(private: Tensor, public: Tensor, setting: Setting = USUAL, **more: object) -> LogPool:
    options = {**setting.options(private.shape[0]), **more}
    return adapmixed_ext.log_pool(private, public, **options)


@pytest.mark.parametrize("case", SMALL, ids=cases.ids(SMALL))
@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[1], SETTINGS[4]])
def test_against_the_oracle(case: Case, setting: Setting, device: torch.device) -> None:
    case = case.to(device)
    models, positions = case.private.shape[:2]
    pool = pool_of(case.private, case.public, setting)
    assert pool.log_normaliser.dtype == pool.span.dtype == torch.float64
    assert pool.span.shape == (models, positions) and pool.log_normaliser.shape == (positions,)
    mixture, log_prob = pools.probabilities(case.private, case.public, pool)
    assert mixture.dtype == log_prob.dtype == torch.float64
    lse = pool.private_lse.cpu()
    errors = pools.Truth(case.private.cpu(), case.public.cpu(), setting, lse)
    for b in range(positions):
        p, log_normaliser, spans = oracle.log_pool(
            case.private[:, b], case.public[b], lower=setting.lower, upper=setting.upper,
            scale=setting.scale, slots=models + setting.extra, private_lse=lse[:, b].tolist(),
        )  # fmt: skip
        bound = errors.log_error[b].max().item()
        assert abs(mpf(pool.log_normaliser[b].item()) - log_normaliser) <= bound
        for i, span in enumerate(spans):
            assert abs(mpf(pool.span[i, b].item()) - span) <= 2 * errors.ratio_error[i, b].item()
        for v, exact in enumerate(p):
            got, log_got = mixture[b, v].item(), log_prob[b, v].item()
            if exact == 0:
                assert got == 0.0 and log_got == -math.inf
                continue
            assert abs(mpf(log_got) - mp.log(exact)) <= errors.log_error[b, v].item()
            assert abs(mpf(got) - exact) <= bound * exact + mpf(2) ** -1021


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_instruction_set(setting: Setting, isa: str) -> None:
    for case in SMALL + cases.wide()[:1]:
        report = pools.check_pool(case.private, case.public, setting)
        assert not report.failures, (case.name, report.failures)


@pytest.mark.parametrize("case", cases.wide(), ids=cases.ids(cases.wide()))
def test_wide_vocabularies(case: Case, device: torch.device) -> None:
    moved = case.to(device)
    active = torch.rand(case.private.shape[:2], generator=torch.Generator().manual_seed(1)) < 0.6
    for setting in SETTINGS[:4]:
        pool = pool_of(moved.private, moved.public, setting, active=active.to(device))
        mixture = adapmixed_ext.mixture(moved.private, moved.public, pool)
        targets = torch.tensor([5, 7])[: case.public.shape[0]]
        log_prob = adapmixed_ext.log_prob(moved.private, moved.public, pool, targets.to(device))
        truth = pools.Truth(case.private, case.public, setting, pool.private_lse.cpu(), active)
        report = Report()
        pools.check_answers(
            truth, pool, mixture, targets.unsqueeze(1), log_prob.cpu().unsqueeze(1), report
        )
        assert not report.failures, report.failures


def test_q_remains_without_a_box_without_a_scale_and_of_equal_rows(device: torch.device) -> None:
    for case in (*cases.masked(), *cases.wide()):
        case = case.to(device)
        q = torch.softmax(case.public.double(), -1)
        same = case.public.expand_as(case.private)
        for private, setting in (
            (case.private, Setting(0.0, 0.0, 2.0)),
            (case.private, Setting(-1.0, 2.0, 0.0)),
            (same, Setting(-1.0, 2.0, 1.5)),
        ):
            pool = pool_of(private, case.public, setting)
            mixture = adapmixed_ext.mixture(private, case.public, pool)
            torch.testing.assert_close(mixture, q, rtol=1e-11, atol=1e-300)
            assert ((mixture == 0) == torch.isneginf(case.public)).all(), case.name
            assert (pool.log_normaliser.abs() < 1e-11).all(), case.name
            if private is same or setting.reach == 0:
                assert (pool.span == 0).all(), case.name


def test_masks(device: torch.device) -> None:
    """q = 0 gives p = 0 even if models have the token; p_i = 0 < q is clipped to a."""
    by_name = {case.name: case.to(device) for case in cases.masked()}
    case = by_name["masked-mixed"]
    pool = pool_of(case.private, case.public)
    p = adapmixed_ext.mixture(case.private, case.public, pool)
    assert p[0, 4].item() == 0.0 and (p[0, :4] > 0).all() and (p[0, 5:] > 0).all()
    four = torch.tensor([4], device=device)
    assert adapmixed_ext.log_prob(case.private, case.public, pool, four).item() == -math.inf
    case = by_name["masked-private"]  # all three models lack token 7
    pool = pool_of(case.private, case.public)
    log_p = adapmixed_ext.mixture(case.private, case.public, pool).log()
    log_ratio = log_p - torch.log_softmax(case.public.double(), -1) + pool.log_normaliser[:, None]
    assert abs(log_ratio[0, 7].item() + 0.25 * USUAL.scale) < 1e-13
    assert log_ratio.min().item() > -0.25 * USUAL.scale - 1e-13
    point = by_name["private-point-mass"]
    assert (pool_of(point.private, point.public).span == 1.25).all()


def test_slots_that_are_inactive_or_absent_have_no_part(device: torch.device) -> None:
    private, public = cases.logits(60, 6, 3, 300, 2.0, 0.7)
    private, public = private.to(device), public.to(device)
    active = torch.tensor([[True] * 3, [False] * 3, [True, False, True]] * 2, device=device)
    emptied = torch.where(active.unsqueeze(-1), private, public)
    some = pool_of(private, public, active=active)
    for pool, rows in ((some, private), (pool_of(emptied, public), emptied)):
        p = adapmixed_ext.mixture(rows, public, pool)
        log_prob = adapmixed_ext.log_prob(rows, public, pool, torch.arange(3, device=device))
        for b in range(3):
            present = private[active[:, b], b : b + 1].contiguous()
            alone = pool_of(present, public[b : b + 1], num_models=6)
            assert torch.equal(alone.log_normaliser[0], pool.log_normaliser[b])
            row = adapmixed_ext.mixture(present, public[b : b + 1], alone)
            assert torch.equal(row[0], p[b])
            torch.testing.assert_close(log_prob[b], p[b, b].log(), rtol=1e-13, atol=0.0)
    # The span of an inactive member is known before it takes part.
    assert torch.equal(some.span, pool_of(private, public).span)
    none = pool_of(private, public, active=torch.zeros_like(active))
    q = torch.softmax(public.double(), -1)
    torch.testing.assert_close(adapmixed_ext.mixture(private, public, none), q)


def test_the_order_of_models_does_not_change_a_bit(device: torch.device) -> None:
    private, public = cases.logits(62, 9, 2, 3000, 2.0, 0.7)
    private, public = private.to(device), public.to(device)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    one, other = pool_of(private, public), pool_of(private[order], public)
    assert torch.equal(one.log_normaliser, other.log_normaliser)
    assert torch.equal(one.span[order], other.span)
    assert torch.equal(
        adapmixed_ext.mixture(private, public, one),
        adapmixed_ext.mixture(private[order], public, other),
    )


def test_identical_models_are_one(device: torch.device) -> None:
    private, public = cases.logits(64, 1, 2, 700, 2.0, 0.7)
    private, public = private.to(device), public.to(device)
    one = pool_of(private, public)
    for copies in (2, 4, 8):  # the mean of equal models is exactly one log-ratio
        rows = private.expand(copies, 2, 700)
        many = pool_of(rows, public)
        assert torch.equal(many.log_normaliser, one.log_normaliser)
        assert torch.equal(many.span, one.span.expand(copies, 2))


def test_many_slots_take_a_coarser_grid() -> None:
    private, public = cases.logits(65, 3, 1, 50, 2.0, 0.7)
    setting = Setting(-32.0, 32.0, 1.0, 2**16 - 3)
    assert setting.unit(3) > 2.0**-40
    report = pools.check_pool(private, public, setting)
    assert not report.failures, report.failures


def test_known_log_sum_exps_are_taken(isa: str) -> None:
    private, public = cases.logits(12, 5, 2, 300, 2.0, 1.0)
    private[3] = public
    exact = [rows.double().logsumexp(-1) for rows in (private, public)]
    known = exact[0] - exact[1]
    box = {"lower": -0.25, "upper": 1.0, "scale": 2.0}
    pool = adapmixed_ext.log_pool(private, public, **box, lse_differences=known)
    torch.testing.assert_close(pool.private_lse, exact[0], rtol=0.0, atol=1e-12)
    assert torch.equal(pool.private_lse[3], pool.public_lse)
    other = adapmixed_ext.log_pool(private, public, **box)
    torch.testing.assert_close(pool.log_normaliser, other.log_normaliser, rtol=0.0, atol=2e-6)
    with pytest.raises(ValueError, match="lse_differences must be torch.float64 of shape"):
        adapmixed_ext.log_pool(private, public, **box, lse_differences=known.float())
