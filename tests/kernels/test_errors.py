"""Every rejected call raises ValueError and names the argument, the value and the rule."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import adapmixed_ext as ops

N, B, V, K = 3, 2, 5, 2
NAN, INF = math.nan, math.inf
Call = Callable[..., Any]


def private(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, B, V, generator=generator).to(device, dtype)


def public(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, V, generator=generator).to(device, dtype)


class Source:
    """A random source that hands out what it was given."""

    seeded = True

    def __init__(self, key: Any = None, counter: Any = 0) -> None:
        self.pair = torch.zeros(32, dtype=torch.uint8) if key is None else key, counter

    def reserve(self) -> Any:
        return self.pair


WEIGHT = torch.full((N, B), 0.5, dtype=torch.float64)
NOISE = torch.zeros(B, K, dtype=torch.float64)
TARGETS = torch.zeros(B, dtype=torch.int64)


def _project(p: Tensor, q: Tensor, **options: Any) -> Any:
    return ops.project(p, q, **{"order": 3.0, "radius": 0.5} | options)


def _clip(p: Tensor, q: Tensor, **options: Any) -> Any:
    return ops.clip_project(p, q, **{"lower": 0.5, "upper": 2.0, "orders": [2.0]} | options)


def _screen(p: Tensor, q: Tensor, noise: Any = NOISE, **options: Any) -> Any:
    defaults = {"weight": 0.1, "order": 3.0, "threshold": 1.0, "top_k": K}
    return ops.screen(p, q, noise, **defaults | options)


def _loss(p: Tensor, q: Tensor, projection: Any = WEIGHT, **options: Any) -> Any:
    return ops.leave_one_out(p, q, projection, **{"orders": [2.0]} | options)


def _mixture(p: Tensor, q: Tensor, projection: Any = WEIGHT) -> Any:
    return ops.mixture(p, q, projection)


def _log_prob(p: Tensor, q: Tensor, projection: Any = WEIGHT, targets: Any = TARGETS) -> Any:
    return ops.log_prob(p, q, projection, targets)


def _log_pool(p: Tensor, q: Tensor, **options: Any) -> Any:
    return ops.log_pool(p, q, **{"lower": -0.25, "upper": 1.0, "scale": 2.0} | options)


ENSEMBLE: list[Call] = [_project, _clip, _screen, _loss, _mixture, _log_prob, _log_pool]
WEIGHTED: list[Call] = [_loss, _mixture, _log_prob]


def refuses(call: Callable[[], Any], *words: object) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert re.search(rf"(?<![\w.]){re.escape(str(word))}(?!\w)", str(caught.value)), (
            f"{word!r} is missing from: {caught.value}"
        )


@pytest.mark.parametrize("call", ENSEMBLE)
def test_logits(call: Call) -> None:
    p, q = private(), public()
    for given, words in (
        ((p[0], q), ("private_logits", (B, V))),
        ((p, q[0]), ("public_logits", (V,))),
        ((p, q[:1]), ("public_logits", (1, V))),
        ((p, q[:, :4]), ("public_logits", (B, 4))),
        ((p[:0], q), ("private_logits", 0)),
        ((p[..., :0], q[..., :0]), ("private_logits", 0)),
        ((p.tolist(), q), ("private_logits", "list")),
        ((p, None), ("public_logits", "NoneType")),
        ((p.double(), q), ("private_logits", torch.float64)),
        ((p, q.long()), ("public_logits", torch.int64)),
        ((p, q.bfloat16()), ("public_logits", torch.bfloat16, torch.float32)),
        ((private("meta"), public("meta")), ("private_logits", "meta")),
        ((p, public("meta")), ("public_logits", "meta")),
        ((private().requires_grad_(), q), ("private_logits", "grad")),
    ):
        refuses(lambda given=given: call(*given), *words)


@pytest.mark.parametrize("call", ENSEMBLE)
@pytest.mark.parametrize("value,word", [(NAN, "NaN"), (INF, "inf"), (-INF, "inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bad_rows_are_named(call: Call, value: float, word: str, dtype: torch.dtype) -> None:
    """A bad value is found in any lane; -inf is one only if it fills the row."""
    for token in range(V):
        p, q = private(dtype=dtype), public(dtype=dtype)
        where = slice(None) if value == -INF else token
        p[1, 1, where] = value
        refuses(lambda p=p: call(p, public(dtype=dtype)), "private_logits[1, 1]", word)
        q[1, where] = value
        refuses(lambda q=q: call(private(dtype=dtype), q), "public_logits[1]", word)


def test_a_nan_is_found_wherever_it_hides() -> None:
    """A NaN is found in every lane and tail, also among -inf."""
    for vocab in (2, 15, 16, 17, 33, 130):
        for token in range(vocab):
            p, q = torch.zeros(2, 1, vocab), torch.zeros(1, vocab)
            p[1, 0] = -INF
            p[1, 0, token] = NAN
            refuses(lambda p=p, q=q: _project(p, q), "private_logits[1, 0]", "NaN")


# The options of each operator, with what each must not be.
ORDERS = (1.0, 0.5, NAN, INF, "three", None)
ACTIVE = (torch.ones(N, B + 1, dtype=torch.bool), torch.ones(N, B))
OPTIONS: list[tuple[Call, str, tuple[Any, ...]]] = [
    (_project, "order", ORDERS),
    (_project, "radius", (-1e-9, NAN, -INF, "1")),
    (_clip, "lower", (-0.1, 1.5, NAN, "1", None)),
    (_clip, "upper", (0.9, NAN, INF, "2")),
    (_clip, "orders", ([], [2.0, 0.5], [2.0] * 33)),
    (_clip, "num_models", (N - 1,)),
    (_clip, "active", ACTIVE),
    (_screen, "order", ORDERS),
    (_screen, "weight", (-0.1, 1.5, NAN)),
    (_screen, "threshold", (NAN,)),
    (_screen, "top_k", (0, -3, 2.5)),
    (_screen, "noise", (NOISE[:, :1], NOISE.float(), NOISE + NAN)),
    (_screen, "num_models", (N - 1,)),
    (_screen, "active", ACTIVE),
    (_loss, "orders", ([], *([2.0, order] for order in ORDERS), torch.tensor(2.0), b"22")),
    (_loss, "adjacency", ("replace_one", "both", "", None)),
    (_loss, "num_models", (N - 1, 0)),
    *((call, "projection", (WEIGHT[0], WEIGHT[:, :1], WEIGHT.long(), None, WEIGHT.to("meta")))
      for call in WEIGHTED),
    *((call, "projection", (WEIGHT - 0.6, WEIGHT + 0.6)) for call in WEIGHTED),
    (_log_prob, "targets", (TARGETS - 1, TARGETS + V, TARGETS[:1], TARGETS.double())),
    (_log_pool, "lower", (0.5, NAN, -INF, "0", None, True)),
    (_log_pool, "upper", (-0.5, NAN, INF, "1", None, True)),
    (_log_pool, "scale", (-0.5, NAN, INF, "1", None)),
    (_log_pool, "num_models", (N - 1, 0, 3.0, "3")),
    (_log_pool, "active", ACTIVE),
]  # fmt: skip


@pytest.mark.parametrize(
    "call,name,values", OPTIONS, ids=[f"{c.__name__}-{n}" for c, n, _ in OPTIONS]
)
def test_options(call: Call, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        words = [value] if isinstance(value, float | int | str) and value != "" else []
        refuses(lambda value=value: call(private(), public(), **{name: value}), name, *words)


def test_renyi_divergence() -> None:
    call, p = ops.renyi_divergence, public()
    bad = public()
    bad[1, 3] = NAN
    for given, words in (
        ((p, p[:, :3], 2.0), ("q_logits", V, 3)),
        ((torch.zeros(3, V), p, 2.0), ("q_logits", (3, V), (B, V))),
        ((torch.tensor(1.0), p, 2.0), ("p_logits",)),
        ((p[:, :0], p[:, :0], 2.0), ("p_logits", (B, 0))),
        ((p.double(), p.double(), 2.0), ("p_logits", torch.float64)),
        ((p, p.half(), 2.0), ("q_logits", torch.float16)),
        ((p, public("meta"), 2.0), ("q_logits", "meta")),
        ((public().requires_grad_(), p, 2.0), ("p_logits", "grad")),
        ((bad, p, 2.0), ("p_logits[1]", "NaN")),
        ((p, bad, 2.0), ("q_logits[1]", "NaN")),
        ((p, p, []), ("orders",)),
        ((p, p, [1.0]), ("orders", 1.0)),
        ((p, p, [INF]), ("orders", INF)),
        ((p, p, [2.0, NAN]), ("orders", NAN)),
    ):
        refuses(lambda given=given: call(*given), *words)


def test_gaussian_and_sample() -> None:
    for sigma in (-1.0, NAN, INF):
        refuses(lambda s=sigma: ops.gaussian((3,), sigma=s, rng=Source()), "sigma", sigma)
    refuses(lambda: ops.gaussian((3, -2), sigma=1.0, rng=Source()), "shape", -2)
    refuses(lambda: ops.gaussian((3,), sigma=1.0, rng=Source(), device="no"), "device", "no")
    p = torch.softmax(public().double(), -1)
    for given, words in (
        ((p.float(), public()), ("probabilities", torch.float32)),
        ((p[:1], public()), ("probabilities", (1, V))),
        ((p, public().double()), ("public_logits", torch.float64)),
        ((p, torch.full((B, V), -INF)), ("public_logits[0]",)),
    ):
        refuses(lambda given=given: ops.sample(*given, rng=Source()), *words)


@pytest.mark.parametrize(
    "source,word",
    [
        (Source(torch.zeros(4, dtype=torch.uint8)), (4,)),
        (Source(torch.zeros(32)), torch.float32),
        (Source(torch.zeros(64, dtype=torch.uint8)[::2]), "contiguous"),
        (Source(bytes(32)), "bytes"),
        (Source(counter=-1), -1),
        (Source(counter=2**63), 2**63),
        (torch.Generator(), "Generator"),
    ],
)
def test_what_a_random_source_gives(source: Any, word: object) -> None:
    p = torch.softmax(public().double(), -1)
    refuses(lambda: ops.gaussian((3,), sigma=1.0, rng=source), "rng", word)
    refuses(lambda: ops.sample(p, public(), rng=source), "rng", word)
