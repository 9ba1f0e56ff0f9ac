"""Seeded inputs for the kernel tests, small enough that a failure can name them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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


def drawn(tokens: int, numbers: int, count: int) -> list[Case]:
    """Return fuzzed cases of at least so many tokens and at most so many private logits."""
    found = (fuzzed(seed)[0] for seed in itertools.count(1000))
    fitting = (
        case for case in found if case.public.shape[1] >= tokens and case.private.numel() <= numbers
    )
    return list(itertools.islice(fitting, count))


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
        Case("ties", private[:3].round(), public.round()),
        Case("bits-apart", *_bits_apart()),
    ]


def _bits_apart() -> tuple[Tensor, Tensor]:
    """Return a model two thirds of whose logits are the public ones, the others the next floats."""
    public = torch.tensor([[0.1], [3.0], [10.0]]) * logits(7, 1, 1, 48, 1.0, 0.0)[1]
    above = torch.nextafter(public, public + 1)
    return torch.where(torch.arange(48) % 3 > 0, public, above)[None], public


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
    corners = [
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
    return [replace(case, close=False) for case in corners]


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
    return drawn(7, 150, 15) + masked() + identical() + strided() + canary()


def wide() -> list[Case]:
    """Return vocabularies too large for the multi-precision oracle, with tiles and a tail."""
    return drawn(1_000, 12_500, 8)


def logit_rows(private: list[float], public: list[float]) -> tuple[Tensor, Tensor]:
    """Return one pair of rows, (1, 1, V) and (1, V)."""
    return torch.tensor([[private]]), torch.tensor([public])


def demanding() -> list[Case]:
    """Return rows on which single precision, or a search that looks at few tokens, once failed."""
    half = torch.full((1, 1), 0.5, dtype=torch.float64)
    # Weights that differ by a rounding, on deviations that floats do not tell apart.
    unseen_public = torch.full((1, 128), -INF)
    unseen_public[0, 1::2], unseen_public[0, 1] = 0.0, -8.0
    unseen = unseen_public.repeat(4, 1, 1)
    unseen[:, 0, 1] = 5.0
    unseen_weight = torch.full((4, 1), 0.5000000689178705, dtype=torch.float64)
    unseen_weight[0] = 0.5000000111758709
    # What the models share is a thousand times what they differ by.
    alike_public = torch.tensor([[-8.0] * 16 + [0.0] * 16])
    generator = torch.Generator().manual_seed(1)
    alike = alike_public + torch.tensor([11.0] * 16 + [-0.1] * 16)
    alike = alike + 0.003 * torch.randn(40, 1, 32, generator=generator)
    # One member's p/q at a rare token is 3.8, the others' 0.285.
    rare_public = torch.tensor([[0.0, -38.0]])
    rare = rare_public.repeat(16, 1, 1)
    rare[:, 0, 1] += math.log(0.285)
    rare[0, 0, 1] = -38 + math.log(3.8)
    many, many_public = logits(4, 20, 1, 1000, 2.0, 1.0)
    common, common_public = logits(8, 9, 1, 1500, 2.0, 0.05)  # all share a large change
    common = common + torch.randn(1, 1500, generator=generator)
    return [
        # Log-sum-exps 600 apart: rounding z - z_0 in floats gave a weight above the optimum.
        Case("far-apart", *logit_rows(
            [0.2969741225242615, 1.254364013671875, 0.23730520904064178],
            [601.1116943359375, 588.3486938476562, 600.4000854492188]), ((8.0, 0.5),)),
        # An order that floats do not tell from 1.
        Case("order-near-1", *logit_rows(
            [0.0, -0.018886566162109375], [0.0, -15.117728233337402]), ((1.00000003, 1.0),)),
        # Logits that were not exact minus the centre of their row.
        Case("inexact-centre", *logit_rows(
            [0.0, -189.16920471191406], [401.0, 126.83079528808594]), ((18.0, 1.0),), close=False),
        Case("one-bit-apart", *logit_rows(
            [36.18584442138672, 2.4780069e-05], [36.18584442138672, 2.4780067e-05]), ((2.0, 0.0),)),
        Case("least-floats", *logit_rows(
            [0.0, -5.878195762634277], [0.0, -15.677648544311523]), ((60.0, 2.34826360443032),)),
        Case("unseen-by-floats", unseen, unseen_public, ((18.0, 3.6),), (2.0, 256.0, 1024.0),
             (unseen_weight,)),
        Case("alike", alike, alike_public, ((18.0, 3.6),), (64.0, 1024.0), (half,)),
        Case("rare-token", rare, rare_public, ((18.0, 3.6),), (64.0,), (2 * half,)),
        Case("orders-far-apart", many, many_public, ((2.5, 0.03), (17.5, 1e-3)),
             (8.0, 16.0, 1024.0), (2 * half,)),
        Case("common-change", common, common_public, ((18.0, 0.3), (3.0, 0.03)), (2.5, 18.0)),
    ]  # fmt: skip


def offsets() -> list[Case]:
    """Return models that raise one rare token, with log-sum-exps far apart.

    The error of the rounded difference of two logits grows with them, and matters if p/q is large.
    """
    cases = []
    for seed, offset in enumerate((30.3, 51.7, 103.1, 317.9, 611.3, 990.7, 2999.9)):
        generator = torch.Generator().manual_seed(seed)
        models, others = (1, 4, 8, 16)[seed % 4], (48, 2)[seed % 2]
        rare = 10 ** -(2.0 + 0.6 * seed)
        public = torch.full((1, 1 + others), math.log(rare / (1 - rare)))
        public[:, 1:] = 0.0
        if others == 48:
            public[:, 2:] = -1.3 + torch.randn(47, generator=generator)
        private = public.expand(models, 1, -1).clone()
        private[..., 0] = (0.0, 2.2)[seed // 2 % 2]
        private += 0.3 * torch.randn(private.shape, generator=generator)
        for apart in (0, 1):
            rows = (private + offset * (1 - apart), public + offset * apart)
            cases.append(Case(f"offset{offset}-{apart}", *rows))
    return cases


def boxed() -> list[Case]:
    """Return rows on which the search for the scale of a box is hard."""
    vocab, upper, lower = 4096, 1.65, 0.6
    flat = torch.zeros(1, vocab)
    # A sample takes every fourth of equal tokens, and exactly these differ from the others.
    misleading = torch.zeros(8, 1, vocab)
    for first in range(4):
        misleading[first, 0, first::4], misleading[4 + first, 0, first::4] = 0.4, -3.0
    # All tokens of one level reach a bound just where S is 1, from above or from below.
    crowded = torch.zeros(4, 1, vocab)
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))
    for k, share in enumerate((0.1, 0.5)):
        likely = order[: int(share * vocab)]
        taken = len(likely) / vocab
        crowded[2 * k, 0, likely] = math.log(upper * (1 - taken) / (1 - upper * taken))
        crowded[2 * k + 1, 0, likely] = math.log(lower * (1 - taken) / (1 - lower * taken))
    tails, tails_public = logits(50, 6, 1, 4099, 2.5, 0.7)
    tails[1] += 2 * (tails[0] - tails_public)
    tails[2] = torch.randn(1, 4099, generator=torch.Generator().manual_seed(2)) * 6
    tails[3, 0, 2049] += 30.0
    tails[4, 0, 1366] += math.log(4099)
    tails[5, 0, ::3] = -INF
    holes = tails_public.clone()
    holes[0, 1::4] = -INF
    # log s is as large as it gets if five tokens cannot hold all mass.
    steep, steep_public = ((rows * 16).round() / 16 for rows in logits(31, 6, 2, 500, 3.0, 1.5))
    steep[3:5, 0, 5:] -= 560.0
    # A logit exactly 600 below the log-sum-exp is there.
    edge = torch.tensor([[[-700.0, 0.0, -600.0]]]), torch.tensor([[0.0, -46.0, -30.0]])
    # s is exactly where the likeliest token reaches the edge of the box (0.5, 1.5).
    weights = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    ratios = torch.tensor([1.5, 1.0, 0.5], dtype=torch.float64)
    half = (weights * ratios).log().float()[None, None], weights.log().float()[None]
    found = [
        Case("misleading-sample", misleading, flat), Case("crowded-bound", crowded, flat),
        Case("heavy-tails", tails, tails_public), Case("heavy-tails-holes", tails, holes),
        Case("heavy-tails-bfloat16", tails.bfloat16(), tails_public.bfloat16()),
        Case("steep", steep, steep_public), Case("steep-1e5", steep + 1e5, steep_public - 1e5),
        Case("steep-5e4", steep, steep_public + 5e4),
        Case("edge-of-absence", *edge), Case("break-with-half", *half),
    ]  # fmt: skip
    return [replace(case, close=False) for case in found]


def rare_terms() -> list[Case]:
    """Return rows in which one rare token makes up the divergence, one order each.

    Its p is e^-29 to e^-59 and its term near 1: what floats lose of log p and t counts most.
    """
    found = []
    for order in (2.0, 3.0, 18.0, 256.0, 1024.0):
        drawn = torch.rand(2000, 3, generator=torch.Generator().manual_seed(5))
        rare = 59.5 - 30 * drawn[:, 0] ** 3
        apart = (rare + 2 * drawn[:, 1] - 1).div(order - 1).clamp(max=29.0)
        log_q = (rare + apart).clamp(max=59.5)
        offset = 40 * drawn[:, 2] - 20
        p = torch.stack([offset, apart - log_q + offset, *[offset - 4] * 30], -1)
        q = torch.stack([offset + 0.1, offset + 0.1 - log_q, *[offset - 3.9] * 30], -1)
        found.append(Case(f"rare-term-{order:g}", p[None], q, orders=(order,)))
    return found


def summed() -> list[Case]:
    """Return rows whose log-sum-exp is hard to find from the public row in single precision."""
    # Equal logits make errors of one sign, anywhere in an octave, above and below the public ones.
    steps = torch.linspace(-3.0, 3.0, 301).unsqueeze(-1)
    heights = torch.cat([steps - 20, steps, steps + 17.3, steps + 333])
    flat = torch.zeros(1, 64)
    flat[0, 0] = 0.5
    equal = heights.expand(-1, 64).unsqueeze(1).contiguous()
    topped = equal.clone()  # with one term as high as the reference, only e^0 and e^t are summed
    topped[..., 0] = heights + 40.0
    private, public = logits(9, 4, 1, 500, 2.0, 1.0)
    top = int(public.argmax())
    masked, above = private.clone(), private.clone()
    masked[..., top] = -INF  # the logit from which the sum would start
    above[..., (top + 1) % 500] += 70.0
    apart = torch.cat([masked, above, private + 1500.0, private - 1500.0])
    own = 4 * torch.randn(5, 777, generator=torch.Generator().manual_seed(10))
    own[1] += 1e4
    own[2, ::2] = -INF
    return [
        Case("one-sided", equal, flat), Case("one-sided-top", topped, flat),
        Case("no-floats", apart, public), Case("no-floats-2000", private + 2e3, public + 2e3),
        Case("public-rows", own.expand(3, 5, 777), own),
    ]  # fmt: skip


class Source:
    """A random source with a fixed key and counter."""

    seeded = True

    def __init__(self, seed: int = 0, counter: int = 2**40 + 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.key = torch.randint(0, 256, (32,), generator=generator, dtype=torch.uint8)
        self.counter = counter

    def reserve(self) -> tuple[Tensor, int]:
        return self.key, self.counter


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


# Plans: the numbers with which the operators are called.

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


# Fuzzed calls.

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


# Bad rows: (model, position, value), in which one logit gets the value, and -inf fills the row.
# Model -1 is public.

BAD: dict[str, tuple[tuple[int, int, float], ...]] = {
    "private NaN": ((1, 0, math.nan),),
    "private rows": ((2, 1, INF), (1, 2, -INF)),
    "public NaN": ((-1, 1, math.nan),),
    "public +inf": ((-1, 2, INF),),
    "public empty": ((-1, 0, -INF),),
    "both": ((0, 0, math.nan), (-1, 1, INF), (2, 1, -INF)),
}


def bad(kind: str) -> tuple[Tensor, Tensor]:
    """Return private (5, 4, 37) and public (4, 37) logits with the bad values of `kind`."""
    private, public = logits(0, 5, 4, 37, 1.0, 0.3)
    for model, position, value in BAD[kind]:
        row = public[position] if model < 0 else private[model, position]
        row[slice(None) if value == -INF else slice(5, 6)] = value
    return private, public
