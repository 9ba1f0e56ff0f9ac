"""Checks of tensors for all operators, and the rows and log-sum-exps that operators share.

Every error names argument, value and rule. ``prepare`` is for callers that give the same rows to
several operators.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adapmixed import limits

from ._native import DTYPES, F64, call, immediate
from .types import Clipping, Projection

_ops = torch.ops.adapmixed


def tensor(name: str, value: object) -> Tensor:
    """Return the value if it is a tensor that carries no gradient."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.requires_grad:
        raise ValueError(
            f"{name} must not require grad, got requires_grad=True: the operators have no "
            "gradient; call them under torch.no_grad() or detach the tensor"
        )
    if value.layout != torch.strided or value.is_nested:
        raise ValueError(f"{name} must be a dense (strided) tensor, got {value.layout}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on a CPU or CUDA device, got {value.device}")
    return value


def of_type(name: str, value: object, dtype: torch.dtype, shape: tuple[int, ...],
            like: Tensor) -> Tensor:  # fmt: skip
    """Return the value if it is a tensor of exactly this dtype, shape and device."""
    t = tensor(name, value)
    if t.dtype != dtype or tuple(t.shape) != tuple(shape):
        raise ValueError(
            f"{name} must be {dtype} of shape {tuple(shape)}, got {t.dtype} {tuple(t.shape)}"
        )
    _on_device(name, t, like)
    return t


def typed(name: str, value: object, dtype: torch.dtype, shape: tuple[int, ...],
          like: Tensor) -> Tensor:  # fmt: skip
    """Return a contiguous tensor of exactly this dtype, shape and device."""
    return of_type(name, value, dtype, shape, like).contiguous()


def _on_device(name: str, value: Tensor, other: Tensor) -> None:
    """Raise for a tensor on another device than ``other``: nothing is moved silently."""
    if value.device != other.device:
        raise ValueError(f"{name} must be on device {other.device}, got {value.device}")


