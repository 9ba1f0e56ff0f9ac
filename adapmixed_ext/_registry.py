"""How operators reach torch.library, and how tensors reach the compiled module. Internal.

Pointers, strides and a dtype code: the compiled module knows nothing of torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# torch.library is untyped: this one name keeps the rest of the file checked.
_lib: Any = torch.library.Library("adapmixed", "DEF")  # type: ignore[no-untyped-call]
F64 = torch.float64


def _no_cuda(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "adapmixed_ext was built without CUDA kernels: move the tensors to the CPU (build_info() "
        "says what was built)"
    )


def register(schema: str, cpu: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines one operator with its CPU implementation and its fake."""
    name = schema.split("(")[0]
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _lib.impl(name, cpu, "CPU")
    _lib.impl(name, _no_cuda, "CUDA")
    torch.library.register_fake(f"adapmixed::{name}", fake, lib=_lib)


def rows(logits: Tensor) -> tuple[int, int, int, int]:
    strides = logits.stride()
    per_model = strides[0] if logits.dim() == 3 else 0
    return logits.data_ptr(), per_model, strides[-2], _DTYPES[logits.dtype]


def ensemble(
    private_logits: Tensor, public_logits: Tensor, private_lse: Tensor, public_lse: Tensor
) -> tuple[Any, ...]:
    """What every operator after log_sum_exp starts with, as the compiled module takes it."""
    return (
        tuple(private_logits.shape),
        rows(private_logits),
        rows(public_logits),
        private_lse.data_ptr(),
        public_lse.data_ptr(),
    )


def weighted(*tensors: Tensor) -> tuple[Any, ...]:
    """The same with weight and complement behind it."""
    return (*ensemble(*tensors[:4]), tensors[4].data_ptr(), tensors[5].data_ptr())


# Schemas of these arguments.
ENSEMBLE = "Tensor private_logits, Tensor public_logits, Tensor private_lse, Tensor public_lse"
WEIGHTED = f"{ENSEMBLE}, Tensor weight, Tensor complement"


def threads() -> int:
    return torch.get_num_threads()
