"""Schemas, CPU implementations and fakes of the operators that draw: one block per operator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _C
from ._registry import F64, register, rows, threads


# key (32,) uint8, counter a call number never used with this key before
def _check_key(key: Tensor, counter: int) -> None:
    # 32 bytes are read from its address.
    if key.dtype != torch.uint8 or tuple(key.shape) != (32,) or not key.is_contiguous():
        raise ValueError(
            f"rng must give a contiguous key of dtype torch.uint8 and shape (32,), got "
            f"{key.dtype} {tuple(key.shape)}"
        )
    if not 0 <= counter < 2**63:
        raise ValueError(f"rng must give a counter in [0, 2**63), got {counter}")


def _gaussian_cpu(key: Tensor, counter: int, shape: Sequence[int], sigma: float) -> Tensor:
    _check_key(key, counter)
    result = torch.empty(tuple(shape), dtype=F64)
    _C.gaussian(key.data_ptr(), counter, sigma, result.numel(), result.data_ptr(), threads())
    return result


def _gaussian_fake(key: Tensor, counter: int, shape: Sequence[int], sigma: float) -> Tensor:
    return key.new_empty(tuple(shape), dtype=F64)


register(
    "gaussian(Tensor key, int counter, SymInt[] shape, float sigma) -> Tensor",
    _gaussian_cpu,
    _gaussian_fake,
)


def _sample_cpu(probabilities: Tensor, public_logits: Tensor, key: Tensor, counter: int) -> Tensor:
    _check_key(key, counter)
    positions, vocab = probabilities.shape
    tokens = torch.empty(positions, dtype=torch.int64)
    status = torch.empty(positions, dtype=torch.int32)
    _C.sample(
        probabilities.data_ptr(),
        rows(public_logits),
        positions,
        vocab,
        key.data_ptr(),
        counter,
        tokens.data_ptr(),
        status.data_ptr(),
        threads(),
    )
    bad = status.nonzero()
    if bad.numel():
        at = int(bad[0])
        if int(status[at]) == 2:
            raise ValueError(f"public_logits[{at}] has no finite value: no token has q > 0")
        raise ValueError(
            f"probabilities[{at}] must be >= 0 and sum to 1 within 1e-6, got a row with minimum "
            f"{float(probabilities[at].min())} and sum {float(probabilities[at].sum())}"
        )
    return tokens


def _sample_fake(probabilities: Tensor, public_logits: Tensor, key: Tensor, counter: int) -> Tensor:
    return probabilities.new_empty(probabilities.shape[:1], dtype=torch.int64)


register(
    "sample(Tensor probabilities, Tensor public_logits, Tensor key, int counter) -> Tensor",
    _sample_cpu,
    _sample_fake,
)
