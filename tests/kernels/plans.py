"""Inputs of the operators: logits, and the numbers with which the operators are called."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ORDERS = (1.01, 1.5, 2.0, 3.0, 6.0, 18.0, 32.0, 64.0)
EXTREME_ORDERS = (1.01, 1.5, 2.0, 6.0, 18.0, 64.0, 256.0, 1024.0)
RADII = (1e-9, 1e-6, 1e-5, 1e-3, 0.03, 0.5, 3.6, 50.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF = math.inf


@dataclass(frozen=True)
class Case:
    """Logits as the operators take them, (N, B, V) and (B, V), and what else they are taken with.

    Attributes:
        balls, orders: used instead of a plan's, if there are any.
        weights: further weights (N, B) or (N, 1), of which losses are checked.
        close: whether answers must be close to the truth; if not, they must be sound.
    """

    name: str
    private: Tensor
    public: Tensor
    balls: tuple[tuple[float, float], ...] = ()
    orders: tuple[float, ...] = ()
    weights: tuple[Tensor, ...] = ()
    close: bool = True

    def distinct_rows(self) -> list[tuple[int, int]]:
        """Return one index of each distinct pair of rows."""
        seen: dict[tuple[float, ...], tuple[int, int]] = {}
        for i, b in np.ndindex(*self.private.shape[:2]):
            seen.setdefault((*self.private[i, b].tolist(), *self.public[b].tolist()), (i, b))
        return list(seen.values())

    def targets(self) -> list[Tensor]:
        """Return (B,) tokens at both ends of the rows, some between, and the least likely ones."""
        positions, vocab = self.public.shape
        inner = torch.arange(positions) * 7 + vocab // 2
        ends = torch.zeros(positions).long(), torch.full((positions,), vocab - 1)
        return [*ends, inner % vocab, self.public.float().argmin(-1)]


@dataclass(frozen=True)
class Setting:
    """The settings of one pool, with ``extra`` absent members."""

    lower: float
    upper: float
    scale: float
    extra: int = 0

    @property
    def reach(self) -> float:
        return max(-self.lower, self.upper)

    def options(self, models: int) -> dict[str, float]:
        return {
            "lower": self.lower, "upper": self.upper, "scale": self.scale,
            "num_models": models + self.extra,
        }  # fmt: skip

    def unit(self, models: int) -> float:
        """Return 2^-k, the unit of the grid on which the log-ratios are counted."""
        exponent = math.frexp((models + self.extra) * self.reach)[1]
        return 2.0 ** -min(40, 51 - exponent)


def ids(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def logits(
    seed: int, models: int, positions: int, vocab: int, spread: float, noise: float
) -> tuple[Tensor, Tensor]:
    """Return public logits of the given spread, and private logits = public + noise."""
    generator = torch.Generator().manual_seed(seed)
    public = spread * torch.randn(positions, vocab, generator=generator)
    private = public + noise * torch.randn(models, positions, vocab, generator=generator)
    return private, public


def most_radius(order: float) -> float:
    """Return the largest radius with (order - 1) radius <= 600."""
    return math.nextafter(600.0 / (order - 1.0), 0.0)


def balls(orders: tuple[float, ...]) -> list[tuple[float, float]]:
    """Return pairs of each order with each radius, the largest ones cut at the limit."""
    return [(a, min(r, most_radius(a))) for a in orders for r in RADII]


class Source:
    """A random source with a fixed key and counter."""

    seeded = True

    def __init__(self, seed: int = 0, counter: int = 2**40 + 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.key = torch.randint(0, 256, (32,), generator=generator, dtype=torch.uint8)
        self.counter = counter

    def reserve(self) -> tuple[Tensor, int]:
        return self.key, self.counter


POOLS = (
    Setting(-0.25, 1.0, 2.0),
    Setting(-0.25, 0.5, 1.0, 3),
    Setting(-2.0, 0.0, 0.7),
    Setting(0.0, 3.0, 1.5, 1),
    Setting(-32.0, 32.0, 330 / 64),  # the widest clip range, and the most κ (b − a)
    Setting(-1e-9, 1e-9, 1e5),
    Setting(0.0, 0.0, 2.0),
    Setting(-1.0, 2.0, 0.0),
    Setting(-32.0, 32.0, 1.0, 60_000),  # the coarsest grid
)
BOXES = (
    (math.exp(-0.25), math.e), (0.9, 9e5), (0.0, 2.0), (1.0 - 1e-9, 1.0 + 1e-9), (1e-6, 1.0),
    (0.3, 1.0 + 1e-7), (0.97, 40.0), (0.6, 1.65), (0.5, 1.5), (0.0, 50.0),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The numbers of the calls; every operator takes those that concern it.

    Attributes:
        balls: (order, radius) of project.
        weighings: (order, radius) of the weights of which losses and mixtures are checked.
        absent: further members, which answer q, in every other call.
        boxes: (lower, upper) of clip_project.
        screens: (top_k, σ of the noise, order, weight).
        inactive: the share of members that take no part; 0: all do.
        models: how many models' losses, boxes and divergences are checked.
    """

    seed: int = 0
    balls: tuple[tuple[float, float], ...] = tuple(balls((*ORDERS, 256.0, 1024.0)))
    weighings: tuple[tuple[float, float], ...] = ((18.0, 3.6), (3.0, 0.03), (64.0, 9.5))
    random_weights: bool = True
    orders: tuple[float, ...] = ORDERS
    clip_orders: tuple[float, ...] = (1.01, 3.0, 18.0)
    renyi_orders: tuple[float, ...] = (1 + 1e-8, *EXTREME_ORDERS[1:])
    adjacencies: tuple[str, ...] = ("add_remove", "zero_out")
    absent: int = 3
    boxes: tuple[tuple[float, float], ...] = BOXES
    pools: tuple[Setting, ...] = POOLS
    screens: tuple[tuple[int, float, float, float], ...] = (
        (1, 0.01, 2.0, 0.3), (5, 0.01, 18.0, 1e-4), (17, 0.1, 1.5, 1.0), (20, 0.0, 1024.0, 0.3),
        (60, 0.01, 18.0, 1e-2),
    )  # fmt: skip
    inactive: float = 0.3
    models: int = 8

    def slots(self, case: Case, call: int) -> int:
        return len(case.private) + (0 if call % 2 else self.absent)

    def actives(self, case: Case) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)
        share = torch.rand(case.private.shape[:2], generator=generator)
        return [None, share >= self.inactive] if self.inactive else [None]

    def chosen_of(self, case: Case) -> list[int]:
        models = len(case.private)
        every = range(models)
        return sorted(random.Random(self.seed).sample(every, min(models, self.models)))
