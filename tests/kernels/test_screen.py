"""screen: Algorithm 1, lines 1 to 8, for given noise."""

from __future__ import annotations

import math

import cases
import mpmath as mp
import oracle
import pytest
import torch
from cases import Case
from mpmath import mpf
from screenings import far_from_public
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import reference

SMALL = cases.small()
CORNERS = cases.corners()
WIDE = cases.wide()


def gaussian_noise(positions: int, top_k: int, sigma: float, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    noise = torch.randn(positions, top_k, generator=generator, dtype=torch.float64)
    return (sigma * noise).to(device)


def close(got: float, truth: mpf) -> bool:
    if mp.isinf(truth):
        return got == math.inf
    return abs(mpf(got) - truth) <= 1e-6 * abs(truth) + 1e-12


@pytest.mark.parametrize("case", SMALL, ids=cases.ids(SMALL))
def test_against_the_oracle(case: Case, device: torch.device) -> None:
    case = case.to(device)
    positions, vocab = case.public.shape
    for top_k, sigma, order, weight in (
        (1, 0.01, 2.0, 0.3), (5, 0.01, 18.0, 1e-4), (vocab, 0.1, 1.5, 1.0),
        (vocab + 3, 0.0, 3.0, 0.3),
    ):  # fmt: skip
        noise = gaussian_noise(positions, top_k, sigma, device)
        result = adapmixed_ext.screen(
            case.private, case.public, noise, weight=weight, order=order, threshold=0.2,
            top_k=top_k,
        )  # fmt: skip
        assert result.divergence.dtype == torch.float64 and result.passed.dtype == torch.bool
        assert result.divergence.shape == result.passed.shape == (positions,)
        for b in range(positions):
            truth = oracle.screening(
                case.private[:, b], case.public[b], noise[b], weight=weight, order=order,
                top_k=top_k,
            )  # fmt: skip
            got = result.divergence[b].item()
            assert close(got, truth), (top_k, order, b, got, mp.nstr(truth, 17))
            assert result.passed[b].item() == (got <= 0.2)


@pytest.mark.parametrize("case", CORNERS, ids=cases.ids(CORNERS))
def test_corners_decide_as_the_oracle(case: Case, device: torch.device) -> None:
    case = case.to(device)
    positions, vocab = case.public.shape
    noise = gaussian_noise(positions, vocab, 0.01, device)
    for order in (1.01, 18.0, 1024.0):
        result = adapmixed_ext.screen(
            case.private, case.public, noise, weight=0.1, order=order, threshold=1.0, top_k=vocab
        )
        for b in range(positions):
            truth = oracle.screening(
                case.private[:, b], case.public[b], noise[b], weight=0.1, order=order, top_k=vocab
            )
            assert not math.isnan(result.divergence[b].item())
            assert result.passed[b].item() == (truth <= 1)


@pytest.mark.parametrize("case", WIDE, ids=cases.ids(WIDE))
def test_wide_vocabularies(case: Case, device: torch.device) -> None:
    for top_k in (1, 100, 60):
        noise = gaussian_noise(case.public.shape[0], top_k, 0.01, torch.device("cpu"))
        options = {"weight": 1e-2, "order": 18.0, "threshold": 4.0, "top_k": top_k}
        truth, _ = reference.screen(case.private, case.public, noise, **options)
        moved = case.to(device)
        result = adapmixed_ext.screen(moved.private, moved.public, noise.to(device), **options)
        torch.testing.assert_close(result.divergence.cpu(), truth, rtol=1e-6, atol=1e-12)


def test_noise_comes_before_rescaling(device: torch.device) -> None:
    """For uniform q on 4 tokens and top 2, s = (1/4 + 1/4, 1/4).

    That is 2/3 and 1/3 against 1/2 and 1/2.
    """
    public = torch.zeros(1, 4, device=device)
    noise = torch.tensor([[0.25, 0.0]], dtype=torch.float64, device=device)
    result = adapmixed_ext.screen(
        public.unsqueeze(0), public, noise, weight=0.5, order=2.0, threshold=1.0, top_k=2
    )
    assert result.divergence.item() == pytest.approx(math.log(2 * (4 / 9 + 1 / 9)), rel=1e-12)


def test_ties_go_to_the_lower_index(device: torch.device) -> None:
    public = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0]], device=device)
    private = public.clone().unsqueeze(0)
    noise = torch.tensor([[0.05, 0.0, 0.0, -0.04]], dtype=torch.float64, device=device)
    for shifted in range(5):
        private[0, 0] = public[0]
        private[0, 0, shifted] += 2.0
        result = adapmixed_ext.screen(
            private, public, noise, weight=0.5, order=3.0, threshold=1.0, top_k=4
        )
        truth = oracle.screening(private[:, 0], public[0], noise[0], weight=0.5, order=3.0, top_k=4)
        assert close(result.divergence.item(), truth), shifted


def test_only_tokens_of_the_public_support_are_kept(device: torch.device) -> None:
    public = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]], device=device)
    private = torch.zeros(2, 1, 4, device=device)
    noise = torch.tensor([[0.01, -0.02, 5.0, 7.0]], dtype=torch.float64, device=device)
    result = adapmixed_ext.screen(
        private, public, noise, weight=0.5, order=2.0, threshold=1.0, top_k=4
    )
    truth = oracle.screening(private[:, 0], public[0], noise[0], weight=0.5, order=2.0, top_k=4)
    assert close(result.divergence.item(), truth)


