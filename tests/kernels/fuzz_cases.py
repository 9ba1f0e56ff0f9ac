"""Fuzzed inputs inside the limits: build(seed) returns the call that a seed stands for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases import DTYPES, most_radius
from checks import ADJACENCIES
from torch import Tensor

from adapmixed_ext import _C

INF = math.inf
ORDERS = (1.01, 1.5, 2.0, 3.0, 6.0, 8.0, 18.0, 32.0, 64.0, 128.0, 256.0, 1024.0)
RADII = (0.0, 1e-6, 1e-4, 1e-2, 0.03, 0.5, 3.6, 50.0, 1000.0)
SPECIALS = ("masks", "offsets", "ties", "canary")
KINDS = ("ordinary", "near", "shared", "repeated", "mixed", *SPECIALS)
ISAS = ("scalar", "avx2", "avx512")


@dataclass
class Call:
    """One fuzzed call of every operator."""

    seed: int
    kind: str
    private: Tensor
    public: Tensor
    order: float
    radius: float
    orders: list[float]
    adjacency: str
    slots: int
    threads: int
    isa: str

    def __str__(self) -> str:
        return (
            f"seed {self.seed} ({self.kind}, {tuple(self.private.shape)} {self.private.dtype}, "
            f"order {self.order}, radius {self.radius}, {self.isa}, {self.threads} threads)"
        )


def build(seed: int) -> Call:
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
    return Call(
        seed, kind, private, public, order,
        min(choose.choice(RADII), most_radius(order)),
        [_order(choose) for _ in range(choose.choice((1, 1, 3)))], choose.choice(ADJACENCIES),
        models + choose.choice((0, 0, 0, 1, 7)), choose.choice((1, 2)),
        choose.choice([isa for isa in ISAS if _supported(isa)]),
    )  # fmt: skip


def _supported(isa: str) -> bool:
    before = _C.instruction_set()
    known = _C.use_instruction_set(isa)
    _C.use_instruction_set(before)
    return known


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
    return choose.choice(ORDERS)


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
