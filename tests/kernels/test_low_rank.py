"""add_low_rank: the rows of members that adapt the output layer alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapmixed_ext.low_rank import add_low_rank, can_add_low_rank

SHAPES = [(1, 1, 1, 2), (3, 2, 5, 40), (2, 5, 1, 513), (4, 9, 8, 1100), (2, 4, 16, 31)]


def operands(models: int, positions: int, rank: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((positions, vocab), (models, positions, rank), (models, rank, vocab))
    public, coefficients, factors = (torch.randn(one, generator=generator) for one in shapes)
    public[:, vocab // 2 :: 7] = -torch.inf
    return public, coefficients, factors


def rows(public: Tensor, coefficients: Tensor, factors: Tensor) -> Tensor:
    """Return the rows, computed in the middle of memory that must not change."""
    models, positions, vocab = len(factors), *public.shape
    size = models * positions * vocab
    memory = torch.full((size + 64,), 7.0)
    out = memory[32 : 32 + size].view(models, positions, vocab)
    add_low_rank(public, coefficients, factors, out)
    assert (memory[:32] == 7).all() and (memory[32 + size :] == 7).all()
    return out.clone()


def exact(public: Tensor, coefficients: Tensor, factors: Tensor) -> Tensor:
    """Return the chain of fused multiply-adds. A product of two floats is exact in double."""
    result = public.expand(len(factors), *public.shape).clone()
    for k in range(factors.shape[1]):
        product = coefficients[:, :, k, None].double() * factors[:, None, k].double()
        result = (result.double() + product).float()
    return result


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(shape: tuple[int, int, int, int], isa: str) -> None:
    given = operands(*shape)
    found, wanted = rows(*given), exact(*given)
    # The oracle rounds the sum to double first, so it may round a tie another way.
    assert torch.equal(found.isneginf(), wanted.isneginf())
    known = wanted.isfinite()
    torch.testing.assert_close(found[known], wanted[known], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_depends_on_its_own_operands_alone(threads: int) -> None:
    public, coefficients, factors = operands(4, 9, 8, 1100)
    torch.set_num_threads(threads)
    whole = rows(public, coefficients, factors)
    for member in range(4):
        for first, last in ((0, 1), (3, 8)):
            alone = rows(
                public[first:last], coefficients[member, None, first:last], factors[member, None]
            )
            assert torch.equal(alone[0], whole[member, first:last])


def test_every_instruction_set_has_the_same_bits(request: pytest.FixtureRequest) -> None:
    from adapmixed_ext import _C

    given, first = operands(4, 9, 8, 1100), _C.instruction_set()
    results = []
    try:
        for name in ("scalar", "avx2", "avx512"):
            if _C.use_instruction_set(name):
                results.append(rows(*given))
    finally:
        _C.use_instruction_set(first)
    assert all(torch.equal(one, results[0]) for one in results)


def test_wrong_operands_are_refused() -> None:
    public, coefficients, factors = operands(3, 2, 5, 40)
    out = torch.empty(3, 2, 40)
    for wrong, name in (
        ((public.half(), coefficients, factors, out), "public_logits"),
        ((public, coefficients[:, :, 1:], factors, out), "coefficients"),
        ((public, coefficients, factors[0], out), "factors"),
        ((public, coefficients, factors.transpose(0, 1), out), "coefficients"),
        ((public, coefficients, factors, torch.empty(3, 2, 80)[..., ::2]), "private_logits"),
        ((public, coefficients, factors, out[:2]), "private_logits"),
    ):
        with pytest.raises(ValueError, match=name):
            add_low_rank(*wrong)
    assert can_add_low_rank(public) and not can_add_low_rank(public.half())
