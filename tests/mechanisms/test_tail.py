"""Members do not speak about the tail; `test_enumerated` shows that guarantees hold with it."""

from __future__ import annotations

import math

import pytest
import torch
from exact import log_probs

from adapmixed.limits import LEAST_PUBLIC
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    Unprotected,
    shaped,
)

MECHANISMS: list[Mechanism] = [
    AdaPMixED(3.0, 0.5, screen=None),
    PMixED(8.0, 1e-5, 16, 3.0),
    ClippedMixing(0.5, 4.0, queries=16),
    ClippedLogPool(-1.0, 2.0, 2.0),
    Unprotected(),
]
PUBLIC = torch.tensor([[0.0, 1.0, -68.0, -72.0, -math.inf]])
LOUD = torch.tensor([[[2.0, 0.0, -68.0, 60.0, 80.0]], [[0.0, 1.0, 5.0, -72.0, -math.inf]]])


def test_the_rows_that_mechanisms_see() -> None:
    rows = shaped(LOUD, PUBLIC).without_tail()
    p, q = rows.private.double().log_softmax(-1), rows.public.double().log_softmax(-1)
    assert torch.equal(rows.public, PUBLIC)
    tail = q[0] < LEAST_PUBLIC
    assert tail.tolist() == [False, False, False, True, True]
    assert torch.allclose(p[:, 0, tail].exp(), q[0, tail].exp(), rtol=1e-5, atol=0)
    speaking = LOUD[..., :3].double().log_softmax(-1)  # re-scaled: the tail's mass is below 1e-30
    assert torch.allclose(p[..., :3], speaking, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda one: one.name)
def test_the_tail_keeps_its_public_probability_whatever_members_say(mechanism: Mechanism) -> None:
    quiet = LOUD.clone()
    quiet[..., 3:] = PUBLIC[..., 3:]
    found = log_probs(mechanism, LOUD, PUBLIC)
    assert torch.allclose(found, log_probs(mechanism, quiet, PUBLIC), rtol=0, atol=1e-6)
    assert float(found[0, 4]) == -math.inf and abs(float(found[0, 3]) + 73.3) < 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_emptied_and_silent_members_are_the_public_row_to_the_last_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    public = (40 * torch.randn(3, 64, generator=generator)).to(dtype)
    public[0, :5] = -math.inf
    private = public.expand(3, 3, 64).clone()
    private[1] = torch.where(public.double().log_softmax(-1) < LEAST_PUBLIC, public, -math.inf)
    private[2, :, ::2] += 1
    if dtype != torch.float16:  # which has no such number
        private[1, 0] = torch.where(private[1, 0].isneginf(), -2e6, private[1, 0])
    rows = shaped(private, public).without_tail()
    assert torch.equal(rows.private[0], public) and torch.equal(rows.private[1], public)
    assert not torch.equal(rows.private[2], private[2]) and rows.private.dtype == dtype


def test_a_row_does_not_depend_on_what_others_say() -> None:
    public = torch.tensor([[0.0, 0.0, -60.0, -math.inf]])
    quiet = torch.tensor([[[0.0, 0.0, -20_000.0, -math.inf]], [[1.0, 0.0, -60.0, -math.inf]]])
    loud = quiet.clone()
    loud[1, 0, 3] = 5.0
    rows = [shaped(one, public).without_tail().private for one in (quiet, loud)]
    assert torch.equal(rows[0], rows[1])


def test_rows_that_say_nothing_about_the_tail_are_not_copied() -> None:
    masked = torch.tensor([[0.0, 1.0, -math.inf]])
    rows = shaped(masked.expand(2, 1, 3).clone(), masked)
    assert rows.without_tail() is rows
