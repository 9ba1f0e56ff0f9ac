"""Screenings with little or no noise, which only exact sums at 70 digits can decide."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import mpmath as mp
import oracle
import torch
from mpmath import mpf
from torch import Tensor

import adapmixed_ext

INF = math.inf


@dataclass(frozen=True)
class Screened:
    """The inputs of one screening at one position."""

    private: Tensor  # (N, 1, V)
    public: Tensor  # (1, V)
    noise: Tensor  # (1, top_k)
    weight: float
    order: float
    slots: int
    active: Tensor | None = None  # (N, 1)

    def answer(self, device: torch.device) -> adapmixed_ext.Screening:
        return adapmixed_ext.screen(
            self.private.to(device), self.public.to(device), self.noise.to(device),
            weight=self.weight, order=self.order, threshold=0.5, top_k=self.noise.shape[1],
            num_models=self.slots, active=None if self.active is None else self.active.to(device),
        )  # fmt: skip

    def exact(self) -> mpf:
        return oracle.screening(
            self.private[:, 0], self.public[0], self.noise[0], weight=self.weight,
            order=self.order, top_k=self.noise.shape[1], divisor=self.slots,
            active=None if self.active is None else self.active[:, 0].tolist(),
        )  # fmt: skip

    def fault(self, device: torch.device) -> str | None:
        """Return how the answer violates the documented bound, or None."""
        got, exact = self.answer(device), self.exact()
        value = got.divergence.item()
        if mp.isinf(exact) or math.isinf(value):
            good = (self.order - 1) * exact > 600 and value == INF
        else:
            error = 1e-5 * exact + mpf(1e-12)
            good = value >= 0 and abs(mpf(value) - exact) <= error
        good = good and got.passed.item() == (value <= 0.5)
        return None if good else f"{self}: {value!r}, exact {mp.nstr(exact, 17)}"


def far_from_public(seed: int) -> Screened:
    """Return models with a large weight that give the kept tokens little or no probability."""
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
    slots = models + choose.choice((0, 0, 0, 40))
    return Screened(private, public, noise, weight, order, slots, active)
