"""The logits of members that adapt the output layer: z_i(y) = z(y) + Σ_k c_ik u_ik(y).

Every element is a chain of fused multiply-adds in single precision, which starts with z and takes k
in order. So a row's bits depend on that row's operands alone: not on N, B, the number of threads,
the instruction set or the device. Matrix libraries do not promise this.

All u lie in one tensor, in which a token's numbers are contiguous over members and rank. So a query
about K tokens reads K stretches of memory. Members lie side by side in blocks of 16, padded with
zeros, and so do members of a smaller rank.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from . import inputs as check
from ._native import call, immediate, native

BLOCK = 16
"""Members that lie side by side."""
PACK = 64
"""Tokens that lie side by side in the factors of a member in training."""
_PARTS = ("start", "private_logits", "public_logits")  # may be rows of a larger tensor
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def blocks_of(models: int) -> int:
    """Return the number of blocks of N members."""
    return -(-models // BLOCK)


def pack_factors(
    factors: Sequence[Tensor | None], rank: int, vocab: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the factors u of all members in one tensor, (V, blocks, r, 16).

    Args:
        factors: (r_i, V) of each member, r_i ≤ r; None for zeros.
        rank: r.
        vocab: V.
        dtype: float32 or bfloat16, to which they are rounded.
    """
    shape = (vocab, blocks_of(len(factors)), rank, BLOCK)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=_PRIVATE)
    with suppress(AttributeError, OSError):  # few pages are found faster; not every system has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    packed = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
    for block in range(packed.shape[1]):
        members = torch.zeros((BLOCK, vocab, rank), dtype=dtype)
        for place, factor in enumerate(factors[block * BLOCK : (block + 1) * BLOCK]):
            if factor is not None:
                members[place, :, : len(factor)] = factor.T
        packed[:, block] = members.permute(1, 2, 0)
    return packed


def pack_codes(codes: Sequence[Tensor | None], rank: int, width: int) -> Tensor:
    """Return the matrices A of all members as one, (d, blocks r 16), so that c = h A.

    Args:
        codes: (d, r_i) of each member, r_i ≤ r; None for zeros.
        rank: r.
        width: d.
    """
    packed = torch.zeros((width, blocks_of(len(codes)), rank, BLOCK))
    for member, code in enumerate(codes):
        if code is not None:
            packed[:, member // BLOCK, : code.shape[1], member % BLOCK] = code
    return packed.view(width, -1)


def add_low_rank(
    start: Tensor,
    coefficients: Tensor,
    factors: Tensor,
    private_logits: Tensor,
    tokens: Tensor | None = None,
) -> None:
    """Write the rows of N members on K tokens of each of B positions.

    Args:
        start: z, (B, K) of the public model, or (N, B, K) of each member, float32.
        coefficients: c, (B, blocks, r, 16) float32, contiguous.
        factors: u, (V, blocks, r, 16) float32 or bfloat16, contiguous; see `pack_factors`.
        private_logits: z_i, (N, B, K) float32; its former values do not matter.
        tokens: (B, K) int64 in [0, V), contiguous; None if the columns are the V tokens.

    Raises:
        ValueError: wrong shapes, dtypes, devices, strides, or tokens (on a GPU: NaN instead).
    """
    for name, value, dims in (("factors", factors, 4), ("private_logits", private_logits, 3)):
        if check.tensor(name, value).dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got {value.dim()}")
    if factors.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"factors must be float32 or bfloat16, got {factors.dtype}")
    (vocab, _, rank, _), shape = factors.shape, private_logits.shape
    members = blocks_of(shape[0]), rank, BLOCK
    of_all = check.tensor("start", start).dim() == 2
    _check("factors", factors, (vocab, *members), factors, factors.dtype)
    _check("start", start, shape[1:] if of_all else shape, factors)
    _check("coefficients", coefficients, (shape[1], *members), factors)
    _check("private_logits", private_logits, shape, factors)
    if factors.data_ptr() % 16:
        raise ValueError("factors must be on 16 bytes")
    if tokens is not None:
        _check("tokens", tokens, shape[1:], factors, torch.int64)
        if immediate(factors.device) and ((tokens < 0) | (tokens >= vocab)).any():
            raise ValueError(f"tokens must lie in [0, {vocab}), got {tokens}")
    elif shape[2] != vocab:
        raise ValueError(f"private_logits must have all {vocab} tokens, got {shape[2]}")
    if shape[1]:
        address, _, _, dtype = native(factors)
        operands = *native(start)[:3], coefficients.data_ptr(), address, dtype, tokens, rank, vocab
        call("add_low_rank", factors, (shape, *operands), native(private_logits)[:3])


