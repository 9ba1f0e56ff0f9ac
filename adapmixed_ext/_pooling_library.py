"""torch.library schemas, implementations and fakes of the logarithmic pool, as in _library.py."""

from typing import Any

import torch
from torch import Tensor

from ._library import refuse_foreign, refuse_targets
from ._registry import ENSEMBLE, F64, backend, ensemble, register, rows
from ._types import raise_row_errors

_OPTIONS = (
    "Tensor? active, Tensor? sum_log_ratio, float lower, float upper, float scale, int num_models"
)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _options(
    active: Tensor | None, sum_log_ratio: Tensor | None, *numbers: Any
) -> tuple[float | int, ...]:
    return (*numbers, _pointer(active), _pointer(sum_log_ratio))


def _call(
    private_logits: Tensor, public_logits: Tensor, options: tuple[Any, ...], *wanted: Tensor | None
) -> tuple[Tensor, ...]:
    """Runs log_pool for (log_normaliser, span, sum).

    Gives (private_lse, public_lse, status, public_status).
    """
    positions = public_logits.shape[:1]
    private_lse = private_logits.new_empty(private_logits.shape[:2], dtype=F64)
    status = torch.empty_like(private_lse, dtype=torch.int32)
    public_lse = public_logits.new_empty(positions, dtype=F64)
    public_status = public_logits.new_empty(positions, dtype=torch.int32)
    on = backend(private_logits.device)
    shape = tuple(private_logits.shape)
    found = *wanted, private_lse, status, public_lse, public_status
    given = wanted[2] is not None or options[-1] != 0  # where sums are kept, or are at hand
    size = 0 if given else on.workspace("log_pool", shape)
    on.call(
        "log_pool", private_logits, shape, rows(private_logits), rows(public_logits), options,
        *(_pointer(result) for result in found), workspace=size,
    )  # fmt: skip
    if on.immediate:
        raise_row_errors("public_logits", public_status)
        raise_row_errors("private_logits", status)
    return private_lse, public_lse, status, public_status


# log_pool: (log_normaliser, span, private_lse, public_lse, status, public_status)
def _log_pool(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, *options = args
    log_normaliser, span = _log_pool_fake(*args)[:2]
    rows_found = _call(
        private_logits, public_logits, _options(*options), log_normaliser, span, None
    )
    return log_normaliser, span, *rows_found


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


# log_pool_sum: (B, V)
def _log_pool_sum(*args: Any) -> Tensor:
    private_logits, public_logits, active, lower, upper, num_models = args
    total = _log_pool_sum_fake(*args)
    options = _options(active, None, lower, upper, 1.0, num_models)
    _call(private_logits, public_logits, options, None, None, total)
    return total


def _log_pool_sum_fake(*args: Any) -> Tensor:
    total: Tensor = args[1].new_empty(args[1].shape, dtype=F64)
    return total


register(
    "log_pool_sum(Tensor private_logits, Tensor public_logits, Tensor? active, float lower,"
    " float upper, int num_models) -> Tensor",
    _log_pool_sum,
    _log_pool_sum_fake,
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
