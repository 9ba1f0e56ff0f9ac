"""Every rejected call raises ValueError and names the argument, the value and the rule."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext.low_rank import add_low_rank

N, B, V, K = 3, 2, 5, 2
NAN, INF = math.nan, math.inf


def private(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, B, V, generator=generator).to(device, dtype)


def public(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, V, generator=generator).to(device, dtype)


class Rng:
    seeded = True

    def reserve(self) -> tuple[Tensor, int]:
        return torch.zeros(32, dtype=torch.uint8), 0


def _project(p: Tensor, q: Tensor, **options: Any) -> Any:
    return adapmixed_ext.project(p, q, **{"order": 3.0, "radius": 0.5} | options)


def _screen(p: Tensor, q: Tensor, **options: Any) -> Any:
    top_k = options.get("top_k", K)
    columns = top_k if isinstance(top_k, int) and top_k > 0 else 1
    noise = options.pop("noise", torch.zeros(B, columns, dtype=torch.float64))
    defaults = {"weight": 0.1, "order": 3.0, "threshold": 1.0, "top_k": K}
    return adapmixed_ext.screen(p, q, noise, **defaults | options)


WEIGHT = torch.full((N, B), 0.5, dtype=torch.float64)


def _loss(p: Tensor, q: Tensor, **options: Any) -> Any:
    projection = options.pop("projection", WEIGHT)
    return adapmixed_ext.leave_one_out(p, q, projection, **{"orders": [2.0]} | options)


def _mixture(p: Tensor, q: Tensor, **options: Any) -> Any:
    return adapmixed_ext.mixture(p, q, options.pop("projection", WEIGHT))


def _log_prob(p: Tensor, q: Tensor, **options: Any) -> Any:
    targets = options.pop("targets", torch.zeros(B, dtype=torch.int64))
    projection = options.pop("projection", WEIGHT)
    return adapmixed_ext.log_prob(p, q, projection, targets)


def _log_pool(p: Tensor, q: Tensor, **options: Any) -> Any:
    return adapmixed_ext.log_pool(p, q, **{"lower": -0.25, "upper": 1.0, "scale": 2.0} | options)


ENSEMBLE: list[Callable[..., Any]] = [_project, _screen, _loss, _mixture, _log_prob, _log_pool]
WEIGHTED: list[Callable[..., Any]] = [_loss, _mixture, _log_prob]


def refuses(call: Callable[[], Any], *words: object) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert re.search(rf"(?<![\w.]){re.escape(str(word))}(?!\w)", str(caught.value)), (
            f"{word!r} is missing from: {caught.value}"
        )


@pytest.mark.parametrize("call", ENSEMBLE)
def test_shapes(call: Callable[..., Any]) -> None:
    refuses(lambda: call(private()[0], public()), "private_logits", (B, V))
    refuses(lambda: call(private(), public()[0]), "public_logits", (V,))
    refuses(lambda: call(private(), public()[:1]), "public_logits", (1, V))
    refuses(lambda: call(private(), public()[:, :4]), "public_logits", (B, 4))
    refuses(lambda: call(private()[:0], public()), "private_logits", (0, B, V))
    refuses(lambda: call(private()[..., :0], public()[..., :0]), "private_logits", (N, B, 0))
    refuses(lambda: call(private().tolist(), public()), "private_logits", "list")
    refuses(lambda: call(private(), None), "public_logits", "NoneType")


@pytest.mark.parametrize("call", ENSEMBLE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64, torch.bool])
def test_dtypes(call: Callable[..., Any], dtype: torch.dtype) -> None:
    wrong = private().to(dtype)
    refuses(lambda: call(wrong, public()), "private_logits", dtype)
    refuses(lambda: call(private(), public().to(dtype)), "public_logits", dtype)


@pytest.mark.parametrize("call", ENSEMBLE)
def test_dtypes_must_agree(call: Callable[..., Any]) -> None:
    refuses(
        lambda: call(private(), public(dtype=torch.bfloat16)),
        "public_logits", torch.bfloat16, torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("call", ENSEMBLE)
def test_devices(call: Callable[..., Any]) -> None:
    refuses(lambda: call(private("meta"), public("meta")), "private_logits", "meta")
    refuses(lambda: call(private(), public("meta")), "public_logits", "meta")


@pytest.mark.parametrize("call", ENSEMBLE)
def test_gradients(call: Callable[..., Any]) -> None:
    refuses(lambda: call(private().requires_grad_(), public()), "private_logits", "grad")
    refuses(lambda: call(private(), public().requires_grad_()), "public_logits", "grad")
    if call in WEIGHTED:
        weight = torch.full((N, B), 0.5, requires_grad=True)
        refuses(lambda: call(private(), public(), projection=weight), "projection", "grad")


@pytest.mark.parametrize("call", ENSEMBLE)
@pytest.mark.parametrize("value,word", [(NAN, "NaN"), (INF, "inf"), (-INF, "inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bad_rows_are_named(
    call: Callable[..., Any], value: float, word: str, dtype: torch.dtype
) -> None:
    for token in range(V):
        p, q = private(dtype=dtype), public(dtype=dtype)
        where = slice(None) if value == -INF else token  # -inf is an error only if it fills a row
        p[1, 1, where] = value
        refuses(lambda p=p: call(p, public(dtype=dtype)), "private_logits[1, 1]", word)
        q[1, where] = value
        refuses(lambda q=q: call(private(dtype=dtype), q), "public_logits[1]", word)


@pytest.mark.parametrize("order", [1.0, 0.5, 0.0, -2.0, NAN, INF, "three", None])
def test_order(order: Any) -> None:
    refuses(lambda: _project(private(), public(), order=order), "order", order)
    refuses(lambda: _screen(private(), public(), order=order), "order", order)
    refuses(lambda: _loss(private(), public(), orders=[2.0, order]), "orders", order)


@pytest.mark.parametrize("orders", [[], [0.5], [2.0, NAN], [-INF]])
def test_orders_of_the_divergence(orders: list[float]) -> None:
    words = ["orders"] + [str(a) for a in orders if not a >= 1]
    refuses(lambda: adapmixed_ext.renyi_divergence(private(), private(), orders), *words)
    refuses(lambda: _loss(private(), public(), orders=[]), "orders")
    for odd in (torch.tensor(2.0), b"22"):
        refuses(lambda o=odd: _loss(private(), public(), orders=o), "orders", odd)


@pytest.mark.parametrize("radius", [-1e-9, -1.0, NAN, -INF, "1"])
def test_radius(radius: Any) -> None:
    refuses(lambda: _project(private(), public(), radius=radius), "radius", radius)


@pytest.mark.parametrize("top_k", [0, -3, 2.5])
def test_top_k(top_k: Any) -> None:
    refuses(lambda: _screen(private(), public(), top_k=top_k), "top_k", top_k)


@pytest.mark.parametrize("weight", [-0.1, 1.5, NAN])
def test_screening_weight(weight: float) -> None:
    refuses(lambda: _screen(private(), public(), weight=weight), "weight", weight)


def test_screening_threshold_noise_and_slots() -> None:
    refuses(lambda: _screen(private(), public(), threshold=NAN), "threshold", "nan")
    wrong = torch.zeros(B, K + 1, dtype=torch.float64)
    refuses(lambda: _screen(private(), public(), noise=wrong), "noise", (B, K + 1), (B, K))
    refuses(lambda: _screen(private(), public(), noise=torch.zeros(B, K)), "noise", torch.float32)
    bad = torch.zeros(B, K, dtype=torch.float64)
    bad[1, 0] = NAN
    refuses(lambda: _screen(private(), public(), noise=bad), "noise", "nan")
    active = torch.ones(N, B + 1, dtype=torch.bool)
    refuses(lambda: _screen(private(), public(), active=active), "active", (N, B + 1), (N, B))
    refuses(lambda: _screen(private(), public(), active=torch.ones(N, B)), "active", torch.float32)
    refuses(lambda: _screen(private(), public(), num_models=N - 1), "num_models", N - 1)


@pytest.mark.parametrize("call", WEIGHTED)
@pytest.mark.parametrize("value", [-1e-9, 1.0000001, NAN, INF])
def test_weights(call: Callable[..., Any], value: float) -> None:
    weight = torch.full((N, B), 0.5, dtype=torch.float64)
    weight[2, 1] = value
    refuses(lambda: call(private(), public(), projection=weight), "projection[2, 1]", value)


@pytest.mark.parametrize("call", WEIGHTED)
def test_weight_shapes_and_types(call: Callable[..., Any]) -> None:
    for wrong in (torch.full((N,), 0.5), torch.full((N, B + 1), 0.5), torch.full((B, N), 0.5)):
        refuses(
            lambda w=wrong: call(private(), public(), projection=w),
            "projection", tuple(wrong.shape),
        )  # fmt: skip
    refuses(lambda: call(private(), public(), projection=torch.ones(N, B).long()), "projection")
    refuses(lambda: call(private(), public(), projection=0.5), "projection", "float")
    elsewhere = torch.full((N, B), 0.5, device="meta")
    refuses(lambda: call(private(), public(), projection=elsewhere), "projection", "meta")


@pytest.mark.parametrize("call", WEIGHTED)
def test_a_projection_of_other_logits(call: Callable[..., Any]) -> None:
    fewer = _project(private()[:2], public())
    refuses(lambda: call(private(), public(), projection=fewer), "projection", (2, B), (N, B))
    shorter = _project(private()[:, :1], public()[:1])
    refuses(lambda: call(private(), public(), projection=shorter), "projection", (N, 1))


@pytest.mark.parametrize("call", WEIGHTED)
@pytest.mark.parametrize("name", ["weight", "complement", "private_lse", "public_lse"])
def test_a_projection_put_together_by_hand(call: Callable[..., Any], name: str) -> None:
    """Kernels read its tensors by pointer: a wrong dtype is an error, odd strides are handled."""
    projection = _project(private(), public())
    value = getattr(projection, name)
    right = call(private(), public(), projection=projection)
    wrong = replace(projection, **{name: value.float()})
    refuses(lambda: call(private(), public(), projection=wrong), "projection", torch.float32)
    cut = replace(projection, **{name: value[..., :1]})
    refuses(lambda: call(private(), public(), projection=cut), "projection")
    odd = torch.stack([value, torch.full_like(value, NAN)], -1)[..., 0]
    assert torch.equal(
        call(private(), public(), projection=replace(projection, **{name: odd})), right
    )


def test_adjacency() -> None:
    for adjacency in ("replace_one", "", None, 1):
        refuses(
            lambda a=adjacency: _loss(private(), public(), adjacency=a),
            "adjacency", "add_remove", "zero_out",
        )  # fmt: skip
    refuses(lambda: _loss(private(), public(), adjacency="both"), "adjacency", "both")


def test_slots() -> None:
    refuses(lambda: _loss(private(), public(), num_models=N - 1), "num_models", N - 1)
    refuses(lambda: _loss(private(), public(), num_models=0), "num_models", 0)


@pytest.mark.parametrize("target", [-1, V, 2**40])
def test_targets(target: int) -> None:
    targets = torch.tensor([0, target])
    refuses(lambda: _log_prob(private(), public(), targets=targets), "targets[1]", target, V)


def test_target_shapes_and_types() -> None:
    short, floats = torch.zeros(B + 1).long(), torch.zeros(B)
    refuses(lambda: _log_prob(private(), public(), targets=short), "targets", (B + 1,))
    refuses(lambda: _log_prob(private(), public(), targets=floats), "targets", torch.float32)
    refuses(lambda: _log_prob(private(), public(), targets=short[:B].int()), "targets")


def test_renyi_divergence_arguments() -> None:
    call = adapmixed_ext.renyi_divergence
    p = public()
    refuses(lambda: call(p, p[:, :3], 2.0), "q_logits", V, 3)
    refuses(lambda: call(torch.zeros(3, V), p, 2.0), "q_logits", (3, V), (B, V))
    refuses(lambda: call(torch.tensor(1.0), p, 2.0), "p_logits")
    refuses(lambda: call(p[:, :0], p[:, :0], 2.0), "p_logits", (B, 0))
    refuses(lambda: call(p.double(), p.double(), 2.0), "p_logits", torch.float64)
    refuses(lambda: call(p, p.half(), 2.0), "q_logits", torch.float16)
    refuses(lambda: call(p, public("meta"), 2.0), "q_logits", "meta")
    refuses(lambda: call(public().requires_grad_(), p, 2.0), "p_logits", "grad")
    bad = public()
    bad[1, 3] = NAN
    refuses(lambda: call(bad, p, 2.0), "p_logits[1]", "NaN")
    refuses(lambda: call(p, bad, 2.0), "q_logits[1]", "NaN")


def test_gaussian_arguments() -> None:
    call = adapmixed_ext.gaussian
    for sigma in (-1.0, NAN, INF):
        refuses(lambda s=sigma: call((3,), sigma=s, rng=Rng()), "sigma", sigma)
    refuses(lambda: call((3, -2), sigma=1.0, rng=Rng()), "shape", -2)

    for device in ("meta", "nowhere", None, 3.5):
        refuses(lambda d=device: call((3,), sigma=1.0, rng=Rng(), device=d), "device", device)
    refuses(lambda: call(b"ab", sigma=1.0, rng=Rng()), "shape", b"ab")


GOOD_KEY = torch.zeros(32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("drawn", "value"),
    [
        ((GOOD_KEY.to("meta"), 0), "meta"),  # its numbers would be what memory held
        ((GOOD_KEY.to_sparse(), 0), torch.sparse_coo),
        ((GOOD_KEY.float(), 0), torch.float32),
        ((bytes(32), 0), "bytes"),
        ((GOOD_KEY, 2**63), 2**63),
        ((GOOD_KEY, -1), -1),
        ((GOOD_KEY, 1.5), 1.5),
        ((GOOD_KEY, True), True),
        ((GOOD_KEY,), "tuple"),
        (None, "NoneType"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_random_source_gives(drawn: Any, value: object) -> None:
    class Odd:
        seeded = True

        def reserve(self) -> Any:
            return drawn

    p = torch.softmax(public().double(), -1)
    refuses(lambda: adapmixed_ext.gaussian((3,), sigma=1.0, rng=Odd()), "rng", value)
    refuses(lambda: adapmixed_ext.sample(p, public(), rng=Odd()), "rng", value)


def test_low_rank_arguments() -> None:
    start, chosen = torch.zeros(B, V), torch.zeros(N, B, 2)
    factors, result = torch.zeros(N, 2, V), torch.zeros(N, B, V)
    call = add_low_rank
    refuses(lambda: call(start, chosen, 3, result), "factors", "int")
    refuses(lambda: call(torch.tensor(1.0), chosen, factors, result), "public_logits")
    negative = torch._neg_view(start)
    refuses(lambda: call(negative, chosen, factors, result), "public_logits", "negated")


def test_sample_arguments() -> None:
    call = adapmixed_ext.sample
    p = torch.softmax(public().double(), -1)
    refuses(lambda: call(p.float(), public(), rng=Rng()), "probabilities", torch.float32)
    refuses(lambda: call(p[:1], public(), rng=Rng()), "probabilities", (1, V))
    refuses(lambda: call(p, public().double(), rng=Rng()), "public_logits", torch.float64)
    refuses(lambda: call(p, torch.full((B, V), -INF), rng=Rng()), "public_logits[0]")
    refuses(lambda: call(p.requires_grad_(), public(), rng=Rng()), "probabilities", "grad")
