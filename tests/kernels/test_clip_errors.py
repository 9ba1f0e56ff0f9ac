"""Errors of clip_project, a Clipping of other rows, and the stated memory."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_errors import INF, NAN, B, N, V, private, public, refuses

import adapmixed_ext
from adapmixed_ext import Clipping

ROOT = Path(__file__).resolve().parents[2]


def _clip(p: Any, q: Any, **options: Any) -> Clipping:
    return adapmixed_ext.clip_project(p, q, **{"lower": 0.5, "upper": 2.0} | options)


USERS: list[Callable[[Any, Any, Clipping], Any]] = [
    lambda p, q, clipping: adapmixed_ext.leave_one_out(p, q, clipping, orders=[2.0, 18.0]),
    lambda p, q, clipping: adapmixed_ext.mixture(p, q, clipping),
    lambda p, q, clipping: adapmixed_ext.log_prob(p, q, clipping, torch.zeros(B).long()),
]


def test_shapes_dtypes_devices_and_gradients() -> None:
    refuses(lambda: _clip(private()[0], public()), "private_logits", (B, V))
    refuses(lambda: _clip(private(), public()[:1]), "public_logits", (1, V))
    refuses(lambda: _clip(private()[:0], public()), "private_logits", (0, B, V))
    refuses(lambda: _clip(private().double(), public()), "private_logits", torch.float64)
    refuses(lambda: _clip(private(), public().half()), "public_logits", torch.float16)
    refuses(lambda: _clip(private("meta"), public("meta")), "private_logits", "meta")
    refuses(lambda: _clip(private().requires_grad_(), public()), "private_logits", "grad")


@pytest.mark.parametrize("value,word", [(NAN, "NaN"), (INF, "inf"), (-INF, "inf"), (2e6, "1e")])
def test_bad_rows_are_named(value: float, word: str) -> None:
    for orders in (None, 3.0):
        p, q = private(), public()
        where = slice(None) if value == -INF else 3
        p[1, 1, where] = value
        q[1, where] = value
        for given, name in (((p, public()), "private_logits[1, 1]"),
                            ((private(), q), "public_logits[1]")):  # fmt: skip
            with pytest.raises(ValueError) as caught:
                _clip(*given, orders=orders)
            assert name in str(caught.value) and word in str(caught.value)


def test_the_box_and_the_orders() -> None:
    for lower in (-0.1, 1.5, NAN, "1", None):
        refuses(lambda c=lower: _clip(private(), public(), lower=c), "lower", lower)
    for upper in (0.9, NAN, INF, "2"):
        refuses(lambda c=upper: _clip(private(), public(), upper=c), "upper", upper)
    for order in (1.0, 0.5, NAN, INF):
        refuses(lambda a=order: _clip(private(), public(), orders=[2.0, a]), "orders", order)
    refuses(lambda: _clip(private(), public(), orders=[]), "orders")
    refuses(lambda: _clip(private(), public(), orders=[2.0] * 33), "orders", 33)
    refuses(lambda: _clip(private(), public(), num_models=N - 1), "num_models", N - 1)
    wrong = torch.ones(N, B + 1, dtype=torch.bool)
    refuses(lambda: _clip(private(), public(), active=wrong), "active", (N, B + 1), (N, B))
    refuses(lambda: _clip(private(), public(), active=torch.ones(N, B)), "active", torch.float32)


@pytest.mark.parametrize("use", USERS)
def test_a_clipping_put_together_by_hand(use: Callable[..., Any]) -> None:
    p, q = private(), public()
    good = _clip(p, q, active=torch.ones(N, B, dtype=torch.bool))
    right = use(p, q, good)
    for name in ("log_scale", "residual", "private_lse", "public_lse"):
        value = getattr(good, name)
        wrong = dataclasses.replace(good, **{name: value.float()})
        refuses(lambda w=wrong: use(p, q, w), f"projection.{name}", torch.float32)
        odd = torch.stack([value, torch.full_like(value, NAN)], -1)[..., 0]
        assert torch.equal(use(p, q, dataclasses.replace(good, **{name: odd})), right)
    for value in (0.4, 2.1, NAN):
        wrong = dataclasses.replace(good, residual=torch.full_like(good.residual, value))
        refuses(lambda w=wrong: use(p, q, w), "projection.residual[0, 0]", value)
    short = dataclasses.replace(good, active=torch.ones(N, 1, dtype=torch.bool))
    refuses(lambda: use(p, q, short), "projection.active", (N, 1))
    refuses(lambda: use(p, q, dataclasses.replace(good, lower=1.5)), "lower", 1.5)
    unknown = dataclasses.replace(good, log_scale=torch.full_like(good.log_scale, NAN))
    with pytest.raises(ValueError, match="must belong to these logits"):
        use(p, q, unknown)


def test_a_clipping_of_other_rows_is_refused() -> None:
    torch.manual_seed(3)
    q = 2.0 * torch.randn(2, 40)
    p = q + torch.randn(3, 2, 40)
    clipping = _clip(p, q)
    for use in USERS[:2]:
        with pytest.raises(ValueError, match="must belong to these logits"):
            use(p[[1, 0, 2]] * 1.5, q, clipping)
    for value in (NAN, INF):
        bad = p.clone()
        bad[..., 0] = value
        for use in USERS if math.isnan(value) else ():
            with pytest.raises(ValueError, match="must belong to these logits"):
                use(bad, q, clipping)
        bad = q.clone()
        bad[..., 0] = value
        for use in USERS:
            with pytest.raises(ValueError, match="must belong to these logits"):
                use(p, bad, clipping)


PROGRAM = """
import sys
sys.path.insert(0, "tests/kernels")
import torch
import adapmixed_ext
import test_memory
exec(test_memory.PROGRAM.split("def losses")[0])


def clip(private, public):
    for box in ((0.5, 2.0), (0.9, 1e6)):
        for orders in (None, 18.0):
            yield adapmixed_ext.clip_project(
                private, public, lower=box[0], upper=box[1], orders=orders
            )


torch.manual_seed(0)
list(clip(*logits(5, 640)))
private, public = logits(models, vocab)
print(growth(lambda: list(clip(private, public))))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no /proc")
@pytest.mark.parametrize("models,vocab,threads", [(16, 200_000, 1), (64, 50_257, 2)])
@pytest.mark.slow
def test_memory_is_what_is_stated(models: int, vocab: int, threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(models), str(vocab), str(threads)],
        check=True, capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )  # fmt: skip
    growth = int(done.stdout)
    assert 20 * vocab <= growth <= threads * (37 * vocab + 2**17) + 2**19
