"""Ensembles with bad rows, and the errors of every operator whose result has a status."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import adapmixed_ext

NAN, INF = math.nan, math.inf
# (model, position, value): one logit gets the value, or the whole row. Model -1 is the public one.
KINDS: dict[str, tuple[tuple[int, int, float], ...]] = {
    "private NaN": ((1, 0, NAN),),
    "private rows": ((2, 1, INF), (1, 2, -INF), (0, 2, 3e6)),
    "public NaN": ((-1, 1, NAN),),
    "public +inf": ((-1, 2, INF),),
    "public empty": ((-1, 0, -INF),),
    "public large": ((-1, 0, 3e6),),
    "public rows": ((-1, 2, NAN), (-1, 1, 3e6)),
    "both": ((0, 0, NAN), (-1, 1, INF), (2, 1, -INF)),
}
ROW = (-INF, 3e6)  # values that fill a whole row

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "project": lambda p, q: adapmixed_ext.project(p, q, order=18.0, radius=3.6),
    "project, floats": lambda p, q: adapmixed_ext.project(p, q, order=3.0, radius=0.03),
    "clip_project": lambda p, q: adapmixed_ext.clip_project(p, q, lower=0.5, upper=2.0, orders=2),
    "log_pool": lambda p, q: adapmixed_ext.log_pool(p, q, lower=-0.25, upper=1.0, scale=2.0),
    "screen": lambda p, q: adapmixed_ext.screen(
        p, q, torch.zeros(len(q), 3, dtype=torch.float64, device=q.device),
        weight=0.1, order=2.0, threshold=1.0, top_k=3,
    ),
}  # fmt: skip


def logits(kind: str) -> tuple[Tensor, Tensor]:
    """Return private (4, 3, 37) and public (3, 37) logits with the bad values of `kind`."""
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(3, 37, generator=generator)
    private = public + 0.3 * torch.randn(4, 3, 37, generator=generator)
    for model, position, value in KINDS[kind]:
        row = public[position] if model < 0 else private[model, position]
        row[slice(None) if value in ROW else slice(5, 6)] = value
    return private, public


def said(name: str, private: Tensor, public: Tensor) -> str:
    """Return the error of the call, or of the result's ``check()``."""
    try:
        CALLS[name](private, public).check()
    except ValueError as error:
        return str(error)
    return "nothing"
