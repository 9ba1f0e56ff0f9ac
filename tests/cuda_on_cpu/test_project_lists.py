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


def check_lists(private: Tensor, public: Tensor, order: float, radius: float) -> None:
    expected = adapmixed_ext.project(private, public, order=order, radius=radius)
    with simulated.kernels("random"):
        got = adapmixed_ext.project(private, public, order=order, radius=radius)
    torch.testing.assert_close(got.weight, expected.weight, rtol=2e-6, atol=0.0)
    report = check_weights(private[0], public, got.weight, got.complement, order, [radius])
    assert not report.failures, report.failures


# The target is above e^20. Memory has room for 6 656 tokens in single precision, twice as many in
# half. Up to there both lists fit; then the reverse one is made piece by piece. Of 14 000 tokens in
# single precision the forward list is, too, and no memory is left: the row is summed as a whole.
@pytest.mark.parametrize(
    "dtype,vocab",
    [(torch.float32, 700), (torch.float32, 7000), (torch.float32, 14000), (torch.bfloat16, 7000),
     (torch.float16, 22000)],
)  # fmt: skip
@pytest.mark.parametrize("order,radius", [(18.0, 1.2), (64.5, 0.4)])
def test_lists_that_do_and_do_not_fit(
    vocab: int, dtype: torch.dtype, order: float, radius: float
) -> None:
    private, public = (t.to(dtype) for t in raised_and_lowered(vocab))
    check_lists(private, public, order, radius)


@pytest.mark.parametrize("lowered", [0.0, 0.9])
def test_a_forward_list_in_pieces(lowered: float) -> None:
    """The first 6 000 tokens are raised, so that the forward list alone does not fit."""
    private, public = raised_and_lowered(6600)
    private[..., :6000] = private[..., :6000].abs()
    private[..., 6000:] = -private[..., 6000:].abs() * lowered
    check_lists(private, public, 18.0, 1.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reverse_list_of_thousands(dtype: torch.dtype) -> None:
    """Only tokens that the model lacks decide, and they take a weight near 1."""
    generator = torch.Generator().manual_seed(2)
    public = torch.randn(1, 9001, generator=generator)
    private = public + torch.where(torch.arange(9001) % 4 > 0, -9.0, 0.0)
    private, public = private.unsqueeze(0).to(dtype), public.to(dtype)
    check_lists(private, public, 18.0, 3.6)
    with simulated.kernels():
        got = adapmixed_ext.project(private, public, order=18.0, radius=3.6)
    assert 0.9 < got.weight[0, 0] < 1.0
