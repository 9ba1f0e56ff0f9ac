"""Seeded calls inside the limits, and others that are drawn."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from plans import BOXES, DTYPES, EXTREME_ORDERS, INF, POOLS, RADII, Case, Plan, most_radius
from torch import Tensor

KINDS = ("ordinary", "near", "shared", "repeated", "mixed", "masks", "offsets", "ties", "canary")


def fuzzed(seed: int) -> tuple[Case, Plan]:
    """Return the call that a seed stands for, inside the limits."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kind = choose.choice(KINDS)
    models, positions, vocab = _shape(choose)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    public = normal(positions, vocab) * choose.choice((0.1, 1.0, 3.0, 5.0))
    private = public + choose.choice((1e-6, 0.01, 0.1, 0.5, 2.0, 10.0)) * normal(
        models, positions, vocab
    )
    if kind == "ordinary":
        private = normal(models, positions, vocab) * choose.choice((1.0, 5.0, 30.0))
    elif kind == "repeated":
        private = private[:1].expand_as(private).clone()
    elif kind in ("shared", "mixed"):
        private = private + choose.choice((0.5, 3.0)) * normal(positions, vocab)
    for name, change in _CHANGES.items():
        if kind == name or (kind == "mixed" and choose.random() < 0.4):
            private, public = change(choose, private, public)
    dtype = choose.choice((torch.float32, *DTYPES))
    private, public = (_revived(rows.clamp(max=6e4).to(dtype)) for rows in (private, public))
    order = _order(choose)
    ball = order, min(choose.choice((0.0, 1e-2, *RADII, 1000.0)), most_radius(order))
    orders = tuple(_order(choose) for _ in range(choose.choice((1, 1, 3))))
    top_k = choose.choice((1, vocab, choose.randint(1, vocab), vocab + 2))
    sigma, weight = choose.choice((0.0, 1e-6, 0.01, 0.3)), choose.choice((0.0, 1e-4, 0.3, 1.0))
    plan = Plan(
        seed, (ball,), (ball,), choose.random() < 0.3, orders, orders, orders,
        (choose.choice(Plan.adjacencies),), choose.choice((0, 0, 0, 1, 7)),
        (choose.choice(BOXES),), (choose.choice(POOLS),), ((top_k, sigma, order, weight),),
        choose.choice((0.0, 0.3)), 3,
    )  # fmt: skip
    return Case(f"{kind}-{seed}", private, public), plan


def drawn(tokens: int, numbers: int, count: int) -> list[Case]:
    """Return fuzzed cases of at least so many tokens and at most so many private logits."""
    every = (fuzzed(seed)[0] for seed in itertools.count(1000))
    fitting = (
        case for case in every if case.public.shape[1] >= tokens and case.private.numel() <= numbers
    )
    return list(itertools.islice(fitting, count))


