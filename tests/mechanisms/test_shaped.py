"""Temperature and top-k before projection: the law, the charge and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    Proposal,
    PublicOnly,
    Shaped,
    Unprotected,
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


def stated(proposal: Proposal) -> Guarantee:
    accountant = Accountant(1e-5)
    accountant.add(proposal.events())
    return accountant.epsilon()


def by_hand(
    private: torch.Tensor, public: torch.Tensor, temperature: float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row and token by token."""
    private, public = private.float() / temperature, public.float() / temperature
    for b in range(len(public)):
        kept = sorted(range(public.shape[1]), key=lambda v: -public[b, v].item())[:top_k]
        for v in set(range(public.shape[1])) - set(kept):
            public[b, v] = -math.inf
            private[:, b, v] = -math.inf
    return private, public


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", INNER, ids=lambda m: m.name)
def test_it_is_the_mechanism_on_reshaped_rows(inner: Mechanism, dtype: torch.dtype) -> None:
    private, public = rows(dtype)
    shaped = Shaped(inner, temperature=0.7, top_k=5)
    assert shaped.budget == inner.budget
    targets = public.argmin(-1) if inner.name == "public" else public.argmax(-1)
    here = shaped.propose(private, public, targets=targets, rng=SeededRandom(3))
    there = inner.propose(*by_hand(private, public, 0.7, 5), targets=targets, rng=SeededRandom(3))
    assert stated(here) == stated(there)
    answer, expected = here.release(), there.release()
    assert answer.log_prob is not None and expected.log_prob is not None
    assert torch.equal(answer.log_prob, expected.log_prob)
    if inner.name == "public":  # the unlikeliest token is not among the five
        assert bool(torch.isneginf(answer.log_prob).all())


def test_tokens_are_among_those_kept() -> None:
    private, public = rows()
    private[:, :, public.argmin(-1)] += 30.0  # what the models would say
    shaped, rng = Shaped(Unprotected(), top_k=2), SeededRandom(1)
    best = public.topk(2, dim=-1).indices
    for _ in range(50):
        tokens = shaped.propose(private, public, rng=rng).release().tokens
        assert tokens is not None and bool((best == tokens[:, None]).any(-1).all())
    low = Shaped(PublicOnly(), temperature=1e-3)
    tokens = low.propose(private, public, rng=rng).release().tokens
    assert tokens is not None and torch.equal(tokens, public.argmax(-1))


def test_a_slot_that_is_public_stays_public() -> None:
    private, public = rows(torch.bfloat16)
    private[1] = public
    private[2] = -math.inf
    private[2, torch.arange(4), public.argmin(-1)] = 0.0  # none of its tokens is kept
    for shaped in (Shaped(Unprotected(), 0.3, 4), Shaped(Unprotected(), 1.0, 4)):
        members, q = shaped.reshape(private, public)
        assert torch.equal(members[1], q) and torch.equal(members[2], q)
    assert Shaped(Unprotected()).reshape(private, public)[1].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"temperature": -1.0}, "temperature must be > 0"),
        ({"temperature": math.nan}, "temperature must be > 0"),
        ({"temperature": math.inf}, "temperature must be finite"),
        ({"top_k": 0}, "top_k must be an integer >= 1"),
        ({"top_k": 3, "mechanism": ClippedLogPool(-0.5, 0.5, queries=1, top_k=4)}, "given once"),
        ({"mechanism": "pmixed"}, "mechanism must be a Mechanism"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shaped(**({"mechanism": Unprotected()} | settings))
