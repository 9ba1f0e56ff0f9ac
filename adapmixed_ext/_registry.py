"""Registers operators with torch.library and hands tensors to the compiled module. Internal.

Addresses, strides and a dtype code: the compiled module knows nothing of torch. Its structs are
tuples of their fields (csrc/common/operators.h).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _C

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# torch.library is untyped: this one name keeps the rest of the file checked.
_lib: Any = torch.library.Library("adapmixed", "DEF")  # type: ignore[no-untyped-call]
F64 = torch.float64


@dataclass(frozen=True)
class Backend:
    """The compiled operators of one kind of device, and how they are called.

    Attributes:
        module: the operators, each taking `where` as its last argument.
        where: maps a tensor on the device and a workspace to the place where to work.
        immediate: whether the call itself raises errors in the data. Calls that only queue work
            return statuses, and +inf, NaN or token -1 as results.
    """

    module: Any
    where: Callable[[Tensor, Tensor | None], Any]
    immediate: bool

    def workspace(self, name: str, *arguments: Any) -> int:
        """Return the bytes that operator `name` needs; on the CPU its threads have their own."""
        return 0 if self.immediate else getattr(self.module, f"{name}_workspace")(*arguments)

    def call(self, name: str, like: Tensor, *arguments: Any, workspace: int = 0) -> None:
        memory = like.new_empty(workspace, dtype=torch.uint8) if workspace else None
        getattr(self.module, name)(*arguments, self.where(like, memory))


def _queue(like: Tensor, memory: Tensor | None) -> tuple[int, int, int]:
    stream = torch.cuda.current_stream(like.device)
    return stream.device_index, stream.cuda_stream, 0 if memory is None else memory.data_ptr()


backends = {"cpu": Backend(_C.cpu, lambda like, memory: torch.get_num_threads(), True)}
if _C.with_cuda:
    backends["cuda"] = Backend(_C.cuda, _queue, False)


def backend(device: torch.device) -> Backend:
    if device.type not in backends:
        raise RuntimeError(
            f"adapmixed_ext was built without kernels for {device}: move the tensors to the CPU "
            f"(build_info() says what was built)"
        )
    return backends[device.type]


def queues(device: torch.device) -> bool:
    """Tell whether calls on a device only queue work; the device may be absent."""
    return device.type != "cpu" or not backends["cpu"].immediate


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define one operator with its implementation, the same for all devices, and its fake."""
    name = schema.split("(")[0]
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _lib.impl(name, implementation, "CPU")
    _lib.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"adapmixed::{name}", fake, lib=_lib)


def rows(logits: Tensor) -> tuple[int, int, int, int]:
    strides = logits.stride()
    per_model = strides[0] if logits.dim() == 3 else 0
    return logits.data_ptr(), per_model, strides[-2], _DTYPES[logits.dtype]


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def ensemble(
    private_logits: Tensor, public_logits: Tensor, *found: Tensor | None
) -> tuple[Any, ...]:
    """Return the shape, both rows and addresses: of the log-sum-exps, if these are given."""
    both = rows(private_logits), rows(public_logits)
    return tuple(private_logits.shape), *both, *map(address, found)


def weighted(*arguments: Any) -> tuple[Any, ...]:
    """Return the same, and the weights of the projected distributions."""
    *tensors, weight, residual, active, lower, upper = arguments
    weights = weight.data_ptr(), address(residual), lower, upper, address(active)
    return ensemble(*tensors), weights


# Schemas of these arguments.
ENSEMBLE = "Tensor private_logits, Tensor public_logits, Tensor private_lse, Tensor public_lse"
WEIGHTED = f"{ENSEMBLE}, Tensor weight, Tensor? residual, Tensor? active, float lower, float upper"