def _check(
    name: str, value: Tensor, shape: tuple[int, ...], like: Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Raise unless the compiled module can take the address of a tensor."""
    tensor = check.of_type(name, value, dtype, shape, like)
    if not (tensor.stride(-1) == 1 if name in _PARTS else tensor.is_contiguous()):
        raise ValueError(f"{name} must be contiguous, or have contiguous rows if it has logits")


def pack_tokens(factors: Tensor) -> Tensor:
    """Return a member's factors u (r, V) for training, (⌈V/64⌉, r, 64), padded with zeros."""
    rank, vocab = factors.shape
    padded = torch.nn.functional.pad(factors, (0, -vocab % PACK))
    return padded.view(rank, -1, PACK).transpose(0, 1).contiguous()


def unpack_tokens(packed: Tensor, vocab: int) -> Tensor:
    """Return the factors (r, V) of `pack_tokens`; gradients pass."""
    return packed.transpose(0, 1).reshape(packed.shape[1], -1)[:, :vocab]


def cross_entropy(
    public_logits: Tensor,
    coefficients: Tensor,
    factors: Tensor,
    targets: Tensor,
    derivatives: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the losses log Σ_y e^{z(y)} − z(target) of n tokens, (n,) float64, on the CPU.

    z = public logits + Σ_k c_k u_k is computed in single precision. The bits do not depend on the
    number of threads, but on the instruction set.

    Args:
        public_logits: (n, V) float32 with contiguous rows; −inf allowed.
        coefficients: c, (n, r) float32, contiguous.
        factors: u, (⌈V/64⌉, r, 64) float32, contiguous; see `pack_tokens`.
        targets: (n,) int64 in [0, V), contiguous.
        derivatives: of the losses' sum, to be written by c, (n, r), and to be added to by u, of
            its shape; both float32 and contiguous. None if they are not wanted.

    Raises:
        ValueError: wrong shapes, dtypes, devices, strides, or targets.
    """
    if check.tensor("public_logits", public_logits).dim() != 2:
        raise ValueError(f"public_logits must have 2 dimensions, got {public_logits.dim()}")
    (rows, vocab), rank = public_logits.shape, coefficients.shape[-1]
    shapes = (rows, rank), (-(-vocab // PACK), rank, PACK)
    losses = torch.empty(rows, dtype=torch.float64)
    _check("public_logits", public_logits, (rows, vocab), losses)
    _check("coefficients", coefficients, shapes[0], losses)
    _check("factors", factors, shapes[1], losses)
    for at, derivative in enumerate(derivatives or ()):
        _check(f"derivatives[{at}]", derivative, shapes[at], losses)
    _check("targets", targets, (rows,), losses, torch.int64)
    torch.ops.adapmixed.checked(targets, "targets", 0, vocab - 1)
    start, stride = public_logits.data_ptr(), public_logits.stride(0)
    others = (tensor.data_ptr() for tensor in (coefficients, factors, targets))
    written = (tensor.data_ptr() for tensor in derivatives) if derivatives else (0, 0)
    operands = rows, vocab, rank, start, stride, *others
    call("cross_entropy", losses, operands, (losses, *written))
    return losses
