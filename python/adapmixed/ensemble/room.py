"""Reuse memory for logits: fresh pages cost more time than computing the numbers in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_use_count = getattr(torch._C, "_storage_Use_Count", None)


class LogitsRoom:
    """One block of memory, used again once nobody else refers to it.

    While a caller holds the tensor, a view or an array over it, its numbers stay valid and the next
    call gets new memory. A storage (`Tensor.untyped_storage()`) held alone does not protect them.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None

    def release(self, size: int) -> None:
        """Free the block if it holds more than `size` numbers."""
        if self._block is not None and len(self._block) > size:
            self._block = None

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return uninitialised memory of this shape, with the dtype and device of `like`."""
        size = math.prod(shape)
        block = self._block
        fits = block is not None and block.dtype == like.dtype and block.device == like.device
        if block is None or not fits or len(block) < size or not _is_ours_alone(block):
            self._block = block = None  # free the old block before allocating the new one
            self._block = block = like.new_empty(size)
        return block[:size].view(*shape)


def _is_ours_alone(block: Tensor) -> bool:
    if _use_count is None:
        return False
    storage = block.untyped_storage()
    return int(_use_count(storage._cdata)) <= _OURS


def _own_count() -> int:
    """Return the reference count of a storage that nobody else holds."""
    if _use_count is None:
        return 0
    block = torch.empty(1)
    return int(_use_count(block.untyped_storage()._cdata))


_OURS = _own_count()
