"""Temperature, top-k, the active vocabulary and its tail: rows, answers, draws, errors.

`test_distributions` shows that guarantees hold with them.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from exact import log_probs, uncharged
from mechanism_cases import MECHANISMS as CASES
from torch import Tensor

from adapmixed.limits import LEAST_PUBLIC
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PublicOnly,
    Unprotected,
    UnprotectedPool,
    shaped,
)
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom, SeededRandom
from adapmixed_ext.inputs import likeliest

CLIPPED = ["adapmixed-no-screen", "pmixed", "clipped-mixing", "clipped-log-pool", "unprotected"]
MECHANISMS = [CASES[name] for name in (*CLIPPED, "unprotected-pool", "public")]
PUBLIC = torch.tensor([[0.0, 1.0, -68.0, -72.0, -math.inf]])
LOUD = torch.tensor([[[2.0, 0.0, -68.0, 60.0, 80.0]], [[0.0, 1.0, 5.0, -72.0, -math.inf]]])


def logits(vocab: int = 9, models: int = 3, positions: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    public = 3 * torch.randn(positions, vocab, generator=generator)
    return public + torch.randn(models, positions, vocab, generator=generator), public


def distribution(mechanism: Mechanism, private: Tensor, public: Tensor, **shape: Any) -> Any:
    return mechanism.propose(private, public, rng=SeededRandom(0), **shape)._proposed


def by_definition(
    private: Tensor, public: Tensor, active: int, temperature: float = 1.0, top_k: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return log p_i' over all V tokens and log q, (N, B, V) and (B, V) float64."""
    log_p, q = private.double() / temperature, public.double() / temperature
    for b in range(len(public)):
        order = sorted(range(public.shape[1]), key=lambda y, b=b: (-float(public[b, y]), y))
        q[b, order[top_k or len(order) :]] = -math.inf
        q[b] = q[b].log_softmax(0)
        inside = [y for y in order[:active] if q[b, y] >= LEAST_PUBLIC]
        for row in log_p[:, b]:
            speaking = row[inside]
            row.copy_(q[b])
            if speaking.amax() > -math.inf:
                row[inside] = speaking.log_softmax(0) + q[b, inside].logsumexp(0)
    return log_p, q


