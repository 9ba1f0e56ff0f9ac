"""torch.library schema, implementation and fake of clip_project. Internal: see ``clipping.py``."""

from typing import Any

import torch
from torch import Tensor

from ._registry import backend, register, rows
from ._types import raise_row_errors


# clip_project: (log_scale, residual, charge, private_lse, status); charge is empty without orders.
def _clip_project(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, public_lse, *options = args
    results = _clip_project_fake(*args)
    on = backend(private_logits.device)
    on.call(
        "clip_project",
        private_logits,
        tuple(private_logits.shape),
        rows(private_logits),
        rows(public_logits),
        public_lse.data_ptr(),
        *options,
        *(result.data_ptr() for result in results),
    )
    if on.immediate:
        raise_row_errors("private_logits", results[4])
    return results


def _clip_project_fake(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_lse, orders = args[0], args[2], args[5]
    scale = public_lse.new_empty(private_logits.shape[:2])
    charge = public_lse.new_empty((*scale.shape, len(orders)))
    status = torch.empty_like(scale, dtype=torch.int32)
    return scale, torch.empty_like(scale), charge, torch.empty_like(scale), status


register(
    "clip_project(Tensor private_logits, Tensor public_logits, Tensor public_lse, float lower,"
    " float upper, float[] orders, int num_models) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _clip_project,
    _clip_project_fake,
)
