"""add_low_rank: the logits of members that adapt the output layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapmixed_ext import _C, reference
from adapmixed_ext.low_rank import (
    BLOCK,
    add_low_rank,
    cross_entropy,
    pack_codes,
    pack_factors,
    pack_tokens,
    unpack_tokens,
)

# N, B, r, K, V
SHAPES = [(1, 1, 1, 2, 2), (3, 2, 5, 80, 90), (17, 5, 1, 33, 513), (40, 3, 8, 16, 100)]
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def operands(models: int, positions: int, rank: int, columns: int, vocab: int) -> Operands:
    """Return z (B, K), c (N, B, r), u (N, r, V) and the tokens (B, K)."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((positions, columns), (models, positions, rank), (models, rank, vocab))
    start, coefficients, factors = (torch.randn(shape, generator=generator) for shape in shapes)
    start[:, columns // 2 :: 7] = -torch.inf
    order = torch.rand(positions, vocab, generator=generator).argsort(-1)
    return start, coefficients, factors, order[:, :columns].contiguous()


def packed(coefficients: Tensor) -> Tensor:
    """Return (N, B, r) coefficients as the operator takes them."""
    models, positions, rank = coefficients.shape
    padded = torch.zeros(positions, -(-models // BLOCK) * BLOCK, rank)
    padded[:, :models] = coefficients.transpose(0, 1)
    return padded.view(positions, -1, BLOCK, rank).transpose(2, 3).contiguous()


def rows(
    start: Tensor,
    coefficients: Tensor,
    factors: Tensor,
    tokens: Tensor | None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Tensor:
    """Return the rows, computed between memory that must not change."""
    models, rank, vocab = factors.shape
    positions, columns = start.shape[-2:]
    memory = torch.full((positions, models, columns + 3), 7.0, device=device)
    out = memory[..., 1:-2].transpose(0, 1)
    inputs = (start, packed(coefficients), pack_factors(list(factors), rank, vocab, dtype))
    on = [tensor.to(device) for tensor in inputs]
    add_low_rank(*on, out, None if tokens is None else tokens.to(device))
    assert (memory[..., 0] == 7).all() and (memory[..., -2:] == 7).all()
    return out.cpu().clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> None:
    start, coefficients, factors, tokens = operands(*shape)
    rounded = factors.to(dtype).float()
    starts = start + torch.arange(len(factors))[:, None, None]
    whole = torch.randn(len(start), shape[-1])
    for z, ids in ((start, tokens), (starts, tokens), (whole, None)):
        result = rows(z, coefficients, factors, ids, dtype)
        packs = packed(coefficients), pack_factors(list(rounded), shape[2], shape[4])
        truth = reference.add_low_rank(z, *packs, len(result), ids)
        # Each of r additions rounds a sum of a few units by 2^-24 of it.
        torch.testing.assert_close(result.double(), truth, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_depends_on_its_own_operands_alone(threads: int) -> None:
    """Not on other members, their ranks or the other positions, to the last bit."""
    start, coefficients, factors, tokens = operands(37, 4, 8, 300, 700)
    factors[5, 3:] = 0.0  # a member of rank 3
    torch.set_num_threads(threads)
    whole = rows(start, coefficients, factors, tokens)
    for member in (0, 5, 36):
        for at in (slice(0, 1), slice(2, 4)):
            parts = coefficients[member, None, at], factors[member, None]
            if member == 5:
                parts = parts[0][..., :3], parts[1][:, :3]
            assert torch.equal(rows(start[at], *parts, tokens[at])[0], whole[member, at])
    unchanged = coefficients.clone()
    unchanged[7] = 0.0
    assert torch.equal(rows(start, unchanged, factors, tokens)[7], start)


def test_every_path_has_the_same_bits(path: torch.device) -> None:
    inputs, isa = operands(37, 4, 8, 300, 700), _C.instruction_set()
    for dtype in (torch.float32, torch.bfloat16):
        result = rows(*inputs, dtype, path.type)
        assert _C.use_instruction_set("scalar")
        assert torch.equal(result, rows(*inputs, dtype))
        assert _C.use_instruction_set(isa)


def test_codes_of_all_members_are_one_product() -> None:
    generator = torch.Generator().manual_seed(2)
    codes = [torch.randn(12, rank, generator=generator) for rank in (3, 1, 3)]
    hidden = torch.randn(5, 12, generator=generator)
    product = (hidden @ pack_codes([*codes, None], 3, 12)).view(5, 1, 3, BLOCK)
    for member, code in enumerate(codes):
        rank = code.shape[1]
        torch.testing.assert_close(product[:, 0, :rank, member], hidden @ code)
        assert not product[:, 0, rank:, member].any()
    assert not product[..., 3:].any()


def test_wrong_operands_are_refused() -> None:
    start, coefficients, factors, tokens = operands(3, 2, 5, 40, 90)
    inputs = (start, packed(coefficients), pack_factors(list(factors), 5, 90))
    out = torch.empty(3, 2, 40)
    misplaced = torch.zeros(inputs[2].numel() + 1)[1:].view_as(inputs[2])
    for wrong, name in (
        ((start.half(), *inputs[1:], out, tokens), "start"),
        ((start, inputs[1][..., 1:], inputs[2], out, tokens), "coefficients"),
        ((start, inputs[1], inputs[2].half(), out, tokens), "factors"),
        ((start, inputs[1], inputs[2][0], out, tokens), "factors"),
        ((start, inputs[1], misplaced, out, tokens), "factors must be on 16 bytes"),
        ((start, inputs[1], inputs[2], out.repeat(6, 1, 1), tokens), "factors must be"),
        ((*inputs, torch.empty(3, 2, 80)[..., ::2], tokens), "private_logits"),
        ((*inputs, out, None), "private_logits must have all 90 tokens"),
        ((*inputs, out, tokens.int()), "tokens"),
        ((*inputs, out, tokens + 50), r"tokens must lie in \[0, 90\)"),
    ):
        with pytest.raises(ValueError, match=name):
            add_low_rank(*wrong)


# n, V, r
REGRESSIONS = [(1, 2, 1), (4, 64, 2), (5, 65, 3), (7, 700, 8), (9, 1500, 5)]


def regression(rows: int, vocab: int, rank: int) -> Operands:
    """Return public logits (n, V), of which some are -inf, c (n, r), u (r, V) and targets (n,)."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((rows, vocab), (rows, rank), (rank, vocab))
    public, coefficients, factors = (torch.randn(shape, generator=generator) for shape in shapes)
    public *= 8.0
    targets = torch.randint(vocab, (rows,), generator=generator)
    public[:, ::7] = -torch.inf
    public[torch.arange(rows), targets] = 0.5
    return public, coefficients, factors, targets


def derived(
    public: Tensor, coefficients: Tensor, factors: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses and derivatives, from rows between memory that must not be read."""
    memory = torch.full((len(public), public.shape[1] + 5), torch.nan)
    rows = memory[:, 2:-3].copy_(public)
    packs = pack_tokens(factors)
    derivatives = torch.full_like(coefficients, torch.nan), torch.full_like(packs, 2.0)
    losses = cross_entropy(rows, coefficients, packs, targets, derivatives)
    assert torch.equal(losses, cross_entropy(rows, coefficients, packs, targets))
    return losses, derivatives[0], unpack_tokens(derivatives[1] - 2.0, public.shape[1])


@pytest.mark.parametrize("shape", REGRESSIONS, ids=str)
def test_cross_entropy_and_its_derivatives(shape: tuple[int, int, int], isa: str) -> None:
    inputs = regression(*shape)
    assert torch.equal(unpack_tokens(pack_tokens(inputs[2]), shape[1]), inputs[2])
    results, expected = derived(*inputs), reference.cross_entropy(*inputs)
    for result, true in zip(results, expected, strict=True):
        # r + 1 roundings of logits of up to 40, each by 2e-6; the derivatives add up to 9 rows.
        torch.testing.assert_close(result.double(), true, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("threads", [2, 3])
def test_cross_entropy_has_the_same_bits_with_every_number_of_threads(threads: int) -> None:
    inputs = regression(9, 1500, 5)
    torch.set_num_threads(1)
    single = derived(*inputs)
    torch.set_num_threads(threads)
    assert all(map(torch.equal, derived(*inputs), single))
    part = [inputs[0][2:3], inputs[1][2:3], inputs[2], inputs[3][2:3]]
    assert torch.equal(derived(*part)[0], single[0][2:3])


def test_losses_of_far_and_of_broken_logits() -> None:
    public, coefficients, factors, targets = regression(3, 100, 2)
    public[0, targets[0]] = -300.0
    public[1, 5] = torch.nan
    losses = cross_entropy(public, coefficients, pack_tokens(factors), targets)
    expected = reference.cross_entropy(public, coefficients, factors, targets)[0]
    assert float(losses[0]) > 300 and losses[1].isnan()
    torch.testing.assert_close(losses[::2], expected[::2], rtol=1e-6, atol=0)


def test_wrong_operands_of_a_regression_are_refused() -> None:
    public, coefficients, factors, targets = regression(3, 100, 2)
    packs = pack_tokens(factors)
    inputs = public, coefficients, packs, targets
    for wrong, name in (
        ((public[0], *inputs[1:]), "public_logits must have 2 dimensions"),
        ((public.double(), *inputs[1:]), "public_logits must be torch.float32"),
        ((public.T.contiguous().T, *inputs[1:]), "have contiguous rows"),
        ((public, coefficients[:2], *inputs[2:]), "coefficients must be"),
        ((public, coefficients, factors, targets), "factors must be"),
        ((*inputs, (coefficients.double(), packs)), r"derivatives\[0\] must be"),
        ((*inputs, (coefficients, packs[1:])), r"derivatives\[1\] must be"),
        ((*inputs[:3], targets.int()), "targets must be torch.int64"),
        ((*inputs[:3], targets + 100), r"targets\[0\] must be in \[0, 99\]"),
    ):
        with pytest.raises(ValueError, match=name):
            cross_entropy(*wrong)
