"""torch.library schemas, CPU implementations and fakes: one block per operator.

Everything here is internal: ``ops.py`` validates, documents and calls. The implementations hand
pointers, strides and a dtype code to the compiled module, which knows nothing of torch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._types import raise_row_errors

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# torch.library is untyped: this one name keeps the rest of the file checked.
_lib: Any = torch.library.Library("adapmixed", "DEF")  # type: ignore[no-untyped-call]
_F64 = torch.float64


def _no_cuda(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "adapmixed_ext was built without CUDA kernels: move the tensors to the CPU (build_info() "
        "says what was built)"
    )


def _register(schema: str, cpu: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines one operator with its CPU implementation and its fake."""
    name = schema.split("(")[0]
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _lib.impl(name, cpu, "CPU")
    _lib.impl(name, _no_cuda, "CUDA")
    torch.library.register_fake(f"adapmixed::{name}", fake, lib=_lib)


def _rows(logits: Tensor) -> tuple[int, int, int, int]:
    strides = logits.stride()
    per_model = strides[0] if logits.dim() == 3 else 0
    return logits.data_ptr(), per_model, strides[-2], _DTYPES[logits.dtype]


def _ensemble(
    private_logits: Tensor, public_logits: Tensor, private_lse: Tensor, public_lse: Tensor
) -> tuple[Any, ...]:
    """What every operator after log_sum_exp starts with, as the compiled module takes it."""
    return (
        tuple(private_logits.shape),
        _rows(private_logits),
        _rows(public_logits),
        private_lse.data_ptr(),
        public_lse.data_ptr(),
    )


def _threads() -> int:
    return torch.get_num_threads()


