"""The log-sum-exps of the pool in single precision, within their stated error.

Some rows push the error of every term in the same direction. Others exceed the range of floats,
where double precision must take over.
"""

from __future__ import annotations

import math

import pytest
import torch
from extended import array, log_sum_exp
from torch import Tensor

import adapmixed_ext
from adapmixed_ext.inputs import near_log_sum_exp

# The errors stated in csrc/common/float_sum.h for one sum in floats, and one in doubles.
FLOAT_SUM = 5.3 * 2.0**-24
DOUBLE_SUM = 5e-14


def errors(private: Tensor, public: Tensor) -> Tensor:
    """Return |lse - exact|, (N, B)."""
    pool = adapmixed_ext.log_pool(private, public, lower=-1.0, upper=1.0, scale=1.0)
    return torch.from_numpy(
        abs(array(pool.private_lse) - log_sum_exp(array(private))).astype(float)
    )


def test_terms_that_are_all_off_to_one_side(isa: str) -> None:
    """Equal logits make errors of one sign, anywhere in an octave, above and below the public."""
    steps = torch.linspace(-3.0, 3.0, 1501).unsqueeze(-1)
    heights = torch.cat([steps - 20, steps, steps + 17.3, steps + 333])
    public = torch.zeros(1, 64)
    public[0, 0] = 0.5
    private = heights.expand(-1, 64).unsqueeze(1).contiguous()
    found = errors(private, public)
    assert found.max().item() <= 2 * FLOAT_SUM
    assert found.max().item() > 0.1 * FLOAT_SUM  # floats were used
    # With one term as high as the reference, only e^0 and e^t are summed.
    private[..., 0] = heights + 40.0
    assert errors(private, public).max().item() <= 2 * FLOAT_SUM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [2, 31, 32, 33, 4097])
def test_every_length_and_dtype(vocab: int, dtype: torch.dtype, isa: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for spread in (0.01, 3.0, 30.0):
        public = spread * torch.randn(3, vocab, generator=generator)
        private = public + torch.randn(9, 3, vocab, generator=generator)
        private[4, :, 1:] = -math.inf
        found = errors(private.to(dtype), public.to(dtype))
        assert found.max().item() <= 2 * FLOAT_SUM


def test_double_where_floats_do_not_serve(isa: str) -> None:
    generator = torch.Generator().manual_seed(9)
    public = 2 * torch.randn(1, 500, generator=generator)
    top = int(public.argmax())
    private = public + torch.randn(4, 1, 500, generator=generator)
    masked, above = private.clone(), private.clone()
    masked[..., top] = -math.inf  # the logit from which the sum would start
    above[..., (top + 1) % 500] += 70.0  # e^70 at the next token
    for row in (masked, above, private + 1500.0, private - 1500.0):
        sizes = 5e-16 * log_sum_exp(array(row)).max().astype(float)
        assert errors(row, public).max().item() <= DOUBLE_SUM + abs(sizes)
    # If the public row is too large for floats, all rows use doubles.
    assert errors(private + 2e3, public + 2e3).max().item() <= DOUBLE_SUM + 1e-12


def test_sums_near_a_column(isa: str) -> None:
    """They are as good as the pool's, or NaN, whatever the other rows are."""
    generator = torch.Generator().manual_seed(11)
    rows = 3 * torch.randn(4, 2, 300, generator=generator)
    near = rows[0].argmax(-1)
    rows[1].scatter_(1, near[:, None], -math.inf)
    rows[2, 0, 7] = math.nan
    found = near_log_sum_exp(rows, near)
    assert found[1].isnan().all() and found[2].isnan().tolist() == [True, False]
    exact = torch.from_numpy(log_sum_exp(array(rows[[0, 3]])).astype(float))
    assert (found[[0, 3]] - exact).abs().max().item() <= FLOAT_SUM
    assert torch.equal(near_log_sum_exp(rows[3], near), found[3])


def test_a_row_that_is_the_public_one_has_its_sum(isa: str) -> None:
    generator = torch.Generator().manual_seed(10)
    public = 4 * torch.randn(5, 777, generator=generator)
    public[1] += 1e4
    public[2, ::2] = -math.inf
    pool = adapmixed_ext.log_pool(
        public.expand(3, 5, 777), public, lower=-1.0, upper=0.0, scale=1.0
    )
    assert torch.equal(pool.private_lse, pool.public_lse.expand(3, 5))
    assert (pool.span == 0).all()
