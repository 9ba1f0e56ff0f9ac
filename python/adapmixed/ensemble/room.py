"""Memory for logits that is used again: fresh pages cost more than the numbers in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_use_count = getattr(torch._C, "_storage_Use_Count", None)


class LogitsRoom:
    """One block of memory, lent again once nobody else refers to it.

    Whoever keeps the tensor, a view of it or an array over it keeps the numbers, too: the next call
    then gets new memory. A bare storage (`Tensor.untyped_storage()`) without a tensor does not.
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
            self._block = block = None  # the old block goes before the new one comes
            self._block = block = like.new_empty(size)
        return block[:size].view(*shape)


def _is_ours_alone(block: Tensor) -> bool:
    if _use_count is None:
        return False
    storage = block.untyped_storage()
    return int(_use_count(storage._cdata)) <= _OURS


def _own_count() -> int:
    """References of a block that nobody else has: its tensor's and that of asking."""
    if _use_count is None:
        return 0
    block = torch.empty(1)
    return int(_use_count(block.untyped_storage()._cdata))


_OURS = _own_count()
