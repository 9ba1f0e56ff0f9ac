"""sample and gaussian: tokens and normal numbers from a ChaCha20 stream."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adapmixed.limits import check_count, check_number

from . import _tensors as check
from ._registry import F64, backend, register, rows
from .inputs import log_sum_exp
from .types import RandomSource

_ops = torch.ops.adapmixed


# 32 bytes are read from the key's address. A call number is never used twice with the same key.
def _check_key(key: object, counter: object) -> None:
    if not isinstance(key, Tensor):
        raise ValueError(f"rng must give a key that is a torch.Tensor, got {type(key).__name__}")
    here = key.device.type == "cpu" and key.layout == torch.strided
    if key.dtype != torch.uint8 or tuple(key.shape) != (32,) or not here or key.stride() != (1,):
        raise ValueError(
            f"rng must give a contiguous key on the CPU, of dtype torch.uint8 and shape (32,), got "
            f"{key.dtype} {tuple(key.shape)}, {key.layout}, on {key.device}"
        )
    if isinstance(counter, bool) or not isinstance(counter, int) or not 0 <= counter < 2**63:
        raise ValueError(f"rng must give a counter in [0, 2**63), got {counter!r}")


def _check_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "random numbers cannot be captured in a CUDA graph: every replay would draw the same"
        )


def _gaussian(
    key: Tensor,
    counter: int,
    shape: Sequence[int],
    sigma: float,
    device: torch.device | None = None,
) -> Tensor:
    device = device or key.device
    on = backend(device)
    _check_capture(device)
    _check_key(key, counter)
    result = torch.empty(tuple(shape), dtype=F64, device=device)
    inputs = key.data_ptr(), counter, sigma, result.numel(), result.data_ptr()
    on.call("gaussian", result, *inputs)
    return result


def _gaussian_fake(
    key: Tensor,
    counter: int,
    shape: Sequence[int],
    sigma: float,
    device: torch.device | None = None,
) -> Tensor:
    return key.new_empty(tuple(shape), dtype=F64, device=device or key.device)


register(
    "gaussian(Tensor key, int counter, SymInt[] shape, float sigma, Device? device=None) -> Tensor",
    _gaussian,
    _gaussian_fake,
)


def _sample(probabilities: Tensor, public_logits: Tensor, key: Tensor, counter: int) -> Tensor:
    _check_capture(probabilities.device)
    _check_key(key, counter)
    positions, vocab = probabilities.shape
    tokens = probabilities.new_empty(positions, dtype=torch.int64)
    status = probabilities.new_empty(positions, dtype=torch.int32)
    on = backend(probabilities.device)
    on.call(
        "sample",
        probabilities,
        probabilities.data_ptr(),
        rows(public_logits),
        positions,
        vocab,
        key.data_ptr(),
        counter,
        tokens.data_ptr(),
        status.data_ptr(),
        workspace=on.workspace("sample", positions, vocab),
    )
    if not on.immediate:
        return tokens
    bad = status.nonzero()
    if bad.numel():
        at = int(bad[0])
        if int(status[at]) == 2:
            raise ValueError(f"public_logits[{at}] has no finite value: no token has q > 0")
        if int(status[at]) == 3:
            total = float(probabilities[at][~public_logits[at].isneginf()].sum())
            raise ValueError(
                f"probabilities[{at}] must sum to V 2^-99 or more where q > 0, got {total}"
            )
        raise ValueError(
            f"probabilities[{at}] must be >= 0 and sum to 1 within 1e-6, got a row with minimum "
            f"{float(probabilities[at].min())} and sum {float(probabilities[at].sum())}"
        )
    return tokens


def _sample_fake(probabilities: Tensor, public_logits: Tensor, key: Tensor, counter: int) -> Tensor:
    return probabilities.new_empty(probabilities.shape[:1], dtype=torch.int64)


register(
    "sample(Tensor probabilities, Tensor public_logits, Tensor key, int counter) -> Tensor",
    _sample,
    _sample_fake,
)


def _reserve(rng: RandomSource) -> tuple[Tensor, int]:
    if not callable(getattr(rng, "reserve", None)):
        raise ValueError(f"rng must be a random source (adapmixed.rng), got {type(rng).__name__}")
    drawn: object = rng.reserve()
    if not isinstance(drawn, tuple) or len(drawn) != 2:
        raise ValueError(f"rng must give a key and a counter, got {type(drawn).__name__}")
    key, counter = drawn
    _check_key(key, counter)
    return key, counter


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or CUDA device, got {device!r}")
    return found


def gaussian(
    shape: int | Sequence[int],
    *,
    sigma: float,
    rng: RandomSource,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw independent N(0, σ²) variates from the ChaCha20 stream of ``rng``.

    Args:
        shape: shape of the result, fewer than 2^40 numbers.
        sigma: standard deviation, ≥ 0.
        rng: a random source (``adapmixed.rng``).
        device: device of the result; the numbers do not depend on it.

    Returns:
        float64 tensor of that shape.

    Raises:
        ValueError: sigma, shape, rng or device out of range or of another type.
    """
    sigma = check_number("sigma", sigma, least=0.0)
    on = _device(device)
    if not isinstance(shape, int | Sequence) or isinstance(shape, str | bytes):
        raise ValueError(f"shape must be an integer or a sequence of integers, got {shape!r}")
    sizes = [check_count("shape", n, 0) for n in ([shape] if isinstance(shape, int) else shape)]
    if math.prod(sizes) >= 2**40:
        raise ValueError(f"shape must hold fewer than 2**40 numbers, got {shape!r}")
    key, counter = _reserve(rng)
    result: Tensor = _ops.gaussian(key, counter, sizes, sigma, on)
    return result


def sample(probabilities: Tensor, public_logits: Tensor, *, rng: RandomSource) -> Tensor:
    """Draw one token per row, exactly in proportion to its float64 probability.

    The distribution is p/Σp over the tokens with q > 0. Rounding adds nothing to it. No token with
    q > 0 is lost: one whose p is 0 counts as 2^-1074. No token with q = 0 is drawn, whatever its p.

    Args:
        probabilities: (B, V) float64, rows that sum to 1 within 1e-6.
        public_logits: (B, V); q > 0 for the tokens above −inf.
        rng: a random source (``adapmixed.rng``).

    Returns:
        (B,) int64 tokens. On CUDA nothing is raised for a bad row, here or later: its token is -1.

    Raises:
        ValueError: wrong shapes, dtypes or devices; a row of probabilities that is no distribution,
            or has less than V·2^-99 in all on the tokens with q > 0; a row of public logits with
            NaN, +inf or no finite value.
    """
    public = check.logits("public_logits", public_logits, 2)
    if backend(public.device).immediate:
        log_sum_exp(public, "public_logits")  # for its errors
    p = check.typed("probabilities", probabilities, torch.float64, tuple(public.shape), public)
    key, counter = _reserve(rng)
    tokens: Tensor = _ops.sample(p, public, key, counter)
    return tokens
