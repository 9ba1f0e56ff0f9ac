"""Every input on which an operator was ever found outside its bounds. None may be removed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from cases import Case

# Seeds of fuzz_cases.build that once failed and that test_fuzz.py does not run. They found faults
# of project (1227, 4896) and the screen, of the screen's oracle if s is 0 (7700092), and of boxes
# with log-sum-exps near 1e5 (the others).
FUZZED = (1227, 4014, 4493, 4896, 7700092, 7700144, 7700406)


@dataclass(frozen=True)
class Regression:
    """An ensemble with the order and radius of its projection and the orders of its losses.

    If all models are equal, removing one must lose exactly 0. The same holds for emptying a model
    that equals the public one.
    """

    case: Case
    order: float
    radius: float
    loss_orders: tuple[float, ...] = (1.01, 2.0, 18.0)
    weight: float | None = None  # weight of the losses, if not the projection's


def _one_row(
    name: str, private: list[float], public: list[float], dtype: torch.dtype = torch.float32
) -> Case:
    return Case(
        name, torch.tensor(private, dtype=dtype).view(1, 1, -1), torch.tensor([public], dtype=dtype)
    )


def _public_models(name: str, seed: int, models: int, vocab: int) -> Case:
    public = 30 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
    return Case(name, public.expand(models, 1, vocab), public)


def _just_unlisted() -> Case:
    """Return a case with a target of e^20 and 598 tokens just too rare for the list of tokens."""
    vocab, target = 600, math.exp(20.0)
    p = torch.full((vocab,), 0.5 / (vocab - 2), dtype=torch.float64)
    q = p**2 * vocab / (0.6 * target * 1e-6)
    p[-2:] = torch.tensor([0.4, 0.1])
    q[-2] = 0.16 * 0.45**2 / target
    q[-1] = 1 - q[:-1].sum()
    return Case("just-unlisted", p.log().float().view(1, 1, -1), q.log().float().view(1, -1))


REGRESSIONS: list[Regression] = [
    # (alpha - 1) R = 20 exactly: a list is used, and leaves no margin for the tokens it omits.
    Regression(_just_unlisted(), order=2.0, radius=20.0),
    # Log-sum-exps 600 apart: rounding z - z_0 in floats gave 2.8e-5 above the optimum.
    Regression(
        _one_row(
            "far-apart",
            [0.2969741225242615, 1.254364013671875, 0.23730520904064178],
            [601.1116943359375, 588.3486938476562, 600.4000854492188],
        ),
        order=8.0, radius=0.5,
    ),
    # Tokens that p hardly has set the optimum to 1 - 8.2e-22; the search ended at 1 - 1.8e-12.
    Regression(
        _one_row(
            "slow-complement",
            [-42.34375, -2.484375, 121.0625, 82.25, -1.408203125, -112.4375, -58.875, -7.5,
             -215.75, 70.4375, -115.5, -38.03125, 29.6875, -150.875, -80.3125, -7.984375],
            [61.75, 28.28125, 109.4375, 9.046875, -27.515625, -114.625, 101.8125, 38.34375,
             -40.6875, -129.375, -55.4375, -72.1875, -5.6015625, -56.09375, -65.625, -39.625],
            torch.float16,
        ),
        order=1.01, radius=0.03,
    ),
    # The same with q = e^-60000 for the token that p lacks: 1e-205 instead of 3e-13.
    Regression(
        _one_row("deep-complement", [0.0, -math.inf], [60000.0, 0.0], torch.float16),
        order=128.0, radius=3.6,
    ),
    # Three equal models on a token that the public one excludes lost 6e-17 instead of 0.
    Regression(
        Case("identical-outside", torch.zeros(3, 1, 2), torch.tensor([[0.0, -math.inf]])),
        order=1.01, radius=1e-6, loss_orders=(1.01, 18.0), weight=1.0,
    ),
    # Models equal to the public one: emptying one lost 7e-42, through tokens with q < e^-62.
    Regression(
        _public_models("public-models", 297, 4, 50),
        order=1.01, radius=1e-6, loss_orders=(1.01,), weight=0.3,
    ),
    # The optimum is 1 - 8.0e-5, far from where the search by tangents starts, near 1.
    Regression(
        _one_row(
            "long-way-down",
            [-24.75, 148.0, -41.0, 17.75, 208.0, 126.5, -93.5, -2.78125, -102.0],
            [-41.75, 65.5, 14.6875, 123.0, 139.0, -25.875, 92.0, 31.5, 21.75],
            torch.bfloat16,
        ),
        order=1.01, radius=1e-6,
    ),
    # q < e^-680 and |log p/q| < 1: these tokens decide at a large order, and were left out.
    Regression(_one_row("rare", [0.0, -699.05], [0.0, -700.0]), order=800.0, radius=0.01),
    Regression(_one_row("rare-reverse", [0.0, -800.9], [0.0, -800.0]), order=1e3, radius=0.05),
    Regression(_one_row("rare-far", [0.0, -999.5], [0.0, -1e3]), order=1e6, radius=1e-4),
    # The same with a log-ratio a little above 1: the weight was 15 % below the optimum.
    Regression(
        _one_row("rare-steep", [0.0, 0.0, -698.7660522460938], [0.0, 0.0, -700.0]),
        order=1e3, radius=0.5,
    ),
    # Tangents of sums near the least double: the weight was 23 %, 5 % below the optimum.
    Regression(
        _one_row("tiny-sums", [-0.55, 1.2, -0.31], [0.1, 1.0, -0.5]), order=1.59e5, radius=0.01
    ),
    Regression(
        _one_row("tiny-sums-too", [-2.89, -2.86, 0.89], [-2.7, -2.6, 0.7]), order=5.3e4, radius=0.03
    ),
    # The target is beyond the range of float: the token that p lacks was not on the list.
    Regression(_one_row("infinite-score", [0.0, -math.inf], [0.0, 0.0]), order=18.0, radius=1e39),
    # The target is beyond the range of double: no token was looked at, and the weight was 1.
    Regression(_one_row("infinite-target", [0.0, 0.0], [0.0, -math.inf]), order=18.0, radius=2e307),
    # Losses of a token with q = e^-2000 near order 1 were 8 % too small.
    Regression(
        Case(
            "rare-near-one",
            torch.tensor([[[-0.71, -0.41]], [[-0.44, 1.05]], [[0.55, -0.38]], [[-0.21, -0.84]]]),
            torch.tensor([[0.0, -2000.0]]),
        ),
        order=2.0, radius=1.0, weight=0.001,
        loss_orders=(1.0 + 1e-8, 1.0 + 1e-6, 1.0 + 1e-5, 2.0),
    ),
]  # fmt: skip