def test_nothing_left_counts_infinite(device: torch.device) -> None:
    case = cases.ordinary()[3].to(device)
    noise = torch.full((2, 3), -2.0, dtype=torch.float64, device=device)
    result = adapmixed_ext.screen(
        case.private, case.public, noise, weight=0.5, order=2.0, threshold=1e300, top_k=3
    )
    assert (result.divergence == math.inf).all() and not result.passed.any()


def test_a_negative_entry_counts_zero_and_one_direction_is_tested(device: torch.device) -> None:
    """s = (1/2, 3/10, -3/10) becomes (5/8, 3/8, 0): D(s‖q) = log(5/4), and D(q‖s) is infinite."""
    public = torch.tensor([[0.5, 0.3, 0.2]], device=device).double().log().float()
    noise = torch.tensor([[0.0, 0.0, -0.5]], dtype=torch.float64, device=device)
    result = adapmixed_ext.screen(
        public.unsqueeze(0), public, noise, weight=0.5, order=18.0, threshold=4.5, top_k=3
    )
    assert result.divergence.item() == pytest.approx(math.log(5 / 4), rel=1e-6)
    assert result.passed.item()


def test_inactive_slots_answer_the_public_distribution(device: torch.device) -> None:
    case = cases.ordinary()[2].to(device)
    noise = gaussian_noise(1, 5, 0.01, device)
    on = torch.tensor([True, False, True, True, False, False, True], device=device)
    options = {"weight": 0.7, "order": 3.0, "threshold": 1.0, "top_k": 5}
    for divisor in (7, 20):
        result = adapmixed_ext.screen(
            case.private, case.public, noise, num_models=divisor, active=on.unsqueeze(-1), **options
        )
        truth = oracle.screening(
            case.private[:, 0], case.public[0], noise[0], weight=0.7, order=3.0, top_k=5,
            divisor=divisor, active=on.tolist(),
        )  # fmt: skip
        assert close(result.divergence.item(), truth)
    off = adapmixed_ext.screen(
        case.private, case.public, noise, active=torch.zeros_like(on).unsqueeze(-1), **options
    )
    same = adapmixed_ext.screen(case.public.expand_as(case.private), case.public, noise, **options)
    torch.testing.assert_close(off.divergence, same.divergence, rtol=1e-9, atol=1e-12)


def test_the_threshold_is_inclusive(device: torch.device) -> None:
    case = cases.ordinary()[3].to(device)
    noise = gaussian_noise(2, 5, 0.01, device)
    options = {"weight": 0.3, "order": 3.0, "top_k": 5}
    first = adapmixed_ext.screen(case.private, case.public, noise, threshold=1.0, **options)
    value = first.divergence[0].item()
    for threshold, passed in ((value, True), (math.nextafter(value, 0.0), False)):
        again = adapmixed_ext.screen(
            case.private, case.public, noise, threshold=threshold, **options
        )
        assert again.passed[0].item() is passed


def test_models_that_leave_the_kept_tokens(device: torch.device) -> None:
    """The scores are what remains of q plus a p_i far below q, never a difference of the two."""
    infinite = 0
    for seed in range(100):
        screened = far_from_public(seed)
        fault = screened.fault(device)
        assert fault is None, f"seed {seed}: {fault}"
        infinite += math.isinf(screened.answer(device).divergence.item())
    assert 2 <= infinite <= 40


@pytest.mark.parametrize("lowest", [-math.inf, -1000.0])
@pytest.mark.parametrize("models", [1, 2, 7, 39])
def test_masked_models_leave_nothing(models: int, lowest: float, device: torch.device) -> None:
    """At weight 1 and without noise, nothing remains but, if not masked, a score below 1e-290."""
    generator = torch.Generator().manual_seed(models)
    public = 2 * torch.randn(20, 6, generator=generator)
    private = torch.randn(models, 20, 6, generator=generator)
    private.scatter_(2, public.argmax(1).expand(models, 20).unsqueeze(2), lowest)
    noise = torch.zeros(20, 1, dtype=torch.float64, device=device)
    options = {"order": 18.0, "threshold": 1e300, "top_k": 1}
    rows = private.to(device), public.to(device)
    found = adapmixed_ext.screen(*rows, noise, weight=1.0, **options)
    assert (found.divergence == math.inf).all() and not found.passed.any()
    # Only an absent member, or a rounding's share of q, has mass left, all on one token.
    for weight, slots in ((1.0, models + 1), (math.nextafter(1.0, 0.0), models)):
        left = adapmixed_ext.screen(*rows, noise, weight=weight, num_models=slots, **options)
        assert (left.divergence == 0).all() and left.passed.all()


def test_what_does_not_move_is_exactly_public(device: torch.device) -> None:
    """The divergence is exactly 0, so it passes a threshold of 0."""
    case = cases.wide()[0].to(device)
    for weight, top_k, private in ((0.0, 60, case.private), (0.3, 1, case.private),
                                   (1.0, 60, case.public.expand_as(case.private))):  # fmt: skip
        noise = torch.zeros(case.public.shape[0], top_k, dtype=torch.float64, device=device)
        found = adapmixed_ext.screen(
            private, case.public, noise, weight=weight, order=1.5, threshold=0.0, top_k=top_k
        )
        assert (found.divergence == 0).all() and found.passed.all(), weight
