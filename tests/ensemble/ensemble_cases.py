"""Helpers for tests of ensembles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from adapmixed.ensemble import Ensemble

Make = Callable[..., list[Path]]


def budget(ensemble: Ensemble, batch: int, length: int, chunk: int, last_only: bool) -> int:
    """Return the least `memory_bytes` that gives this chunk size."""
    low, high = 0, 1 << 30
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            size = ensemble._forward.chunk_size(batch, length, middle, last_only=last_only)
        except ValueError:
            size = 0
        low, high = (middle, high) if size < chunk else (low, middle)
    return high