def _shape(choose: random.Random) -> tuple[int, int, int]:
    vocab = choose.choice(
        (2, choose.randint(3, 40), choose.randint(41, 999), choose.randint(1000, 5000))
    )
    models = choose.choice((1, 2, 3, choose.randint(4, 40), 100, 1000))
    positions = choose.randint(1, 4)
    # The oracle takes 0.1 us for a token and an evaluation.
    while models * positions * vocab > 40_000:
        models, positions = max(1, models // 2), max(1, positions // 2)
    return models, positions, vocab


def _order(choose: random.Random) -> float:
    if choose.random() < 0.25:
        return 1.0 + math.exp(choose.uniform(math.log(0.01), math.log(1000.0)))
    return choose.choice((8.0, 128.0, 3.0, 32.0, *EXTREME_ORDERS))


def _masks(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    side = choose.choice(("both", "private", "public", "one model", "one model and public"))
    vocab = public.shape[1]
    tokens = choose.sample(range(vocab), choose.randint(1, max(1, min(vocab // 2, 20))))
    if side in ("both", "public", "one model and public"):
        public[:, tokens] = -INF
    if side in ("both", "private"):
        private[..., tokens] = -INF
    if side.startswith("one model"):
        private[choose.randrange(private.shape[0])][:, tokens] = -INF
    return private, public


def _offsets(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    size = choose.choice((10.0, 1e3, 3e4))
    return private + choose.choice((-1, 0, 1)) * size, public + choose.choice((-1, 1)) * size


def _ties(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    step = choose.choice((0.5, 4.0))
    private, public = (private / step).round() * step, (public / step).round() * step
    if choose.random() < 0.5:
        private[choose.randrange(private.shape[0])] = public
    return private, public


def _canary(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    token, rare = choose.randrange(public.shape[1]), choose.choice((1e-12, 1e-6, 1e-30))
    public[:, token] = torch.logsumexp(public, -1) + math.log(rare)
    model = choose.randrange(private.shape[0])
    private[model, :, token] = torch.logsumexp(private[model], -1) - math.log(1e-12)
    return private, public


_CHANGES: dict[str, Callable[[random.Random, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "masks": _masks, "offsets": _offsets, "ties": _ties, "canary": _canary,
}  # fmt: skip


def _revived(rows: Tensor) -> Tensor:
    """Replace rows that a mask left without a value."""
    return torch.where(rows.float().amax(-1, keepdim=True) == -INF, torch.zeros_like(rows), rows)


def far_from_public(seed: int) -> tuple[Case, Tensor, dict[str, Any]]:
    """Return models, noise and options of a screening that few of the kept tokens survive.

    Models with a large weight give these tokens little or no probability. There is little noise.
    """
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    models, vocab = choose.choice((1, 2, 3, 5, 9, 33)), choose.choice((4, 6, 11))
    top_k = choose.randint(1, vocab - 1)
    public = 2 * torch.randn(1, vocab, generator=generator)
    if choose.random() < 0.3:
        public[0, choose.randrange(vocab)] = choose.choice((-40.0, -60.0))
    private = public + choose.choice((0.5, 3.0)) * torch.randn(
        models, 1, vocab, generator=generator
    )
    kept = public[0].argsort(descending=True)[:top_k]
    private[..., kept] -= choose.choice((0.0, 10.0, 45.0, 600.0, INF, INF, INF))
    if choose.random() < 0.3:
        private[choose.randrange(models)] = public
    active = None
    if choose.random() < 0.3:
        active = torch.rand(models, 1, generator=generator) < 0.7
    noise = torch.zeros(1, top_k, dtype=torch.float64)
    if choose.random() < 0.3:
        size = choose.choice((1e-3, 1e-6))
        noise = size * torch.randn(1, top_k, generator=generator, dtype=torch.float64)
        noise[0, 0] = size
    weight = choose.choice((1.0, 1.0, 1.0, math.nextafter(1.0, 0.0), 0.999, 0.6, 0.3, 1e-4, 0.0))
    order = choose.choice((1.0001, 1.01, 1.5, 2.0, 18.0, 1024.0))
    options = {
        "weight": weight, "order": order, "threshold": 0.5, "top_k": top_k, "active": active,
        "num_models": models + choose.choice((0, 0, 0, 40)),
    }  # fmt: skip
    return Case(f"screening {seed}", private, public), noise, options


def open_rows(positions: int, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return probabilities for which integers of 2^-100 hardly ever decide the token.

    All mass is on a token with q = 0. The others have a few such units, less, 0, or the least a
    double can hold.
    """
    shares = 5 + 9 * torch.rand(positions, vocab - 1, generator=generator, dtype=torch.float64)
    shares[:, 2::7] *= 2.0**-300
    shares[:, 3::7] = 0.0
    shares[:, 4::7] *= 2.0**-974
    p = torch.cat([torch.ones(positions, 1, dtype=torch.float64), 2.0**-100 * shares], 1)
    public = torch.zeros(positions, vocab)
    public[:, 0] = -INF
    return p, public
