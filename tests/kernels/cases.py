"""Named inputs for the kernel tests, small enough that a failure can name them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from fuzzed import drawn
from plans import INF, Case, logits
from torch import Tensor


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

    def rare(log_q: float, ratio: float, others: float, members: int, i: int) -> tuple[Tensor, ...]:
        public = torch.tensor([[0.0, log_q]])
        private = public.repeat(members, 1, 1)
        private[:, 0, 1] += math.log(others)
        private[i, 0, 1] = log_q + math.log(ratio)
        return private, public

    apart, apart_public = logits(4, 20, 1, 1000, 2.0, 1.0)
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
        # Errors that members share, mostly at tokens where x is small, or where it is not.
        *(Case(f"agreeing-{spread}", *(rows.repeat_interleave(16, -1) for rows in (
            torch.tensor(private) + spread * torch.randn(40, 1, 2, generator=generator),
            torch.tensor([public]))), (), orders, (2 * half,))
          for spread, orders, private, public in (
              (0.3, (18.0, 64.0), [-3.0, 7.6], [1.4, -1.3]),
              (0.1, (8.0,), [5.0, -2.9], [5.0, 0.0]),  # all members are far below at a token
              (0.003, (18.0, 64.0), [0.0, 1.5], [0.0, 0.0]))),
        # One member's p/q at a rare token is above all others'; the sums are of its powers.
        Case("rare-token", *rare(-38, 3.8, 0.285, 16, 0), ((18.0, 3.6),), (64.0,), (2 * half,)),
        Case("rare-listed", *rare(-62, 4.9, 0.1253, 62, 2), (), (128.0,), (2 * half,)),
        Case("orders-far-apart", apart, apart_public, ((2.5, 0.03), (17.5, 1e-3)),
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
    hard = [
        Case("misleading-sample", misleading, flat), Case("crowded-bound", crowded, flat),
        Case("heavy-tails", tails, tails_public), Case("heavy-tails-holes", tails, holes),
        Case("heavy-tails-bfloat16", tails.bfloat16(), tails_public.bfloat16()),
        Case("steep", steep, steep_public), Case("steep-1e5", steep + 1e5, steep_public - 1e5),
        Case("steep-5e4", steep, steep_public + 5e4),
        Case("edge-of-absence", *edge), Case("break-with-half", *half),
    ]  # fmt: skip
    return [replace(case, close=False) for case in hard]


def rare_terms() -> list[Case]:
    """Return rows in which one rare token makes up the divergence, one order each.

    Its p is e^-29 to e^-59 and its term near 1: what floats lose of log p and t counts most.
    """
    terms = []
    for order in (2.0, 3.0, 18.0, 256.0, 1024.0):
        drawn = torch.rand(2000, 3, generator=torch.Generator().manual_seed(5))
        rare = 59.5 - 30 * drawn[:, 0] ** 3
        apart = (rare + 2 * drawn[:, 1] - 1).div(order - 1).clamp(max=29.0)
        log_q = (rare + apart).clamp(max=59.5)
        offset = 40 * drawn[:, 2] - 20
        p = torch.stack([offset, apart - log_q + offset, *[offset - 4] * 30], -1)
        q = torch.stack([offset + 0.1, offset + 0.1 - log_q, *[offset - 3.9] * 30], -1)
        terms.append(Case(f"rare-term-{order:g}", p[None], q, orders=(order,)))
    return terms


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
    rows = 4 * torch.randn(5, 777, generator=torch.Generator().manual_seed(10))
    rows[1] += 1e4
    rows[2, ::2] = -INF
    return [
        Case("one-sided", equal, flat), Case("one-sided-top", topped, flat),
        Case("no-floats", apart, public), Case("no-floats-2000", private + 2e3, public + 2e3),
        Case("public-rows", rows.expand(3, 5, 777), rows),
    ]  # fmt: skip