# log_sum_exp: (B, V) or (N, B, V) -> float64 lse and int32 status, without the last axis; `name` is
# the argument that an error speaks of.
def _log_sum_exp_cpu(logits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    lse = logits.new_empty(logits.shape[:-1], dtype=_F64)
    status = logits.new_empty(logits.shape[:-1], dtype=torch.int32)
    shape = tuple(logits.shape) if logits.dim() == 3 else (1, *logits.shape)
    _C.log_sum_exp(shape, _rows(logits), lse.data_ptr(), status.data_ptr(), _threads())
    raise_row_errors(name, status)
    return lse, status


def _log_sum_exp_fake(logits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    shape = logits.shape[:-1]
    return logits.new_empty(shape, dtype=_F64), logits.new_empty(shape, dtype=torch.int32)


_register(
    "log_sum_exp(Tensor logits, str name) -> (Tensor, Tensor)", _log_sum_exp_cpu, _log_sum_exp_fake
)


# project
def _project_cpu(
    private_logits: Tensor,
    public_logits: Tensor,
    private_lse: Tensor,
    public_lse: Tensor,
    order: float,
    radius: float,
) -> tuple[Tensor, Tensor]:
    weight, complement = torch.empty_like(private_lse), torch.empty_like(private_lse)
    _C.project(
        *_ensemble(private_logits, public_logits, private_lse, public_lse),
        order,
        radius,
        weight.data_ptr(),
        complement.data_ptr(),
        _threads(),
    )
    return weight, complement


def _project_fake(
    private_logits: Tensor, public_logits: Tensor, private_lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(private_lse), torch.empty_like(private_lse)


_register(
    "project(Tensor private_logits, Tensor public_logits, Tensor private_lse, Tensor public_lse,"
    " float order, float radius) -> (Tensor, Tensor)",
    _project_cpu,
    _project_fake,
)


# leave_one_out
def _leave_one_out_cpu(
    private_logits: Tensor,
    public_logits: Tensor,
    private_lse: Tensor,
    public_lse: Tensor,
    weight: Tensor,
    complement: Tensor,
    orders: Sequence[float],
    zero_out: bool,
    num_models: int,
    mean_excess: Tensor | None,
) -> Tensor:
    loss = private_lse.new_empty((*private_lse.shape, len(orders)))
    _C.leave_one_out(
        *_ensemble(private_logits, public_logits, private_lse, public_lse),
        weight.data_ptr(),
        complement.data_ptr(),
        list(orders),
        zero_out,
        num_models,
        0 if mean_excess is None else mean_excess.data_ptr(),
        loss.data_ptr(),
        _threads(),
    )
    return loss


def _leave_one_out_fake(
    private_logits: Tensor,
    public_logits: Tensor,
    private_lse: Tensor,
    public_lse: Tensor,
    weight: Tensor,
    complement: Tensor,
    orders: Sequence[float],
    *rest: Any,
) -> Tensor:
    return private_lse.new_empty((*private_lse.shape, len(orders)))


_register(
    "leave_one_out(Tensor private_logits, Tensor public_logits, Tensor private_lse,"
    " Tensor public_lse, Tensor weight, Tensor complement, float[] orders, bool zero_out,"
    " int num_models, Tensor? mean_excess) -> Tensor",
    _leave_one_out_cpu,
    _leave_one_out_fake,
)


# mixture
def _mixture_cpu(
    private_logits: Tensor,
    public_logits: Tensor,
    private_lse: Tensor,
    public_lse: Tensor,
    weight: Tensor,
    complement: Tensor,
) -> Tensor:
    result = public_logits.new_empty(public_logits.shape, dtype=_F64)
    _C.mixture(
        *_ensemble(private_logits, public_logits, private_lse, public_lse),
        weight.data_ptr(),
        complement.data_ptr(),
        result.data_ptr(),
        _threads(),
    )
    return result


def _mixture_fake(private_logits: Tensor, public_logits: Tensor, *rest: Any) -> Tensor:
    return public_logits.new_empty(public_logits.shape, dtype=_F64)


_register(
    "mixture(Tensor private_logits, Tensor public_logits, Tensor private_lse, Tensor public_lse,"
    " Tensor weight, Tensor complement) -> Tensor",
    _mixture_cpu,
    _mixture_fake,
)


# log_prob
def _log_prob_cpu(
    private_logits: Tensor,
    public_logits: Tensor,
    private_lse: Tensor,
    public_lse: Tensor,
    weight: Tensor,
    complement: Tensor,
    targets: Tensor,
) -> Tensor:
    vocab = public_logits.shape[-1]
    outside = ((targets < 0) | (targets >= vocab)).nonzero()
    if outside.numel():
        at = int(outside[0])
        raise ValueError(f"targets[{at}] must be a token in [0, {vocab}), got {int(targets[at])}")
    result = torch.empty_like(public_lse)
    _C.log_prob(
        *_ensemble(private_logits, public_logits, private_lse, public_lse),
        weight.data_ptr(),
        complement.data_ptr(),
        targets.data_ptr(),
        result.data_ptr(),
        _threads(),
    )
    return result


def _log_prob_fake(
    private_logits: Tensor,
    public_logits: Tensor,
    private_lse: Tensor,
    public_lse: Tensor,
    *rest: Any,
) -> Tensor:
    return torch.empty_like(public_lse)


_register(
    "log_prob(Tensor private_logits, Tensor public_logits, Tensor private_lse, Tensor public_lse,"
    " Tensor weight, Tensor complement, Tensor targets) -> Tensor",
    _log_prob_cpu,
    _log_prob_fake,
)


# renyi_divergence: P and Q as (M, V)
def _renyi_divergence_cpu(
    p_logits: Tensor, q_logits: Tensor, p_lse: Tensor, q_lse: Tensor, orders: Sequence[float]
) -> tuple[Tensor, Tensor]:
    rows, vocab = p_logits.shape
    forward = p_lse.new_empty((rows, len(orders)))
    backward = torch.empty_like(forward)
    _C.renyi_divergence(
        (1, rows, vocab),
        _rows(p_logits),
        _rows(q_logits),
        p_lse.data_ptr(),
        q_lse.data_ptr(),
        list(orders),
        forward.data_ptr(),
        backward.data_ptr(),
        _threads(),
    )
    return forward, backward


def _renyi_divergence_fake(
    p_logits: Tensor, q_logits: Tensor, p_lse: Tensor, q_lse: Tensor, orders: Sequence[float]
) -> tuple[Tensor, Tensor]:
    shape = (p_logits.shape[0], len(orders))
    return p_lse.new_empty(shape), p_lse.new_empty(shape)


_register(
    "renyi_divergence(Tensor p_logits, Tensor q_logits, Tensor p_lse, Tensor q_lse,"
    " float[] orders) -> (Tensor, Tensor)",
    _renyi_divergence_cpu,
    _renyi_divergence_fake,
)


# screen
def _screen_cpu(
    private_logits: Tensor,
    public_logits: Tensor,
    private_lse: Tensor,
    public_lse: Tensor,
    noise: Tensor,
    active: Tensor | None,
    weight: float,
    order: float,
    threshold: float,
    top_k: int,
    num_models: int,
) -> tuple[Tensor, Tensor]:
    divergence = torch.empty_like(public_lse)
    passed = torch.empty_like(public_lse, dtype=torch.bool)
    _C.screen(
        *_ensemble(private_logits, public_logits, private_lse, public_lse),
        noise.data_ptr(),
        0 if active is None else active.data_ptr(),
        weight,
        order,
        threshold,
        top_k,
        num_models,
        divergence.data_ptr(),
        passed.data_ptr(),
        _threads(),
    )
    return divergence, passed


def _screen_fake(
    private_logits: Tensor,
    public_logits: Tensor,
    private_lse: Tensor,
    public_lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(public_lse), torch.empty_like(public_lse, dtype=torch.bool)


_register(
    "screen(Tensor private_logits, Tensor public_logits, Tensor private_lse, Tensor public_lse,"
    " Tensor noise, Tensor? active, float weight, float order, float threshold, int top_k,"
    " int num_models) -> (Tensor, Tensor)",
    _screen_cpu,
    _screen_fake,
)


# gaussian and sample: key (32,) uint8, counter a call number never used with this key before
def _gaussian_cpu(key: Tensor, counter: int, shape: Sequence[int], sigma: float) -> Tensor:
    result = torch.empty(tuple(shape), dtype=_F64)
    _C.gaussian(key.data_ptr(), counter, sigma, result.numel(), result.data_ptr(), _threads())
    return result


def _gaussian_fake(key: Tensor, counter: int, shape: Sequence[int], sigma: float) -> Tensor:
    return key.new_empty(tuple(shape), dtype=_F64)


_register(
    "gaussian(Tensor key, int counter, SymInt[] shape, float sigma) -> Tensor",
    _gaussian_cpu,
    _gaussian_fake,
)


def _sample_cpu(probabilities: Tensor, public_logits: Tensor, key: Tensor, counter: int) -> Tensor:
    positions, vocab = probabilities.shape
    tokens = torch.empty(positions, dtype=torch.int64)
    status = torch.empty(positions, dtype=torch.int32)
    _C.sample(
        probabilities.data_ptr(),
        _rows(public_logits),
        positions,
        vocab,
        key.data_ptr(),
        counter,
        tokens.data_ptr(),
        status.data_ptr(),
        _threads(),
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


_register(
    "sample(Tensor probabilities, Tensor public_logits, Tensor key, int counter) -> Tensor",
    _sample_cpu,
    _sample_fake,
)


# check_weights: data of a bare weight tensor, checked where the data is (also under torch.compile)
def _check_weights_cpu(weight: Tensor) -> None:
    bad = (~((weight >= 0.0) & (weight <= 1.0))).nonzero()
    if bad.numel():
        at = tuple(bad[0].tolist())
        where = ", ".join(str(i) for i in at)
        raise ValueError(f"projection[{where}] must be a weight in [0, 1], got {float(weight[at])}")


_register("check_weights(Tensor weight) -> ()", _check_weights_cpu, lambda weight: None)


# check_noise: the screening noise must be numbers
def _check_noise_cpu(noise: Tensor) -> None:
    bad = (~noise.isfinite()).nonzero()
    if bad.numel():
        at = tuple(bad[0].tolist())
        where = ", ".join(str(i) for i in at)
        raise ValueError(f"noise[{where}] must be finite, got {float(noise[at])}")


_register("check_noise(Tensor noise) -> ()", _check_noise_cpu, lambda noise: None)
