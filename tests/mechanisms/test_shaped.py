"""Temperature and top-k before projection: answers, charges and errors."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Ticket,
    Unprotected,
    shaped,
)
from adapmixed.privacy import Accountant, Guarantee
from adapmixed.rng import SeededRandom

INNER: list[Mechanism] = [
    PublicOnly(),
    Unprotected(),
    AdaPMixED(order=3.0, target_leakage=0.05, screen=None),
    PMixED(8.0, 1e-5, 1000, 6.0),
    ClippedMixing(0.6, 1.7, queries=100),
    ClippedLogPool(-0.5, 0.5, queries=100),
]


def rows(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    public = 3 * torch.randn(4, 11, generator=generator)
    private = public + torch.randn(3, 4, 11, generator=generator)
    return private.to(dtype), public.to(dtype)


def stated(proposal: Ticket) -> Guarantee:
    """Charge a proposal, which can then be released; return the guarantee."""
    accountant = Accountant(1e-5)
    accountant.charge(proposal)
    return accountant.guarantee()


def released(proposal: Ticket) -> torch.Tensor:
    stated(proposal)
    tokens = proposal.release().tokens
    assert tokens is not None
    return tokens


def by_hand(
    private: torch.Tensor, public: torch.Tensor, temperature: float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the kept columns of every row, one by one, and their tokens."""
    private, public = private.float() / temperature, public.float() / temperature
    kept = torch.tensor(
        [
            sorted(sorted(range(public.shape[1]), key=lambda v, b=b: -public[b, v].item())[:top_k])
            for b in range(len(public))
        ]
    )
    rows = [[member[b, kept[b]] for b in range(len(public))] for member in (*private, public)]
    every = torch.stack([torch.stack(row) for row in rows])
    return every[:-1], every[-1], kept


def masked(logits: torch.Tensor, kept: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return all V columns, with -inf in those that are not kept."""
    mask = torch.full(logits.shape, -math.inf)
    index = kept.expand(*logits.shape[:-1], -1)
    return mask.scatter(-1, index, (logits.float() / temperature).gather(-1, index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", INNER, ids=lambda m: m.name)
def test_it_is_the_mechanism_on_shaped_rows(inner: Mechanism, dtype: torch.dtype) -> None:
    """The answer is the same bit for bit on kept columns, and up to rounding on masked rows."""
    private, public = rows(dtype)
    shape = {"temperature": 0.7, "top_k": 5}
    *expected_rows, kept = by_hand(private, public, 0.7, 5)
    for place in (0, 3):
        targets = kept[:, place].clone()
        here = inner.propose(private, public, targets=targets, rng=SeededRandom(3), **shape)
        there = inner.propose(*expected_rows, targets=torch.full((4,), place), rng=SeededRandom(3))
        assert stated(here) == stated(there)
        found, expected = here.release().log_prob, there.release().log_prob
        assert found is not None and expected is not None and torch.equal(found, expected)
        whole = inner.propose(
            masked(private, kept, 0.7), masked(public, kept, 0.7), targets=targets,
            rng=SeededRandom(3),
        )  # fmt: skip
        stated(whole)
        assert torch.allclose(whole.release().log_prob, found, rtol=1e-6, atol=1e-6)
    tokens = released(inner.propose(private, public, rng=SeededRandom(4), **shape))
    places = released(inner.propose(*expected_rows, rng=SeededRandom(4)))
    assert torch.equal(tokens, kept.gather(1, places[:, None])[:, 0])
    outside = inner.propose(
        private, public, targets=public.argmin(-1), rng=SeededRandom(3), **shape
    )
    stated(outside)
    assert bool(torch.isneginf(outside.release().log_prob).all())


def test_tokens_are_among_those_kept() -> None:
    private, public = rows()
    private[:, :, public.argmin(-1)] += 30.0  # what the members would say
    rng = SeededRandom(1)
    best = public.topk(2, dim=-1).indices
    for _ in range(50):
        tokens = released(Unprotected().propose(private, public, rng=rng, top_k=2))
        assert bool((best == tokens[:, None]).any(-1).all())
    low = PublicOnly().propose(private, public, rng=rng, temperature=0.01)
    assert torch.equal(released(low), public.argmax(-1))


def test_a_member_that_is_public_stays_public() -> None:
    private, public = rows(torch.bfloat16)
    private[1] = public
    private[2] = -math.inf
    private[2, torch.arange(4), public.argmin(-1)] = 0.0  # none of its tokens is kept
    for temperature in (0.3, 1.0):
        found = shaped(private, public, temperature=temperature, top_k=4)
        assert torch.equal(found.private[1], found.public)
        assert torch.equal(found.private[2], found.public)
    assert shaped(private, public).public.dtype == torch.bfloat16


SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.01},
    {"temperature": 0.01, "top_k": 5},
    {"temperature": 100.0, "top_k": 5},
    {"top_k": 5},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", INNER, ids=lambda m: m.name)
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
            stated(proposal)
            answer = proposal.release()
            assert answer.log_prob is None or not bool(answer.log_prob.isnan().any())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("shape", [{"temperature": 0.01}, {"top_k": 5}], ids=str)
def test_rows_that_are_no_logits_raise_shaped_or_not(bad: float, shape: dict[str, Any]) -> None:
    for member in (None, 1):
        private, public = rows()
        (public if member is None else private[member])[0, public[0].argmax()] = bad
        for given in ({}, shape):
            with pytest.raises(
                ValueError, match=r"contains (NaN|\+inf); logits must be finite or -inf"
            ):
                Unprotected().propose(private, public, rng=SeededRandom(0), **given)
    nothing = torch.full_like(rows()[1], -math.inf)
    with pytest.raises(ValueError, match="no finite"):
        PublicOnly().propose(rows()[0], nothing, rng=SeededRandom(0), **shape)


@pytest.mark.parametrize("shape", [{"temperature": 0.7}, {"top_k": 5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inner", INNER, ids=lambda m: m.name)
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
    found = shaped(odd, public, **shape).answerable()
    for member in (0, 1, 3):
        assert torch.equal(found.private[member], found.public)
    exact = shaped(private[1:2], public, **shape).private[0]  # the same row before it was moved
    if dtype == torch.float32:
        moved = found.private[4] - found.private[4].amax(-1, keepdim=True)
        assert torch.allclose(moved, exact - exact.amax(-1, keepdim=True), atol=2.0)
    proposal = inner.propose_rows(found, rng=SeededRandom(0))
    assert stated(proposal).queries == 4
    proposal.release()


def test_every_call_has_a_shape_of_its_own() -> None:
    """One accountant takes calls of any shape, because every guarantee holds for shaped rows."""
    mechanism, accountant = ClippedLogPool(-0.5, 0.5, queries=100), Accountant(1e-5)
    for temperature, top_k in ((1.0, None), (0.5, 3), (2.0, 7)):
        accountant.charge(
            mechanism.propose(*rows(), rng=SeededRandom(0), temperature=temperature, top_k=top_k)
        )
    plain = Accountant(1e-5)
    plain.charge(mechanism.propose(*rows(), rng=SeededRandom(0)))
    assert accountant.guarantee().epsilon == plain.guarantee().epsilon
