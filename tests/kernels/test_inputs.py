"""Every rejected call raises ValueError and names the argument, the value and the rule."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import adapmixed_ext as ops

N, B, V, K = 3, 2, 5, 2
NAN, INF = math.nan, math.inf


def private(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, B, V, generator=generator).to(device, dtype)


def public(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, V, generator=generator).to(device, dtype)


def source(key: Any = None, counter: Any = 0) -> Any:
    """Return a random source that hands out what it is given."""
    pair = torch.zeros(32, dtype=torch.uint8) if key is None else key, counter
    return SimpleNamespace(seeded=True, reserve=lambda: pair)


WEIGHT = torch.full((N, B), 0.5, dtype=torch.float64)
NOISE = torch.zeros(B, K, dtype=torch.float64)
TARGETS = torch.zeros(B, dtype=torch.int64)
# The calls of every operator on an ensemble, with good options.
GOOD: dict[str, dict[str, Any]] = {
    "project": {"order": 3.0, "radius": 0.5},
    "clip_project": {"lower": 0.5, "upper": 2.0, "orders": [2.0]},
    "screen": {"noise": NOISE, "weight": 0.1, "order": 3.0, "threshold": 1.0, "top_k": K},
    "leave_one_out": {"projection": WEIGHT, "orders": [2.0]},
    "mixture": {"projection": WEIGHT},
    "log_prob": {"projection": WEIGHT, "targets": TARGETS},
    "log_pool": {"lower": -0.25, "upper": 1.0, "scale": 2.0},
}


def call(name: str, p: Any, q: Any, **options: Any) -> Any:
    return getattr(ops, name)(p, q, **GOOD[name] | options)


def refuses(call: Callable[[], Any], *words: object) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert re.search(rf"(?<![\w.]){re.escape(str(word))}(?!\w)", str(caught.value)), (
            f"{word!r} is missing from: {caught.value}"
        )


@pytest.mark.parametrize("name", GOOD)
def test_logits(name: str) -> None:
    p, q = private(), public()
    for inputs, words in (
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
        refuses(lambda inputs=inputs: call(name, *inputs), *words)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("value,word", [(NAN, "NaN"), (INF, "inf"), (-INF, "inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bad_rows_are_named(name: str, value: float, word: str, dtype: torch.dtype) -> None:
    """A bad value is found in any lane; -inf is one only if it fills the row."""
    for token in range(V):
        p, q = private(dtype=dtype), public(dtype=dtype)
        where = slice(None) if value == -INF else token
        p[1, 1, where] = value
        refuses(lambda p=p: call(name, p, public(dtype=dtype)), "private_logits[1, 1]", word)
        q[1, where] = value
        refuses(lambda q=q: call(name, private(dtype=dtype), q), "public_logits[1]", word)


def test_a_nan_is_found_wherever_it_hides(isa: str) -> None:
    """A NaN is found in every lane and tail, also among -inf."""
    for vocab in (2, 15, 16, 17, 33, 130):
        for token in range(vocab):
            p, q = torch.zeros(2, 1, vocab), torch.zeros(1, vocab)
            p[1, 0] = -INF
            p[1, 0, token] = NAN
            refuses(lambda p=p, q=q: call("project", p, q), "private_logits[1, 0]", "NaN")


# The options of each operator, with what each must not be.
ORDERS = (1.0, 0.5, 1025.0, NAN, INF, "three", None)
ACTIVE = (torch.ones(N, B + 1, dtype=torch.bool), torch.ones(N, B))
WEIGHTS = (
    WEIGHT[0], WEIGHT[:, :1], WEIGHT.long(), None, WEIGHT.to("meta"), WEIGHT - 0.6, WEIGHT + 0.6,
)  # fmt: skip
OPTIONS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("project", "order", ORDERS),
    ("project", "radius", (-1e-9, 300.1, NAN, -INF, "1")),
    ("clip_project", "lower", (-0.1, 1.5, NAN, "1", None)),
    ("clip_project", "upper", (0.9, 1e7, NAN, INF, "2")),
    ("clip_project", "orders", ([], [2.0, 0.5], [2.0] * 9)),
    ("clip_project", "num_models", (N - 1,)),
    ("clip_project", "active", ACTIVE),
    ("screen", "order", ORDERS),
    ("screen", "weight", (-0.1, 1.5, NAN)),
    ("screen", "threshold", (NAN,)),
    ("screen", "top_k", (0, -3, 2.5)),
    ("screen", "noise", (NOISE[:, :1], NOISE.float(), NOISE + NAN)),
    ("screen", "num_models", (N - 1,)),
    ("screen", "active", ACTIVE),
    ("leave_one_out", "orders", ([], [2.0] * 9, *([2.0, a] for a in ORDERS))),
    ("leave_one_out", "orders", (torch.tensor(2.0), b"22")),
    ("leave_one_out", "adjacency", ("replace_one", "both", "", None)),
    ("leave_one_out", "num_models", (N - 1, 0)),
    *((name, "projection", WEIGHTS) for name in ("leave_one_out", "mixture", "log_prob")),
    ("log_prob", "targets", (TARGETS - 1, TARGETS + V, TARGETS[:1], TARGETS.double())),
    ("log_pool", "lower", (0.5, NAN, -INF, "0", None, True)),
    ("log_pool", "upper", (-0.5, 65.0, NAN, INF, "1", None, True)),
    ("log_pool", "scale", (-0.5, 300.0, NAN, INF, "1", None)),
    ("log_pool", "num_models", (N - 1, 0, 3.0, "3")),
    ("log_pool", "active", ACTIVE),
]  # fmt: skip


@pytest.mark.parametrize("name,option,values", OPTIONS, ids=[f"{n}-{o}" for n, o, _ in OPTIONS])
def test_options(name: str, option: str, values: tuple[Any, ...]) -> None:
    for value in values:
        words = [value] if isinstance(value, float | int | str) and value != "" else []
        refuses(lambda v=value: call(name, private(), public(), **{option: v}), option, *words)


def test_renyi_divergence() -> None:
    p = public()
    bad = public()
    bad[1, 3] = NAN
    for inputs, words in (
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
        *(((p, p, [2.0, order]), ("orders", order)) for order in ORDERS[:-2]),
    ):
        refuses(lambda inputs=inputs: ops.renyi_divergence(*inputs), *words)


def test_gaussian_and_sample() -> None:
    for sigma in (-1.0, NAN, INF):
        refuses(lambda s=sigma: ops.gaussian((3,), sigma=s, rng=source()), "sigma", sigma)
    refuses(lambda: ops.gaussian((3, -2), sigma=1.0, rng=source()), "shape", -2)
    refuses(lambda: ops.gaussian((3,), sigma=1.0, rng=source(), device="no"), "device", "no")
    p = torch.softmax(public().double(), -1)
    for inputs, words in (
        ((p.float(), public()), ("probabilities", torch.float32)),
        ((p[:1], public()), ("probabilities", (1, V))),
        ((p, public().double()), ("public_logits", torch.float64)),
        ((p, torch.full((B, V), -INF)), ("public_logits[0]",)),
    ):
        refuses(lambda inputs=inputs: ops.sample(*inputs, rng=source()), *words)
    for bad, word in (
        (source(torch.zeros(4, dtype=torch.uint8)), (4,)),
        (source(torch.zeros(32)), torch.float32),
        (source(bytes(32)), "bytes"),
        (source(counter=-1), -1),
        (source(counter=2**63), 2**63),
        (torch.Generator(), "torch._C.Generator"),
    ):
        refuses(lambda rng=bad: ops.gaussian((3,), sigma=1.0, rng=rng), "rng", word)
        refuses(lambda rng=bad: ops.sample(p, public(), rng=rng), "rng", word)
    strided = source(torch.arange(64, dtype=torch.uint8)[::2])  # its bytes are read in their order
    dense = source(torch.arange(0, 64, 2, dtype=torch.uint8))
    assert torch.equal(*(ops.gaussian(9, sigma=1.0, rng=rng) for rng in (strided, dense)))