SHAPED: list[dict[str, Any]] = [
    *({"active": active} for active in (2, 4, 8, 9, None)),
    *({"active": active, "top_k": 5} for active in (3, 5, 7)),
    *({"active": active, "top_k": 5, "temperature": 0.7} for active in (None, 3)),
]
SHORT = [(SHAPED[-1], dtype) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.float32) for shape in SHAPED), *SHORT], ids=str
)
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_answers_are_those_of_rows_by_definition(
    mechanism: Mechanism, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    private, public = (tensor.to(dtype) for tensor in logits())
    private[0, 0] = -math.inf  # a member that speaks about the tail alone
    private[0, 0, public[0].argmin()] = 0.0
    if shape in ({"active": 9}, {"active": None}):
        private = private[1:]
    expected, q = by_definition(private, public, **shape | {"active": shape["active"] or 9})
    here = log_probs(mechanism, private, public, **shape)
    there = log_probs(mechanism, expected.float(), q.float())
    assert torch.allclose(here, there, rtol=0, atol=1e-5)
    assert torch.equal(here.isneginf(), q.isneginf())
    assert torch.allclose(here.exp().sum(-1), torch.ones(4).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_all_tokens_are_the_published_method_to_the_last_bit(mechanism: Mechanism) -> None:
    private, public = logits()
    rows = shaped(private, public, active=9)
    assert rows.with_tail() is rows and rows.private is private and rows.public is public
    assert torch.equal(
        log_probs(mechanism, private, public, active=9), log_probs(mechanism, private, public)
    )


@pytest.mark.parametrize("mechanism", MECHANISMS[:5], ids=lambda mechanism: mechanism.name)
def test_tokens_below_the_floor_keep_their_public_probability(mechanism: Mechanism) -> None:
    quiet = LOUD.clone()
    quiet[..., 3:] = PUBLIC[..., 3:]
    for active in (None, 4):
        here = log_probs(mechanism, LOUD, PUBLIC, active=active)
        there = log_probs(mechanism, quiet, PUBLIC, active=active)
        assert torch.allclose(here, there, rtol=0, atol=1e-6)
        assert float(here[0, 4]) == -math.inf and abs(float(here[0, 3]) + 73.3) < 1.5


@pytest.mark.parametrize(
    "shape", [{}, {"active": 20}, {"active": 20, "top_k": 30, "temperature": 3.0}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_emptied_and_silent_members_are_the_public_row_to_the_last_bit(
    dtype: torch.dtype, shape: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    public = (40 * torch.randn(3, 64, generator=generator)).to(dtype)
    public[0, :5] = -math.inf
    private = public.expand(3, 3, 64).clone()
    speaking = torch.zeros_like(public, dtype=torch.bool)
    speaking.scatter_(1, likeliest(public, shape.get("active", 64)), True)
    divided = public.double() / shape.get("temperature", 1.0)
    speaking &= divided.log_softmax(-1) >= LEAST_PUBLIC
    private[1].masked_fill_(speaking, -math.inf)
    private[2, :, ::2] += 1
    rows = shaped(private, public, **shape).with_tail()
    assert rows.private.dtype == torch.float32 and rows.tail is not None
    assert torch.equal(rows.private[0], rows.public) and torch.equal(rows.private[1], rows.public)
    sums = [tensor.double().logsumexp(-1) for tensor in (rows.private, rows.public)]
    assert rows.lse_differences is not None and not rows.lse_differences[:2].any()
    torch.testing.assert_close(rows.lse_differences, sums[0] - sums[1], rtol=0.0, atol=2e-5)
    assert not torch.equal(rows.private[2], rows.public)
    pool = distribution(ClippedLogPool(-1.0, 2.0), private, public, **shape).projection
    assert pool.span[:2].abs().max() == 0.0 and pool.span[2].min() > 0.0


def test_the_active_tokens_are_the_likeliest_and_of_ties_the_smaller() -> None:
    generator = torch.Generator().manual_seed(1)
    public = torch.randint(-3, 3, (40, 50), generator=generator).bfloat16()
    public[5] = torch.where(public[5] < 0, -0.0, public[5])
    public[3, 4:] = -math.inf  # fewer tokens than K
    for count in (1, 2, 7, 49, 50):
        top = likeliest(public, count)
        for b, row in enumerate(public.tolist()):
            order = sorted(range(50), key=lambda y, row=row: (-row[y], y))
            assert top[b].tolist() == sorted(order[:count])
            assert likeliest(public[b : b + 1], count, by_rank=True).tolist() == [order[:count]]


def test_a_row_does_not_depend_on_others() -> None:
    private, public = logits(vocab=30)
    public[1] = public[0].flip(0)
    whole = shaped(private, public, active=8).answerable().with_tail()
    assert torch.equal(shaped(private, public, active=8).with_tail().private, whole.private)
    louder, odd, broken = private.clone(), private.clone(), private.clone()
    louder[1] += 5 * torch.randn(louder[1].shape, generator=torch.Generator().manual_seed(0))
    odd[1].scatter_(1, public.argmax(-1, keepdim=True), -math.inf)  # its sum needs doubles
    broken[1, :, 4] = math.nan
    for others in (louder, odd, broken):
        other = shaped(others, public, active=8).answerable().with_tail()
        assert torch.equal(whole.private[[0, 2]], other.private[[0, 2]])
    for b in range(len(public)):
        single = shaped(private[:, b : b + 1], public[b : b + 1], active=8).with_tail()
        assert torch.equal(single.private[:, 0], whole.private[:, b])


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
def test_a_broken_row_of_one_member_has_no_number_behind_it(value: float) -> None:
    _, public = logits(vocab=30, positions=1)
    tokens = likeliest(public, 8)
    private = torch.zeros(1, 24).as_strided((1, 1, 8), (24, 24, 1))  # as the output layer gives it
    private[0, 0, 3] = value
    rows = shaped(private, public, active=8, tokens=tokens).answerable().with_tail()
    whole = torch.zeros(1, 1, 30).scatter_(2, tokens[None], private)
    expected = shaped(whole, public, active=8).answerable().with_tail()
    assert torch.equal(rows.private, expected.private)


def test_tokens_of_the_tail_are_drawn_from_the_public_model() -> None:
    private, public = logits(positions=1)
    copies = 20_000
    rows = private.expand(-1, copies, -1), public.expand(copies, -1)
    drawn = uncharged(Unprotected().propose(*rows, rng=SeededRandom(2), active=3)).tokens
    assert drawn is not None
    p = log_probs(Unprotected(), private, public, active=3)[0].exp()
    counts = torch.bincount(drawn, minlength=9)
    bound = 5 * (copies * p * (1 - p)).sqrt() + 1  # of a seeded draw
    assert bool(((counts - copies * p).abs() <= bound).all()) and float(p.min()) * copies > 5


def test_the_second_draw_takes_as_much_of_the_stream_whether_needed_or_not() -> None:
    private, public = logits()
    for shift, active, taken in ((0.0, 2, 2), (200.0, 2, 2), (0.0, 9, 1)):
        sure = public.clone()
        sure[:, 0] += shift  # the tail is never drawn
        rng = SeededRandom(0)
        uncharged(PublicOnly().propose(private, sure, rng=rng, active=active))
        assert rng.position == taken


def test_the_tail_is_no_token() -> None:
    """It is neither screened nor the likeliest, though it has most of the probability here."""
    public = torch.full((1, 100), -1.0)
    public[0, 7] = 0.0
    private = public.repeat(2, 1, 1)
    private[:, 0, 8] += 9.0
    private[:, 0, 0] += 9.0
    unsure = [ClippedMixing(0.5, 2.0, public_confidence=x) for x in (0.02, 0.03)]
    for mechanism, speaking in zip(unsure, (False, True), strict=True):
        rows = mechanism.propose(private, public, rng=SeededRandom(0), active=4)
        assert bool(rows._proposed.public) is not speaking
    pool = distribution(UnprotectedPool(), private, public, active=4)
    assert pool.likeliest().tolist() == [0]
    near = AdaPMixED(2.0, 0.5, screen_weight=1.0, sigma=1e-6, threshold=1.0)
    same = public.repeat(2, 1, 1)
    for rows, passed in ((private, False), (same, True)):
        ticket = near.propose(rows, public, rng=SeededRandom(0), active=4)
        assert bool(ticket._proposed.public) is not passed


# Temperature and top-k before projection


def rows(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    private, public = logits(vocab=11)
    return private.to(dtype), public.to(dtype)


SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.01},
    {"temperature": 0.01, "top_k": 5},
    {"temperature": 100.0, "top_k": 5},
    {"top_k": 5},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", MECHANISMS, ids=lambda m: m.name)
def test_no_finite_row_raises_once_rows_are_shaped(inner: Mechanism, dtype: torch.dtype) -> None:
    """An error would reveal how large a private logit is."""
    private, public = rows(dtype)
    largest = torch.finfo(dtype).max
    best = public.topk(5, dim=-1).indices
    far = private.repeat(2, 1, 1)
    far[0] *= 1000.0
    far[1] -= largest / 2
    far[2].scatter_(-1, best, -largest)  # a top-k keeps only what is far below
    far[3, :, 4] = largest
    far[4] = far[4].masked_fill(far[4] < far[4].amax(-1, keepdim=True), -math.inf)
    for (members, base), shape in product(((far, public), (private, 1000.0 * public)), SHAPES):
        for targets in (None, base.argmax(-1)):
            proposal = inner.propose(members, base, rng=SeededRandom(0), targets=targets, **shape)
            answer = uncharged(proposal)
            assert answer.log_prob is None or not bool(answer.log_prob.isnan().any())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("shape", [{"temperature": 0.01}, {"top_k": 5}], ids=str)
def test_rows_that_are_no_logits_raise_shaped_or_not(bad: float, shape: dict[str, Any]) -> None:
    for member in (None, 1):
        private, public = rows()
        (public if member is None else private[member])[0, public[0].argmax()] = bad
        for options in ({}, shape):
            with pytest.raises(
                ValueError, match=r"contains (NaN|\+inf); logits must be finite or -inf"
            ):
                Unprotected().propose(private, public, rng=SeededRandom(0), **options)
    nothing = torch.full_like(rows()[1], -math.inf)
    with pytest.raises(ValueError, match="no finite"):
        PublicOnly().propose(rows()[0], nothing, rng=SeededRandom(0), **shape)


@pytest.mark.parametrize("shape", [{}, {"temperature": 0.7}, {"top_k": 5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inner", MECHANISMS, ids=lambda m: m.name)
def test_no_private_row_raises_once_rows_are_answerable(
    inner: Mechanism, dtype: torch.dtype, shape: dict[str, Any]
) -> None:
    """An error would tell that a member is not finite, or very large."""
    private, public = rows(dtype)
    odd = private.repeat(2, 1, 1)
    best = public.argmax(-1, keepdim=True)  # a top-k keeps it
    for member, value in enumerate((math.nan, math.inf, -math.inf)):
        odd[member].scatter_(-1, best, value)
    odd[3] = -math.inf
    odd[4] += 1e7 if dtype == torch.float32 else 6e4
    answerable = shaped(odd, public, **shape).answerable()
    for member in (0, 1, 3):
        assert torch.equal(answerable.private[member], answerable.public)
    exact = shaped(private[1:2], public, **shape).private[0]  # the same row before it was moved
    if dtype == torch.float32:
        moved = answerable.private[4] - answerable.private[4].amax(-1, keepdim=True)
        assert torch.allclose(moved, exact - exact.amax(-1, keepdim=True), atol=2.0)
    proposal = inner.propose_rows(answerable, rng=SeededRandom(0))
    tokens = uncharged(proposal).tokens
    assert tokens is not None and len(tokens) == 4


def test_an_active_vocabulary_of_all_tokens_is_none() -> None:
    """Accountants are bound to it: `test_accountant.py` in tests/privacy."""
    accountant = Accountant(1e-5)
    for active in (None, 9, 100):
        accountant.charge(PublicOnly().propose(*logits(), rng=SecureRandom(), active=active))
    with pytest.raises(ValueError, match="active_tokens"):
        accountant.charge(PublicOnly().propose(*logits(), rng=SecureRandom(), active=8))
