"""project's short lists: rows for which they are too short, and tokens that no list takes."""

from __future__ import annotations

import pytest
import simulated
import torch
from checks import check_weights
from torch import Tensor

import adapmixed_ext


def raised_and_lowered(vocab: int) -> tuple[Tensor, Tensor]:
    """Return a row whose tokens all matter equally, half of them forward and half in reverse."""
    generator = torch.Generator().manual_seed(0)
    sign = 1.0 - 2.0 * (torch.arange(vocab) % 2)
    private = 6.0 * sign + 0.01 * torch.randn(1, vocab, generator=generator)
    return private.unsqueeze(0), torch.zeros(1, vocab)


# The target is above e^20: 700 tokens fit both lists, 3000 fit only one of them, 7000 fit neither.
@pytest.mark.parametrize("vocab", [700, 3000, 7000])
@pytest.mark.parametrize("order,radius", [(18.0, 1.2), (64.0, 0.4), (64.5, 0.4)])
def test_lists_that_do_and_do_not_fit(vocab: int, order: float, radius: float) -> None:
    private, public = raised_and_lowered(vocab)
    expected = adapmixed_ext.project(private, public, order=order, radius=radius)
    with simulated.kernels("random"):
        got = adapmixed_ext.project(private, public, order=order, radius=radius)
    torch.testing.assert_close(got.weight, expected.weight, rtol=2e-6, atol=0.0)
    report = check_weights(private[0], public, got.weight, got.complement, order, [radius])
    assert not report.failures, report.failures


@pytest.mark.parametrize("depth", [-1e3, -1e9, -1e30, -3e38])
@pytest.mark.parametrize("both", [False, True])
def test_tokens_far_below_a_double(depth: float, both: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    private = 2 * torch.randn(2, 1, 40, generator=generator)
    public = 2 * torch.randn(1, 40, generator=generator)
    public[0, 5] = depth
    if both:
        private[0, 0, 5], private[1, 0, 5] = depth, max(2 * depth, -3.4e38)
    for order, radius in ((18.0, 3.6), (3.0, 0.03), (2.5, 0.5)):
        with simulated.kernels("reverse"):
            got = adapmixed_ext.project(private, public, order=order, radius=radius)
        report = check_weights(
            private[:, 0], public.expand(2, -1), got.weight.T, got.complement.T, order, [radius]
        )
        assert not report.failures, report.failures
