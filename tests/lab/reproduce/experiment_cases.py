"""Inputs and rows of small experiments."""

from __future__ import annotations

from typing import Any

import torch
from fake_ensemble import FakeEnsemble

from adapmixed_lab.reproduce.inputs import Texts
from adapmixed_lab.reproduce.sources import Sources


def inputs(models: int = 3, tokens: int = 2000, **sources: Any) -> Texts:
    """Return inputs with a small ensemble in place of the built-in one, and text for its pool."""
    generator = torch.Generator().manual_seed(3)
    stream = torch.randint(0, 7, (tokens,), generator=generator).tolist()
    ensemble: Any = FakeEnsemble(models, spread=0.3, max_positions=32)
    return Texts(Sources(**sources), ensemble, tuple(stream), "random", tuple(stream[:20]))


def rows_of(result: dict[str, Any], method: str) -> list[dict[str, Any]]:
    return [one for one in result["rows"] if one["method"] == method]
