"""In an evaluation as long as the paper's longest, memory, result file and curves do not grow."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ensemble import FakeEnsemble
from result_cases import stream
from torch import Tensor

from adapmixed.evaluation import evaluate
from adapmixed.evaluation.curve import Curve
from adapmixed.evaluation.tally import CURVE_POINTS
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, Mechanism
from adapmixed.rng import SeededRandom

BLOCK = 512
LONGEST = 99_840


def measured(queries: int, result: Path) -> tuple[int, list[Any]]:
    """Return (peak of Python's memory without the text, evaluations)."""
    mechanisms: dict[str, Mechanism] = {
        "adaptive": AdaPMixED(order=18.0, target_leakage=0.01, screen=None),
        "pool": ClippedLogPool(-0.05, 0.05, 1.0, queries=queries),
    }
    tokens, fake = stream(queries * BLOCK // (BLOCK - 1) + BLOCK), FakeEnsemble()
    tracemalloc.start()
    try:
        found = evaluate(
            fake, tokens, mechanisms, delta=1e-5, rng=SeededRandom(1), block=BLOCK,
            queries=queries, memory_bytes=BLOCK, result=result, save_seconds=0.2,
        )  # type: ignore[arg-type]  # fmt: skip
        return tracemalloc.get_traced_memory()[1], found
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_and_file_do_not_grow_with_the_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fewer and larger calls, and shorter curves, for the test's time.
    monkeypatch.setattr("adapmixed.evaluation.session._POSITIONS_PER_CALL", BLOCK)
    monkeypatch.setattr("adapmixed.evaluation.tally.CURVE_POINTS", 16)
    shorter, _ = measured(LONGEST // 8, tmp_path / "short.json")
    longer, found = measured(LONGEST, tmp_path / "long.json")
    assert longer < shorter + LONGEST  # one more byte per query would fail
    sizes = [(tmp_path / name).stat().st_size for name in ("short.json", "long.json")]
    assert sizes[1] < sizes[0] + 1000 < 10_000
    for one in found:
        assert one.queries == one.guarantee.queries == LONGEST
        assert 8 <= len(one.curve) <= 17
        assert one.curve[-1] == (LONGEST, one.guarantee.epsilon)
        assert one.perplexities[-1] == (LONGEST, one.perplexity)
        counts = [queries for queries, _ in one.curve]
        assert counts == sorted(set(counts))


class Lending(FakeEnsemble):
    """An ensemble that knows which of its logits are still held, even through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[weakref.ref[Any]] = []
        self.held: list[int] = []

    def iter_logits(
        self, ids: Tensor, *, memory_bytes: int, **others: Any
    ) -> Iterator[tuple[slice, Tensor, Tensor, None]]:
        for where, *logits, _ in super().iter_logits(ids, memory_bytes=memory_bytes):
            # An array owns the memory of such a tensor and of its views.
            arrays = [one.numpy().copy() for one in logits]
            private, public = map(torch.from_numpy, arrays)
            self.lent += map(weakref.ref, arrays)
            del logits, arrays
            yield where, private, public, None
            del private, public
            self.held.append(sum(one() is not None for one in self.lent))


@pytest.mark.slow
def test_logits_are_not_kept() -> None:
    mechanisms: dict[str, Mechanism] = {
        "adaptive": AdaPMixED(order=18.0, target_leakage=0.01, screen=None),
        "pool": ClippedLogPool(-0.05, 0.05, 1.0),
    }
    lending: Any = Lending()
    evaluate(
        lending, stream(16 * 40), mechanisms, delta=1e-5, rng=SeededRandom(1), block=16,
        queries=500, memory_bytes=8,
    )  # fmt: skip
    # The last window may be shorter; two tensors in every chunk.
    assert len(lending.held) > 60 and len(lending.lent) == 2 * len(lending.held)
    assert max(lending.held) == 0


@pytest.mark.parametrize("calls", [1, 2, 511, 512, 513, 1024, 1025, 1536, 5000])
def test_a_curve_keeps_evenly_spaced_points_and_the_last(calls: int) -> None:
    curve = Curve(CURVE_POINTS)
    for call in range(1, calls + 1):
        curve.add((call, float(call), 1.0))
    kept = [int(call) for call in curve.all()[:, 0]]
    step = kept[0]
    assert kept == [*range(step, calls + 1, step)] + ([calls] if calls % step else [])
    assert len(kept) <= CURVE_POINTS + 1
    assert step == 1 if calls <= CURVE_POINTS else len(kept) > CURVE_POINTS // 2
