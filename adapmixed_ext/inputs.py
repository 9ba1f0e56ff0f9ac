"""The inputs that operators share: logits, their log-sum-exps, and checks of values.

``prepare`` is for callers that give the same rows to several operators.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _tensors as check
from ._registry import F64, backend, register, rows
from ._tensors import ensemble_logits as ensemble_logits
from .types import Clipping, Projection, raise_row_errors

_ops = torch.ops.adapmixed


# log_sum_exp: (B, V) or (N, B, V) -> float64 lse and int32 status, without the last axis. Errors
# name the argument `name`.
def _log_sum_exp(logits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    lse = logits.new_empty(logits.shape[:-1], dtype=F64)
    status = logits.new_empty(logits.shape[:-1], dtype=torch.int32)
    shape = tuple(logits.shape) if logits.dim() == 3 else (1, *logits.shape)
    on = backend(logits.device)
    on.call(
        "log_sum_exp",
        logits,
        rows(logits),
        *shape,
        lse.data_ptr(),
        status.data_ptr(),
        workspace=on.workspace("log_sum_exp", shape),
    )
    if on.immediate:
        raise_row_errors(name, status)
    return lse, status


def _log_sum_exp_fake(logits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    shape = logits.shape[:-1]
    return logits.new_empty(shape, dtype=F64), logits.new_empty(shape, dtype=torch.int32)


register(
    "log_sum_exp(Tensor logits, str name) -> (Tensor, Tensor)", _log_sum_exp, _log_sum_exp_fake
)


def log_sum_exp(logits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps of rows and their statuses; errors name ``name``."""
    found: tuple[Tensor, Tensor] = _ops.log_sum_exp(logits, name)
    return found


def near_log_sum_exp(logits: Tensor, near: Tensor) -> Tensor:
    """Return log-sum-exps within 3.2e-7 on the CPU, in one pass; NaN of rows that it cannot do.

    On a GPU they are those of `log_sum_exp`. Equal rows have equal results.

    Args:
        logits: (B, V) or (N, B, V).
        near: (B,) int64, a column of each position that is likely in its rows.
    """
    if not backend(logits.device).immediate:
        return log_sum_exp(logits, "logits")[0]
    lse = logits.new_empty(logits.shape[:-1], dtype=F64)
    shape = tuple(logits.shape) if logits.dim() == 3 else (1, *logits.shape)
    backend(logits.device).call(
        "near_log_sum_exp", logits, rows(logits), *shape, near.data_ptr(), lse.data_ptr()
    )
    return lse


# checked: a copy of values known to lie in [least, most]. Callers go on with the copy, since a
# compiler would drop a check without a result. If nothing can be raised at once, values outside
# become NaN, and so does whatever is computed from them.
def _checked(values: Tensor, name: str, least: float, most: float) -> Tensor:
    if not backend(values.device).immediate:
        good = (values >= least) & (values <= most) & values.isfinite()
        return torch.where(good, values, math.nan)
    if values.numel():
        low, high = (float(extreme) for extreme in torch.aminmax(values))
        if least <= low and high <= most and math.isfinite(low) and math.isfinite(high):
            return values.clone()
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


register(
    "checked(Tensor values, str name, float least, float most) -> Tensor",
    _checked,
    _checked_fake,
)


class Inputs(NamedTuple):
    """Checked logits and their log-sum-exps."""

    private: Tensor  # (N, B, V)
    public: Tensor  # (B, V)
    private_lse: Tensor  # (N, B) float64
    public_lse: Tensor  # (B,) float64
    status: Tensor  # (N, B) int32
    public_status: Tensor  # (B,) int32


def prepare(private_logits: Tensor, public_logits: Tensor) -> Inputs:
    """Check the logits and pass over them once."""
    private, public = check.ensemble_logits(private_logits, public_logits)
    public_lse, public_status = log_sum_exp(public, "public_logits")
    private_lse, status = log_sum_exp(private, "private_logits")
    status = torch.where(public_status != 0, 5, status)
    return Inputs(private, public, private_lse, public_lse, status, public_status)


def likeliest(public: Tensor, count: int, *, by_rank: bool = False) -> Tensor:
    """Return (B, count) int64, the tokens of the largest logits; of ties the smaller.

    Args:
        public: (B, V) logits, none of them NaN.
        count: at most V.
        by_rank: the likeliest comes first; else tokens ascend.
    """
    bits = (public.float() + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    # The bits of positive numbers order as integers, those of negative ones the other way round.
    bits ^= (bits >> 31) & 0x7FFFFFFF
    falling = torch.arange(public.shape[-1] - 1, -1, -1, device=public.device)
    unequal = bits.long().bitwise_left_shift_(32).bitwise_or_(falling)
    tokens = unequal.topk(count, sorted=by_rank).indices
    return tokens if by_rank else tokens.sort(-1).values


def weighted_inputs(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | Tensor,
    *,
    by_kernel: bool = True,
) -> tuple[Any, ...]:
    """Return the first arguments of operators on projected rows: logits, sums, weights.

    by_kernel: the operator's own CUDA kernels check the values of a result's weights.
    """
    if isinstance(projection, Projection | Clipping):
        private, public = check.ensemble_logits(private_logits, public_logits)
        known = (private, public, *check.row_sums(projection, private))
    else:
        known = prepare(private_logits, public_logits)[:4]
    return *known, *check.weights(projection, known[0], by_kernel=by_kernel)


def refuse_foreign(name: str, foreign: Tensor) -> None:
    """Raise if rows are not those whose log-sum-exps were given."""
    bad = foreign.nonzero()
    if bad.numel():
        where = ", ".join(str(i) for i in bad[0].tolist())
        raise ValueError(
            f"projection must belong to these logits: at {name}[{where}] they are not the rows "
            f"that it was made from, or hold NaN, +inf or no finite value ({bad.shape[0]} such)"
        )


def refuse_targets(targets: Tensor, vocab: int) -> None:
    """Raise for a target outside the vocabulary, which would be read outside the rows."""
    outside = ((targets < 0) | (targets >= vocab)).nonzero()
    if outside.numel():
        at, got = int(outside[0]), int(targets[outside[0]])
        raise ValueError(f"targets[{at}] must be a token in [0, {vocab}), got {got}")
