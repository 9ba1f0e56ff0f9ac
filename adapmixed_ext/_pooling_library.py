"""torch.library schemas, implementations and fakes of the logarithmic pool, as in _library.py."""

from typing import Any

import torch
from torch import Tensor

from ._library import refuse_foreign, refuse_targets
from ._registry import ENSEMBLE, F64, backend, ensemble, register, rows
from ._types import raise_row_errors

_OPTIONS = "Tensor? active, float lower, float upper, float scale, int num_models"


def _options(active: Tensor | None, *numbers: Any) -> tuple[float | int, ...]:
    return (*numbers, 0 if active is None else active.data_ptr())


# log_pool: (log_normaliser, span, private_lse, public_lse, status, public_status)
def _log_pool(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, *options = args
    log_normaliser, span, private_lse, public_lse, status, public_status = results = _log_pool_fake(
        *args
    )
    on = backend(private_logits.device)
    shape = tuple(private_logits.shape)
    found = log_normaliser, span, private_lse, status, public_lse, public_status
    on.call(
        "log_pool", private_logits, shape, rows(private_logits), rows(public_logits),
        _options(*options), *(result.data_ptr() for result in found),
        workspace=on.workspace("log_pool", shape),
    )  # fmt: skip
    if on.immediate:
        raise_row_errors("public_logits", public_status)
        raise_row_errors("private_logits", status)
    return results


def _log_pool_fake(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits = args[:2]
    span = private_logits.new_empty(private_logits.shape[:2], dtype=F64)
    log_normaliser = public_logits.new_empty(public_logits.shape[:1], dtype=F64)
    found = log_normaliser, span, torch.empty_like(span), torch.empty_like(log_normaliser)
    statuses = (torch.empty_like(like, dtype=torch.int32) for like in (span, log_normaliser))
    return *found, *statuses


register(
    f"log_pool(Tensor private_logits, Tensor public_logits, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _log_pool,
    _log_pool_fake,
)


# pool_mixture: (B, V)
def _pool_mixture(*args: Any) -> Tensor:
    *tensors, log_normaliser = args[:5]
    result = _pool_mixture_fake(*args)
    on = backend(result.device)
    inputs = *ensemble(*tensors), _options(*args[5:]), log_normaliser.data_ptr()
    on.call("pool_mixture", result, *inputs, result.data_ptr())
    if on.immediate:
        refuse_foreign("position ", ~((result.sum(-1) - 1.0).abs() <= 1e-6))
    return result


def _pool_mixture_fake(*args: Any) -> Tensor:
    result: Tensor = args[1].new_empty(args[1].shape, dtype=F64)
    return result


register(
    f"pool_mixture({ENSEMBLE}, Tensor log_normaliser, {_OPTIONS}) -> Tensor",
    _pool_mixture,
    _pool_mixture_fake,
)


# pool_log_prob: (B,)
def _pool_log_prob(*args: Any) -> Tensor:
    *tensors, log_normaliser, targets = args[:6]
    vocab = args[1].shape[-1]
    on = backend(targets.device)
    if on.immediate:
        refuse_targets(targets, vocab)
    result = _pool_log_prob_fake(*args)
    inputs = *ensemble(*tensors), _options(*args[6:]), log_normaliser.data_ptr()
    on.call("pool_log_prob", result, *inputs, targets.data_ptr(), result.data_ptr())
    if on.immediate:
        refuse_foreign("position ", ~(result <= 1e-6))
    return result


def _pool_log_prob_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[4])


register(
    f"pool_log_prob({ENSEMBLE}, Tensor log_normaliser, Tensor targets, {_OPTIONS}) -> Tensor",
    _pool_log_prob,
    _pool_log_prob_fake,
)
