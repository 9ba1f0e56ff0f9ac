"""screen, beyond what test_contract.py checks: Algorithm 1, lines 1 to 8, for given noise."""

from __future__ import annotations

import math
from typing import Any

import cases
import checks
import pytest
import torch
from cases import Case
from checks import Report
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Screening

INF = math.inf


def screen(private: Tensor, public: Tensor, noise: Any, **options: Any) -> Screening:
    """Screen with as many tokens as there are numbers in ``noise``."""
    noise = torch.as_tensor(noise, dtype=torch.float64).to(public.device)
    given = {"weight": 0.5, "order": 2.0, "threshold": 1.0, "top_k": noise.shape[1]} | options
    return adapmixed_ext.screen(private, public, noise, **given)


def check(private: Tensor, public: Tensor, noise: Tensor, device: torch.device) -> None:
    """Check one screening against the oracle."""
    report, case = Report(), Case("own", private, public)
    options: dict[str, Any] = {
        "weight": 0.5, "order": 3.0, "threshold": 0.5, "top_k": noise.shape[1],
        "num_models": len(private), "active": None,
    }  # fmt: skip
    got = checks.OnDevice(device).screen(private, public, noise, **options)
    checks.check_screening(case, noise, options, got, report)
    assert not report.failures, report.failures


def test_noise_comes_before_rescaling(device: torch.device) -> None:
    """For uniform q on 4 tokens and top 2, s = (1/4 + 1/4, 1/4).

    That is 2/3 and 1/3 against 1/2 and 1/2.
    """
    public = torch.zeros(1, 4, device=device)
    result = screen(public[None], public, [[0.25, 0.0]])
    assert result.divergence.item() == pytest.approx(math.log(2 * (4 / 9 + 1 / 9)), rel=1e-12)


def test_every_position_has_its_own_noise(device: torch.device) -> None:
    public = torch.zeros(2, 4, device=device)
    result = screen(public[None], public, [[0.0, 0.0], [0.25, 0.0]])
    assert result.divergence[0] == 0 and result.divergence[1] > 0.1


def test_ties_go_to_the_lower_index(device: torch.device) -> None:
    public = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0]])
    noise = torch.tensor([[0.05, 0.0, 0.0, -0.04]], dtype=torch.float64)
    for shifted in range(5):
        private = public.clone()[None]
        private[0, 0, shifted] += 2.0
        check(private, public, noise, device)


def test_only_tokens_of_the_public_support_are_kept(device: torch.device) -> None:
    public = torch.tensor([[0.0, -INF, 1.0, -INF]])
    noise = torch.tensor([[0.01, -0.02, 5.0, 7.0]], dtype=torch.float64)
    check(torch.zeros(2, 1, 4), public, noise, device)


def test_nothing_left_counts_infinite(device: torch.device) -> None:
    case = cases.ordinary()[3].to(device)
    result = screen(case.private, case.public, torch.full((2, 3), -2.0), threshold=1e300)
    assert (result.divergence == INF).all() and not result.passed.any()


def test_a_negative_entry_counts_zero_and_one_direction_is_tested(device: torch.device) -> None:
    """s = (1/2, 3/10, -3/10) becomes (5/8, 3/8, 0): D(s‖q) = log(5/4), and D(q‖s) is infinite."""
    public = torch.tensor([[0.5, 0.3, 0.2]], device=device).double().log().float()
    result = screen(public[None], public, [[0.0, 0.0, -0.5]], order=18.0, threshold=4.5)
    assert result.divergence.item() == pytest.approx(math.log(5 / 4), rel=1e-6)
    assert result.passed.item()


def test_inactive_slots_answer_the_public_distribution(device: torch.device) -> None:
    """The table checks some that are active; here nobody is."""
    case = cases.ordinary()[2].to(device)
    noise = 0.01 * torch.randn(1, 5, generator=torch.Generator().manual_seed(11))
    nobody = torch.zeros(case.private.shape[:2], dtype=torch.bool, device=device)
    off = screen(case.private, case.public, noise, active=nobody, weight=0.7)
    same = screen(case.public.expand_as(case.private), case.public, noise, weight=0.7)
    torch.testing.assert_close(off.divergence, same.divergence, rtol=1e-9, atol=1e-12)


def test_the_threshold_is_inclusive(device: torch.device) -> None:
    case = cases.ordinary()[3].to(device)
    noise = 0.01 * torch.randn(2, 5, generator=torch.Generator().manual_seed(11))
    value = screen(case.private, case.public, noise).divergence[0].item()
    for threshold, passed in ((value, True), (math.nextafter(value, 0.0), False)):
        again = screen(case.private, case.public, noise, threshold=threshold)
        assert again.passed[0].item() is passed


def test_models_that_leave_the_kept_tokens(device: torch.device) -> None:
    """The scores are what remains of q plus a p_i far below q, never a difference of the two."""
    infinite, report = 0, Report()
    for seed in range(100):
        case, noise, options = cases.far_from_public(seed)
        got = checks.OnDevice(device).screen(case.private, case.public, noise, **options)
        checks.check_screening(case, noise, options, got, report)
        infinite += math.isinf(got.divergence.item())
    assert not report.failures, report.failures[:5]
    assert 2 <= infinite <= 40


@pytest.mark.parametrize("lowest", [-INF, -1000.0])
@pytest.mark.parametrize("models", [1, 2, 7, 39])
def test_masked_models_leave_nothing(models: int, lowest: float, device: torch.device) -> None:
    """At weight 1 and without noise, nothing remains but, if not masked, a score below 1e-290."""
    generator = torch.Generator().manual_seed(models)
    public = 2 * torch.randn(20, 6, generator=generator)
    private = torch.randn(models, 20, 6, generator=generator)
    private.scatter_(2, public.argmax(1).expand(models, 20).unsqueeze(2), lowest)
    rows = private.to(device), public.to(device), torch.zeros(20, 1)
    found = screen(*rows, weight=1.0, order=18.0, threshold=1e300)
    assert (found.divergence == INF).all() and not found.passed.any()
    # Only an absent member, or a rounding's share of q, has mass left, all on one token.
    for weight, slots in ((1.0, models + 1), (math.nextafter(1.0, 0.0), models)):
        left = screen(*rows, weight=weight, order=18.0, num_models=slots)
        assert (left.divergence == 0).all() and left.passed.all()


def test_what_does_not_move_is_exactly_public(device: torch.device) -> None:
    """The divergence is exactly 0, so it passes a threshold of 0."""
    case = cases.wide()[0].to(device)
    same = case.public.expand_as(case.private)
    for weight, top_k, private in (
        (0.0, 60, case.private), (0.3, 1, case.private), (1.0, 60, same)
    ):  # fmt: skip
        noise = torch.zeros(case.public.shape[0], top_k)
        found = screen(private, case.public, noise, weight=weight, order=1.5, threshold=0.0)
        assert (found.divergence == 0).all() and found.passed.all(), weight
