"""The operators that draw: validate, document, call, as in ``ops.py``."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _library, _random_library  # noqa: F401  (register the operators)
from . import _validate as check
from ._types import RandomSource

_ops = torch.ops.adapmixed


def _reserve(rng: RandomSource) -> tuple[Tensor, int]:
    if not callable(getattr(rng, "reserve", None)):
        raise ValueError(f"rng must be a random source (adapmixed.rng), got {type(rng).__name__}")
    return rng.reserve()


def gaussian(
    shape: int | Sequence[int],
    *,
    sigma: float,
    rng: RandomSource,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Independent N(0, σ²) variates from the ChaCha20 stream of ``rng``.

    Args:
        shape: of the result.
        sigma: standard deviation ≥ 0.
        rng: a random source (``adapmixed.rng``).
        device: of the result; the numbers do not depend on it.

    Returns:
        float64 tensor.
    """
    sigma = check.finite("sigma", sigma, least=0.0)
    if not isinstance(shape, int | Sequence):
        raise ValueError(f"shape must be an integer or a sequence of integers, got {shape!r}")
    sizes = [check.integer("shape", n, 0) for n in ([shape] if isinstance(shape, int) else shape)]
    if math.prod(sizes) >= 2**40:
        raise ValueError(f"shape must hold fewer than 2**40 numbers, got {shape!r}")
    key, counter = _reserve(rng)
    result: Tensor = _ops.gaussian(key, counter, sizes, sigma, torch.device(device))
    return result


def sample(probabilities: Tensor, public_logits: Tensor, *, rng: RandomSource) -> Tensor:
    """One token per row, exactly in proportion to its float64 probability.

    The law is p/Σp over the tokens with q > 0, without a bound for rounding: no token with q > 0 is
    lost (one whose p is 0 counts as 2^-1074), and none with q = 0 is drawn, whatever p is there.

    Args:
        probabilities: (B, V) float64, rows that sum to 1 within 1e-6.
        public_logits: (B, V): q > 0 where they are > −inf.
        rng: a random source (``adapmixed.rng``).

    Returns:
        (B,) int64 tokens. On CUDA nothing is raised for a bad row of either, here or later: its
        token is -1.

    Raises:
        ValueError: shapes, dtypes, devices, rows of probabilities that are no distribution or have
            less than V·2^-99 in all where q > 0, a row of public logits with NaN, +inf or no finite
            value.
    """
    public = check.logits("public_logits", public_logits, 2)
    _ops.log_sum_exp(public, "public_logits")
    p = check.typed("probabilities", probabilities, torch.float64, tuple(public.shape), public)
    key, counter = _reserve(rng)
    tokens: Tensor = _ops.sample(p, public, key, counter)
    return tokens
