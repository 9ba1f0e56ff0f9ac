"""Helpers for tests of ensembles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tiny_models import adapted_layers
from torch import Tensor

from adapmixed.ensemble import Ensemble, Manifest, write_manifest

Make = Callable[..., list[Path]]
# One of each kind of cache, positions, attention and linear layers; `make test-slow` takes all.
FAST = {"bloom", "gemma3_text", "gemma4_text", "gpt_bigcode", "gpt_neo", "gpt2", "llama"}


def budget(ensemble: Ensemble, batch: int, length: int, chunk: int, last_only: bool) -> int:
    """Return the least `memory_bytes` that gives this chunk size."""
    low, high = 0, 1 << 30
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            size = ensemble.chunk_size(batch, length, middle, last_only=last_only)
        except ValueError:
            size = 0
        low, high = (middle, high) if size < chunk else (low, middle)
    return high


def save_ensemble(folder: Path, adapters: list[Path], **settings: Any) -> Path:
    """Move adapters into an ensemble folder."""
    folder.mkdir(exist_ok=True)
    names = []
    for index, adapter in enumerate(adapters):
        names.append(f"member-{index:03d}")
        adapter.rename(folder / names[-1])
    layers = adapted_layers([folder / name for name in names])
    write_manifest(folder, Manifest("tiny", tuple(names), layers, **settings))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Change the weights of an adapter in place."""
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    return folder
