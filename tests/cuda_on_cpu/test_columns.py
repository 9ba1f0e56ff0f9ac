"""add_low_rank's kernel has the CPU's bits, whatever the order of its threads."""

from __future__ import annotations

import pytest
import simulated
import torch
from test_low_rank import SHAPES, operands, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_the_cpus(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    start, coefficients, factors, tokens = operands(*shape)
    own = start + torch.arange(len(factors))[:, None, None]
    whole = torch.randn(len(start), shape[-1])
    for z, ids in ((start, tokens), (own, tokens), (whole, None)):
        expected = rows(z, coefficients, factors, ids, dtype)
        for order in ("forward", "reverse", "random"):
            with simulated.kernels(order, 5):
                assert torch.equal(rows(z, coefficients, factors, ids, dtype), expected)


def test_columns_of_unknown_tokens_are_nan() -> None:
    """A call that is only queued cannot raise, and must not read beyond the factors."""
    start, coefficients, factors, tokens = operands(17, 2, 3, 40, 90)
    wrong = tokens.clone()
    wrong[0, 3], wrong[1, 39] = 90, -1
    with simulated.kernels():
        found = rows(start, coefficients, factors, wrong)
    unknown = wrong != tokens
    assert found[:, unknown].isnan().all()
    assert torch.equal(found[:, ~unknown], rows(start, coefficients, factors, tokens)[:, ~unknown])
