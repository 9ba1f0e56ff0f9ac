"""Checks of tensors for all operators: every error names argument, value and rule."""

import torch
from torch import Tensor

from adapmixed import limits

from ._registry import queues
from .types import Clipping, Projection

_LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def logits(name: str, value: object, dims: int) -> Tensor:
    """Return logits with ``dims`` axes, none empty but the positions, and last stride 1."""
    t = tensor(name, value)
    axes = {2: "(B, V)", 3: "(N, B, V)"}[dims]
    if t.dim() != dims:
        raise ValueError(f"{name} must have shape {axes}, got {tuple(t.shape)}")
    if t.dtype not in _LOGIT_DTYPES:
        raise ValueError(f"{name} must be float32, bfloat16 or float16, got {t.dtype}")
    limits.check_vocabulary(t.shape[-1], name)
    if dims == 3:
        limits.check_models(t.shape[0], f"{name}.shape[0]")
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def ensemble_logits(private_logits: object, public_logits: object) -> tuple[Tensor, Tensor]:
    """Return private (N, B, V) and public (B, V) logits that fit each other."""
    private, public = (
        logits("private_logits", private_logits, 3),
        logits("public_logits", public_logits, 2),
    )
    same("public_logits", public, "private_logits", private)
    if public.shape != private.shape[1:]:
        raise ValueError(
            f"public_logits must have shape (B, V) = {tuple(private.shape[1:])} to fit "
            f"private_logits {tuple(private.shape)}, got {tuple(public.shape)}"
        )
    return private, public


def same(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise for two logit tensors of different dtype or device."""
    if value.dtype != other.dtype:
        raise ValueError(
            f"{name} must have the dtype of {other_name}, {other.dtype}, got {value.dtype}"
        )
    on_device(name, value, other)


def on_device(name: str, value: Tensor, other: Tensor) -> None:
    """Raise for a tensor on another device than ``other``: nothing is moved silently."""
    if value.device != other.device:
        raise ValueError(f"{name} must be on device {other.device}, got {value.device}")


def slots(num_models: int | None, private_logits: Tensor) -> int:
    """Return the public number of members: N unless stated, never fewer than are present."""
    present = private_logits.shape[0]
    return present if num_models is None else limits.check_models(num_models, least=present)


def box(lower: object, upper: object) -> tuple[float, float]:
    """Return the ratios c and C of a box, both 1 if one is: p̄ = q then."""
    c, d = limits.check_box(lower, upper)
    return (1.0, 1.0) if c == 1.0 or d == 1.0 else (c, d)


def weights(
    projection: object, private_logits: Tensor, *, by_kernel: bool = False
) -> tuple[object, ...]:
    """Return (weight, residual, active, lower, upper), see csrc/common/operators.h.

    by_kernel: the operator's own CUDA kernels check the values of a result's weights.
    """
    check = not (by_kernel and queues(private_logits.device))
    if isinstance(projection, Clipping):
        return _box_weights(projection, private_logits, check)
    return _ball_weights(projection, private_logits, check), None, None, 0.0, 0.0


def _box_weights(clipping: Clipping, private_logits: Tensor, check: bool) -> tuple[object, ...]:
    shape = tuple(private_logits.shape[:2])
    lower, upper = box(clipping.lower, clipping.upper)
    scale = typed("projection.log_scale", clipping.log_scale, torch.float64, shape, private_logits)
    residual = typed("projection.residual", clipping.residual, torch.float64, shape, private_logits)
    if check:
        residual = torch.ops.adapmixed.checked(residual, "projection.residual", lower, upper)
    active = clipping.active
    if active is not None:
        active = typed("projection.active", active, torch.bool, shape, private_logits)
    return scale, residual, active, lower, upper


def _ball_weights(projection: object, private_logits: Tensor, check: bool) -> Tensor:
    """Return the weight, float64, of a Projection or of a bare weight tensor."""
    shape = tuple(private_logits.shape[:2])
    if isinstance(projection, Projection):
        name = "projection.weight"
        weight = typed(name, projection.weight, torch.float64, shape, private_logits)
        if not check:
            return weight
    else:
        name, weight = "projection", tensor("projection", projection)
        if not weight.is_floating_point() or tuple(weight.shape) != shape:
            raise ValueError(
                "projection must be a Projection or a floating-point weight tensor (N, B) = "
                f"{shape}, got {weight.dtype} {tuple(weight.shape)}"
            )
        on_device(name, weight, private_logits)
        weight = weight.to(torch.float64).contiguous()
    checked: Tensor = torch.ops.adapmixed.checked(weight, name, 0.0, 1.0)
    return checked


def row_sums(projection: Projection | Clipping, private_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return a projection's (private_lse, public_lse), with the shapes of these logits."""
    shape = tuple(private_logits.shape[:2])
    return (
        typed("projection.private_lse", projection.private_lse, torch.float64, shape,
              private_logits),
        typed("projection.public_lse", projection.public_lse, torch.float64, shape[1:],
              private_logits),
    )  # fmt: skip


def typed(name: str, value: object, dtype: torch.dtype, shape: tuple[int, ...],
          like: Tensor) -> Tensor:  # fmt: skip
    """Return a contiguous tensor of exactly this dtype, shape and device."""
    return of_type(name, value, dtype, shape, like).contiguous()


def of_type(name: str, value: object, dtype: torch.dtype, shape: tuple[int, ...],
            like: Tensor) -> Tensor:  # fmt: skip
    """Return the value if it is a tensor of exactly this dtype, shape and device."""
    t = tensor(name, value)
    if t.dtype != dtype or tuple(t.shape) != shape:
        raise ValueError(f"{name} must be {dtype} of shape {shape}, got {t.dtype} {tuple(t.shape)}")
    on_device(name, t, like)
    return t
