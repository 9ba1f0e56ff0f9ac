"""Questions for both versions: events to compose and logits to answer, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

DELTA = 1e-5

Events = list[tuple[str, dict[str, Any]]]
"""(class name, fields) of each privacy event; arrays are nested lists."""


def event_cases() -> Iterator[tuple[str, Events]]:
    """Yield (name, events) for every kind of total."""
    pool = {"scale": 1.0, "lower": -0.25, "upper": 1.0, "num_models": 100}
    box = {"lower": 0.8, "upper": 2.5, "num_models": 100}
    bound = {"order": 3.0, "epsilon": 1e-4, "num_models": 80, "adjacency": "zero_out"}
    for queries in (1, 1024, 99_840):
        yield f"pool {queries}", [("BoundedRangeAnswer", pool | {"queries": queries})]
        yield (
            f"planned pool {queries}",
            [("BoundedRangeAnswer", pool | {"queries": 1, "budget": queries})],
        )
        yield f"box {queries}", [("ClippedAnswer", box | {"queries": 1, "budget": queries})]
        yield (
            f"bound {queries}",
            [("RenyiBound", bound | {"queries": 1, "budget": queries, "published": False})],
        )
    yield "public", [("PublicAnswer", {"queries": 3})]
    yield "unprotected", [("UnprotectedAnswer", {"queries": 3})]
    generator = torch.Generator().manual_seed(1)
    for adjacency in ("add_remove", "zero_out"):
        for orders in ((18.0,), (2.0, 8.0, 18.0)):
            events: Events = []
            for _ in range(5):
                loss = torch.rand(7, 3, len(orders), generator=generator, dtype=torch.float64)
                events.append(
                    (
                        "GaussianScreening",
                        {"num_models": 7, "queries": 3, "weight": 1e-4, "sigma": 1e-2},
                    )
                )
                events.append(
                    (
                        "LeaveOneOutLoss",
                        {
                            "orders": orders,
                            "loss": (1e-3 * loss).tolist(),
                            "adjacency": adjacency,
                            "loss_error": 1e-5,
                        },
                    )
                )
                events.append(("PublicAnswer", {"queries": 1}))
            yield f"losses {adjacency} {len(orders)}", events


SHAPES = ((1, 1, 17), (5, 3, 64), (12, 2, 1000), (100, 1, 4099))
"""(N, B, V)."""


def logits(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (N, B, V) and (B, V) logits of members near the public model.

    The second member is the public model, and one token is masked everywhere.
    """
    models, positions, vocabulary = shape
    generator = torch.Generator().manual_seed(models * 1000 + vocabulary)
    public = 3 * torch.randn(positions, vocabulary, generator=generator)
    private = public + torch.randn(models, positions, vocabulary, generator=generator)
    if models > 1:
        private[1] = public
    private[..., 3] = public[..., 3] = -torch.inf
    return private.to(dtype), public.to(dtype)


MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "pmixed": ("PMixED", {"epsilon": 8.0, "delta": DELTA, "queries": 100, "order": 3.0}),
    "pmixed thinned": (
        "PMixED",
        {"epsilon": 8.0, "delta": DELTA, "queries": 100, "order": 3.0, "sample_rate": 0.25},
    ),
    "adapmixed": ("AdaPMixED", {"order": 18.0, "target_leakage": 0.2, "adjacency": "zero_out"}),
    "adapmixed screened away": (
        "AdaPMixED",
        {"order": 18.0, "target_leakage": 0.2, "adjacency": "zero_out", "threshold": 0.0},
    ),
    "adapmixed leave-one-out": (
        "AdaPMixED",
        {"order": 18.0, "target_leakage": 0.2, "adjacency": "add_remove", "screen": None},
    ),
    "adapmixed orders": (
        "AdaPMixED",
        {
            "order": 18.0,
            "target_leakage": 0.2,
            "adjacency": "zero_out",
            "screen": "public",
            "loss_orders": (2.0, 18.0),
        },
    ),
    "adapmixed fixed": ("AdaPMixED", {"order": 18.0, "target_leakage": 0.01, "loss": "fixed"}),
    "mixing": ("ClippedMixing", {"lower": 0.8, "upper": 2.5, "queries": 100}),
    "mixing charged": ("ClippedMixing", {"lower": 0.8, "upper": 2.5, "order": 8.0}),
    "mixing unsure": (
        "ClippedMixing",
        {"lower": 0.8, "upper": 2.5, "queries": 100, "public_confidence": 0.3},
    ),
    "pool": ("ClippedLogPool", {"lower": -0.25, "upper": 1.0, "scale": 2.0, "queries": 100}),
    "pool charged": ("ClippedLogPool", {"lower": -0.25, "upper": 1.0, "scale": 2.0}),
    "pool unsure": (
        "ClippedLogPool",
        {"lower": -0.25, "upper": 1.0, "queries": 100, "public_confidence": 0.3},
    ),
    "public": ("PublicOnly", {}),
    "unprotected": ("Unprotected", {}),
}
"""(class, settings) under the new names."""

BUDGETS = {"mixing charged": 1.25, "pool charged": 1.25}
"""ε of per-shard budgets. With 5 or 12 members they end within `ANSWERS` answers, with 100 they do
not. A single member never contributes."""

ANSWERS = 12


def answer_cases() -> Iterator[tuple[str, str, tuple[int, int, int], torch.dtype]]:
    """Yield (name, mechanism, shape, dtype)."""
    for mechanism in MECHANISMS:
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                yield f"{mechanism} {shape} {str(dtype)[6:]}", mechanism, shape, dtype


def written(value: Any) -> Any:
    """Return the floats of a nested list as hexadecimal text, which keeps every bit."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, list | tuple):
        return [written(one) for one in value]
    return value