def logits(name: str, value: object, dims: int) -> Tensor:
    """Return logits with ``dims`` axes, none empty but the positions, and last stride 1."""
    t = tensor(name, value)
    axes = {2: "(B, V)", 3: "(N, B, V)"}[dims]
    if t.dim() != dims:
        raise ValueError(f"{name} must have shape {axes}, got {tuple(t.shape)}")
    if t.dtype not in DTYPES:
        raise ValueError(f"{name} must be float32, bfloat16 or float16, got {t.dtype}")
    limits.check_vocabulary(t.shape[-1], name)
    if dims == 3:
        limits.check_models(t.shape[0], f"{name}.shape[0]")
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def same(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise for two logit tensors of different dtype or device."""
    if value.dtype != other.dtype:
        raise ValueError(
            f"{name} must have the dtype of {other_name}, {other.dtype}, got {value.dtype}"
        )
    _on_device(name, value, other)


def ensemble_logits(private_logits: object, public_logits: object) -> tuple[Tensor, Tensor]:
    """Return private (N, B, V) and public (B, V) logits that fit each other."""
    private = logits("private_logits", private_logits, 3)
    public = logits("public_logits", public_logits, 2)
    same("public_logits", public, "private_logits", private)
    if public.shape != private.shape[1:]:
        raise ValueError(
            f"public_logits must have shape (B, V) = {tuple(private.shape[1:])} to fit "
            f"private_logits {tuple(private.shape)}, got {tuple(public.shape)}"
        )
    return private, public


def slots(num_models: int | None, private: Tensor) -> int:
    """Return the public number of members: N unless stated, never fewer than are present."""
    present = private.shape[0]
    return present if num_models is None else limits.check_models(num_models, least=present)


def members(active: object, private: Tensor, name: str = "active") -> Tensor | None:
    """Return which members take part, (N, B) bool, or None for all."""
    return None if active is None else typed(name, active, torch.bool, private.shape[:2], private)


def tokens(targets: object, public: Tensor) -> Tensor:
    """Return targets (B,), which the CPU checks; a GPU's kernels give NaN for bad ones."""
    t = typed("targets", targets, torch.int64, public.shape[:1], public)
    checked: Tensor = (
        _ops.checked(t, "targets", 0, public.shape[-1] - 1) if immediate(t.device) else t
    )
    return checked


def log_sum_exp(logits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps of rows and their statuses; errors name ``name``."""
    sums: tuple[Tensor, Tensor] = _ops.log_sum_exp(logits, name)
    return sums


def near_log_sum_exp(logits: Tensor, near: Tensor) -> Tensor:
    """Return log-sum-exps within 3.2e-7 on the CPU, in one pass; NaN of rows that it cannot do.

    On a GPU they are those of `log_sum_exp`. Equal rows have equal results.

    Args:
        logits: (B, V) or (N, B, V).
        near: (B,) int64, a column of each position that is likely in its rows.
    """
    if not immediate(logits.device):
        return log_sum_exp(logits, "logits")[0]
    lse = logits.new_empty(logits.shape[:-1], dtype=F64)
    shape = logits.shape if logits.dim() == 3 else (1, *logits.shape)
    call("near_log_sum_exp", logits, logits, *shape, near, lse)
    return lse


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
    private, public = ensemble_logits(private_logits, public_logits)
    public_lse, public_status = log_sum_exp(public, "public_logits")
    private_lse, status = log_sum_exp(private, "private_logits")
    status = torch.where(public_status != 0, 5, status)
    return Inputs(private, public, private_lse, public_lse, status, public_status)


def weighted(
    private_logits: Tensor, public_logits: Tensor, projection: Projection | Clipping | Tensor
) -> tuple[Any, ...]:
    """Return the first arguments of operators on projected rows: logits, their sums, and weights.

    The weights are (weight, residual, lower, upper, active), see csrc/common/operators.h.
    """
    if not isinstance(projection, Projection | Clipping):
        prepared = prepare(private_logits, public_logits)[:4]
        return *prepared, _bare_weights(projection, prepared[0]), None, 0.0, 0.0, None
    private, public = ensemble_logits(private_logits, public_logits)
    shape = private.shape[:2]

    def part(name: str, shape: tuple[int, ...] = shape) -> Tensor:
        return typed(f"projection.{name}", getattr(projection, name), F64, shape, private)

    rows = private, public, part("private_lse"), part("public_lse", shape[1:])
    if isinstance(projection, Projection):
        return *rows, part("weight"), None, 0.0, 0.0, None
    active = members(projection.active, private, "projection.active")
    box = projection.lower, projection.upper
    return *rows, part("log_scale"), part("residual"), *box, active


def _bare_weights(projection: object, private: Tensor) -> Tensor:
    weight, shape = tensor("projection", projection), tuple(private.shape[:2])
    if not weight.is_floating_point() or tuple(weight.shape) != shape:
        raise ValueError(
            "projection must be a Projection or a floating-point weight tensor (N, B) = "
            f"{shape}, got {weight.dtype} {tuple(weight.shape)}"
        )
    _on_device("projection", weight, private)
    weight = weight.to(F64).contiguous()
    checked: Tensor = _ops.checked(weight, "projection", 0.0, 1.0)
    return checked


def likeliest(public: Tensor, count: int, *, by_rank: bool = False) -> Tensor:
    """Return (B, count) int64, the tokens of the largest of (B, V) logits; of ties the smaller.

    They ascend, or begin with the likeliest if `by_rank` is true.
    """
    if public.device.type == "cpu" and not by_rank:  # many times as fast as topk
        rows = public.float().nan_to_num(torch.inf, torch.inf, -torch.inf).numpy()
        least = np.partition(rows, -count)[:, -count, None]
        taken = rows >= least
        if np.count_nonzero(taken) != count * len(rows):  # of ties, the first
            ties, room = rows == least, count - np.count_nonzero(rows > least, 1)
            taken = (rows > least) | (ties & (ties.cumsum(1) <= room[:, None]))
        return torch.from_numpy(np.flatnonzero(taken).reshape(len(rows), count) % rows.shape[1])
    bits = (public.float() + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    # The bits of positive numbers order as integers, those of negative ones the other way round.
    bits ^= (bits >> 31) & 0x7FFFFFFF
    falling = torch.arange(public.shape[-1] - 1, -1, -1, device=public.device)
    unequal = bits.long().bitwise_left_shift_(32).bitwise_or_(falling)
    tokens = unequal.topk(count, sorted=by_rank).indices
    return tokens if by_rank else tokens.sort(-1).values
