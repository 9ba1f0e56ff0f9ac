"""Helpers for tests of ensembles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Make = Callable[..., list[Path]]
# One of each kind of cache, positions, attention and linear layers; `make test-slow` takes all.
FAST = {"bloom", "gemma3_text", "gemma4_text", "gpt_bigcode", "gpt_neo", "gpt2", "llama"}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Change the weights of an adapter in place."""
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    return folder
