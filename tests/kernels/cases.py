"""Seeded inputs for the kernel tests, small enough that a failure can name them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ORDERS = (1.01, 1.5, 2.0, 3.0, 6.0, 15.0, 18.0, 32.0, 64.0)
EXTREME_ORDERS = (*ORDERS, 256.0, 1024.0)
RADII = (1e-6, 1e-3, 0.03, 0.5, 3.6, 50.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF = math.inf


@dataclass(frozen=True)
class Case:
    """Logits as the operators take them: private (N, B, V) and public (B, V)."""

    name: str
    private: Tensor
    public: Tensor

    def to(self, device: torch.device) -> Case:
        return Case(self.name, _move(self.private, device), _move(self.public, device))

    @property
    def rows(self) -> list[tuple[int, int]]:
        return [(i, b) for i in range(self.private.shape[0]) for b in range(self.private.shape[1])]


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    # Moving would change the strides, and some cases test strides.
    return tensor if tensor.device == device else tensor.to(device)


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


def ordinary() -> list[Case]:
    """Return cases of all dtypes with spreads from 0.1 to 20 and small N and V."""
    plans = [
        # spread, noise, N, B, V, dtype
        (0.1, 0.05, 2, 2, 17, torch.float32),
        (1.0, 0.001, 3, 1, 17, torch.float32),
        (1.0, 0.5, 7, 1, 17, torch.float32),
        (3.0, 0.5, 2, 2, 17, torch.float32),
        (3.0, 2.0, 3, 1, 17, torch.float32),
        (10.0, 1.0, 2, 1, 17, torch.float32),
        (20.0, 1.0, 2, 1, 17, torch.float32),
        (20.0, 8.0, 2, 1, 17, torch.float32),
        (2.0, 0.3, 1, 2, 17, torch.float32),
        (2.0, 1.0, 3, 2, 2, torch.float32),
        (2.0, 0.5, 2, 2, 17, torch.bfloat16),
        (2.0, 0.5, 2, 2, 17, torch.float16),
        (8.0, 1.0, 2, 1, 17, torch.bfloat16),
        (8.0, 1.0, 2, 1, 17, torch.float16),
        (0.3, 1e-6, 2, 1, 17, torch.float32),
    ]
    cases = []
    for seed, (spread, noise, n, b, v, dtype) in enumerate(plans):
        private, public = logits(seed, n, b, v, spread, noise)
        name = f"spread{spread}-noise{noise}-N{n}-B{b}-V{v}-{str(dtype)[6:]}"
        cases.append(Case(name, private.to(dtype), public.to(dtype)))
    return cases


def masked() -> list[Case]:
    """Return cases with -inf in the private rows, the public row or both."""
    private, public = logits(100, 3, 1, 11, 2.0, 0.7)
    public_only, private_only, both, mixed, sole = (private.clone() for _ in range(5))
    public_hole = public.clone()
    public_hole[:, 4] = -INF
    private_only[:, :, 7] = -INF
    both[:, :, 4] = -INF
    mixed[0, :, 4] = -INF  # model 0 agrees with the public mask, 1 and 2 do not
    mixed[1, :, 2] = -INF
    sole[1, :, [0, 3, 9]] = -INF
    point = torch.full_like(private, -INF)
    point[:, :, 5] = 1.0
    rare = public.clone()
    rare[:, 3] = -60.0
    rare_private = private.clone()
    rare_private[0, :, 3] = -INF
    return [
        Case("masked-public", public_only, public_hole),
        Case("masked-private", private_only, public),
        Case("masked-both", both, public_hole),
        Case("masked-mixed", mixed, public_hole),
        Case("masked-one-model", sole, public),
        Case("private-point-mass", point, public),
        Case("both-point-mass", point[:2], point[0]),
        Case("masked-rare-token", rare_private, rare),
    ]


def identical() -> list[Case]:
    private, public = logits(200, 5, 2, 17, 3.0, 0.8)
    same = private[:1].expand(5, 2, 17)
    return [
        Case("models-identical", same.clone(), public),
        Case("models-identical-expanded", same, public),
        Case("equal-to-public", public.expand(3, 2, 17).contiguous(), public),
        Case("equal-up-to-offset", public.expand(3, 2, 17) * 1.0 + 4.0, public),
        Case("uniform", torch.zeros(3, 1, 17), torch.zeros(1, 17)),
    ]


def strided() -> list[Case]:
    """Return row slices of a bigger tensor, and rows of stride 0."""
    private, public = logits(300, 6, 4, 29, 2.0, 0.6)
    return [
        Case("strided-slice", private[1::3, ::3, 5:22], public[::3, 5:22]),
        Case("strided-public-0", private[:2, :3, :17], public[:1, :17].expand(3, 17)),
        Case("strided-model-0", private[:1, :2, 1:18].expand(3, 2, 17), public[:2, 1:18]),
        Case("strided-position-0", private[:3, :1, :17].expand(3, 2, 17), public[:2, :17]),
    ]


def canary() -> list[Case]:
    """Return models of which model 0 gives 1 - 1e-12 to a token of public probability 1e-12.

    The other models do not raise that token, or raise it weakly.
    """
    _, public = logits(400, 1, 1, 16, 1.0, 0.0)
    lse = torch.logsumexp(public, -1)
    public = torch.cat([public, (lse + math.log(1e-12)).unsqueeze(-1)], dim=-1)
    private = public.expand(4, 1, 17).clone()
    private[0, 0, 16] = float(lse) + math.log(1e12)
    private[1, 0, 16] += 3.0
    private[2, 0, :16] += 0.1 * torch.arange(16)
    return [
        Case("canary-N4", private, public),
        Case("canary-N1", private[:1], public),
        Case("canary-N2", private[[0, 2]], public),
    ]


def corners() -> list[Case]:
    """Return cases at the limits, for which answers must be sound but need not be close.

    They have large offsets, logits 10⁴ below the row's largest, spread 80, and q below e^-70.
    """
    private, public = logits(500, 3, 1, 17, 2.0, 0.7)
    small = public.clone()
    small[:, 2], small[:, 8], small[:, 11] = -95.0, -200.0, -800.0
    small_private = private.clone()
    small_private[:, :, [2, 8, 11]] = small[:, [2, 8, 11]]
    small_private[0, :, 2] += 30.0
    small_private[1, :, 8] += 150.0
    small_private[2, :, 11] = 5.0
    wide, wide_public = logits(501, 3, 1, 17, 80.0, 3.0)
    apart, apart_public = logits(502, 3, 1, 17, 80.0, 80.0)
    far = private.clone()
    far[0, :, 3], far[1, :, 4], far[2, :, 5] = -9.9e3, -9e3, -9.9e3
    far_public = public.clone()
    far_public[:, 5], far_public[:, 6] = -9.9e3, -9e3
    return [
        Case("offset-both", private + 1000, public + 1000),
        Case("offset-private", private + 1000, public),
        Case("offset-public", private, public - 1000),
        Case("offset-1e5", private + 1e5, public - 1e5),
        Case("rare-tokens", small_private, small),
        Case("spread80", wide, wide_public),
        Case("spread80-apart", apart, apart_public),
        Case("very-negative", far, far_public),
        Case("mixture-underflows", *_underflowing()),
    ]


def _underflowing() -> tuple[Tensor, Tensor]:
    """Return tokens whose q is a normal double, while p_i and the mixture underflow."""
    public = torch.tensor([[0.0, -120.0, -30.0, -1.0]])
    private = public.expand(2, 1, 4).clone()
    private[:, :, 1], private[:, :, 2] = -800.0, -760.0
    private[1, :, 3] = -850.0
    return private, public


def most_radius(order: float) -> float:
    """Return the largest radius with (order - 1) radius <= 600."""
    return math.nextafter(600.0 / (order - 1.0), 0.0)


def balls(orders: tuple[float, ...]) -> list[tuple[float, float]]:
    """Return pairs of each order with each radius, the largest ones cut at the limit."""
    return [(a, min(r, most_radius(a))) for a in orders for r in RADII]


def small() -> list[Case]:
    """Return every case for which all stated error bounds hold."""
    return ordinary() + masked() + identical() + strided() + canary()


def wide() -> list[Case]:
    """Return vocabularies too large for the multi-precision oracle, with tiles and a tail."""
    plans = [
        # V, N, B, dtype
        (111, 3, 2, torch.float32),
        (1000, 2, 1, torch.float32),
        (1000, 3, 1, torch.bfloat16),
        (999, 2, 2, torch.float16),
        (4133, 2, 1, torch.float32),
    ]
    cases = []
    for seed, (vocab, n, b, dtype) in enumerate(plans):
        private, public = logits(600 + seed, n, b, vocab, 3.0, 0.6)
        private[0, 0, 5] = -INF
        private[-1, -1, 7] += 9.0
        name = f"V{vocab}-N{n}-{str(dtype)[6:]}"
        cases.append(Case(name, private.to(dtype), public.to(dtype)))
    return cases


def single() -> list[Case]:
    """Return ensembles that the operators compute in single precision.

    They have enough models and tokens, and weights inside (0, 1).
    """
    plans = [
        # V, N, B, noise, spread of a change that all models share, dtype
        (3001, 8, 2, 1.0, 0.0, torch.float32),
        (4999, 12, 1, 1.2, 0.0, torch.bfloat16),
        (5003, 9, 1, 1.0, 0.0, torch.float16),
        # These are too close for floats: differences are formed in double.
        (4096, 8, 1, 0.05, 1.0, torch.float32),
    ]
    cases = []
    for seed, (vocab, n, b, noise, shared, dtype) in enumerate(plans):
        private, public = logits(650 + seed, n, b, vocab, 2.0, noise)
        generator = torch.Generator().manual_seed(660 + seed)
        private += shared * torch.randn(b, vocab, generator=generator)
        name = f"single-V{vocab}-N{n}-{str(dtype)[6:]}"
        cases.append(Case(name, private.to(dtype), public.to(dtype)))
    return cases
