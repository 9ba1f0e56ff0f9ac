"""torch.library schemas, CPU implementations and fakes: one block per operator.

Everything here is internal: ``ops.py`` validates, documents and calls. The implementations hand
pointers, strides and a dtype code to the compiled module, which knows nothing of torch.
"""

import math
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


def _weighted(*tensors: Tensor) -> tuple[Any, ...]:
    """The same with weight and complement behind it."""
    return (*_ensemble(*tensors[:4]), tensors[4].data_ptr(), tensors[5].data_ptr())


# Schemas of these arguments.
_ENSEMBLE = "Tensor private_logits, Tensor public_logits, Tensor private_lse, Tensor public_lse"
_WEIGHTED = f"{_ENSEMBLE}, Tensor weight, Tensor complement"


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


def _refuse_foreign(name: str, foreign: Tensor) -> None:
    """Raises where rows turn out not to be those whose log-sum-exps were given."""
    bad = foreign.nonzero()
    if bad.numel():
        where = ", ".join(str(i) for i in bad[0].tolist())
        raise ValueError(
            f"projection must belong to these logits: at {name}[{where}] they are not the rows "
            f"that it was made from, or hold NaN, +inf or no finite value ({bad.shape[0]} such)"
        )


# project: (weight, complement, private_lse, status)
def _project_cpu(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, public_lse, order, radius = args
    results = _project_fake(*args)
    _C.project(
        tuple(private_logits.shape),
        _rows(private_logits),
        _rows(public_logits),
        public_lse.data_ptr(),
        order,
        radius,
        *(result.data_ptr() for result in results),
        _threads(),
    )
    raise_row_errors("private_logits", results[3])
    return results


def _project_fake(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_lse = args[0], args[2]
    weight = public_lse.new_empty(private_logits.shape[:2])
    status = torch.empty_like(weight, dtype=torch.int32)
    return weight, torch.empty_like(weight), torch.empty_like(weight), status


_register(
    "project(Tensor private_logits, Tensor public_logits, Tensor public_lse, float order,"
    " float radius) -> (Tensor, Tensor, Tensor, Tensor)",
    _project_cpu,
    _project_fake,
)


# leave_one_out: (N, B, K)
def _leave_one_out_cpu(*args: Any) -> Tensor:
    *tensors, orders, zero_out, num_models, mean_excess = args
    loss = _leave_one_out_fake(*args)
    mean_pointer = 0 if mean_excess is None else mean_excess.data_ptr()
    options = list(orders), zero_out, num_models, mean_pointer
    balance = torch.empty_like(tensors[2])
    pointers = loss.data_ptr(), balance.data_ptr()
    _C.leave_one_out(*_weighted(*tensors), *options, *pointers, _threads())
    _refuse_foreign("private_logits", ~(balance.abs() <= 1e-5))
    return loss


def _leave_one_out_fake(*args: Any) -> Tensor:
    private_lse, orders = args[2], args[6]
    loss: Tensor = private_lse.new_empty((*private_lse.shape, len(orders)))
    return loss


_register(
    f"leave_one_out({_WEIGHTED}, float[] orders, bool zero_out, int num_models,"
    " Tensor? mean_excess) -> Tensor",
    _leave_one_out_cpu,
    _leave_one_out_fake,
)


# mixture: (B, V)
def _mixture_cpu(*tensors: Tensor) -> Tensor:
    result = _mixture_fake(*tensors)
    _C.mixture(*_weighted(*tensors), result.data_ptr(), _threads())
    _refuse_foreign("position ", ~((result.sum(-1) - 1.0).abs() <= 1e-6))
    return result


def _mixture_fake(*tensors: Tensor) -> Tensor:
    return tensors[1].new_empty(tensors[1].shape, dtype=_F64)


_register(f"mixture({_WEIGHTED}) -> Tensor", _mixture_cpu, _mixture_fake)


# log_prob: (B,); a target outside the vocabulary would be read outside the rows
def _log_prob_cpu(*tensors: Tensor) -> Tensor:
    targets, vocab = tensors[6], tensors[1].shape[-1]
    outside = ((targets < 0) | (targets >= vocab)).nonzero()
    if outside.numel():
        at = int(outside[0])
        raise ValueError(f"targets[{at}] must be a token in [0, {vocab}), got {int(targets[at])}")
    result = _log_prob_fake(*tensors)
    _C.log_prob(*_weighted(*tensors[:6]), targets.data_ptr(), result.data_ptr(), _threads())
    _refuse_foreign("position ", ~(result <= 1e-6))
    return result


def _log_prob_fake(*tensors: Tensor) -> Tensor:
    return torch.empty_like(tensors[3])


_register(f"log_prob({_WEIGHTED}, Tensor targets) -> Tensor", _log_prob_cpu, _log_prob_fake)


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


# screen: (divergence, passed)
def _screen_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, noise, active, weight, order, threshold, top_k, num_models = args
    divergence, passed = _screen_fake(*args)
    inputs = noise.data_ptr(), 0 if active is None else active.data_ptr()
    options = weight, order, threshold, top_k, num_models
    pointers = divergence.data_ptr(), passed.data_ptr()
    _C.screen(*_ensemble(*tensors), *inputs, *options, *pointers, _threads())
    return divergence, passed


def _screen_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args[3]), torch.empty_like(args[3], dtype=torch.bool)


_register(
    f"screen({_ENSEMBLE}, Tensor noise, Tensor? active, float weight, float order,"
    " float threshold, int top_k, int num_models) -> (Tensor, Tensor)",
    _screen_cpu,
    _screen_fake,
)


# gaussian and sample: key (32,) uint8, counter a call number never used with this key before
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
    _check_key(key, counter)
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


# checked: a copy of values known to lie in [least, most]. The result is what the caller goes on
# with: a check without one would be dropped by a compiler.
def _checked_cpu(values: Tensor, name: str, least: float, most: float) -> Tensor:
    good = (values >= least) & (values <= most) & values.isfinite()
    bad = (~good).nonzero()
    if bad.numel():
        at = tuple(bad[0].tolist())
        where = ", ".join(str(i) for i in at)
        rule = "finite" if most == math.inf and least == -math.inf else f"in [{least:g}, {most:g}]"
        raise ValueError(f"{name}[{where}] must be {rule}, got {float(values[at])}")
    return values.clone()


def _checked_fake(values: Tensor, name: str, least: float, most: float) -> Tensor:
    return torch.empty_like(values)


_register(
    "checked(Tensor values, str name, float least, float most) -> Tensor",
    _checked_cpu,
    _checked_fake,
)
