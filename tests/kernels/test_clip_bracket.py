"""The search of clip_project for s: a sample gives a bracket, in which few tokens change sides.

If the bracket fails, s is found from all tokens.
"""

from __future__ import annotations

import math

import cases
import pytest
import torch
from oracle_clip import row_of
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import reference

BOX = (0.6, 1.65)


def check(private: Tensor, public: Tensor, box: tuple[float, float] = BOX) -> None:
    """Check that every row sums to 1 over all tokens and matches the reference."""
    got = adapmixed_ext.clip_project(private, public, lower=box[0], upper=box[1])
    truth = reference.clip_project(private, public, lower=box[0], upper=box[1])
    for i in range(len(private)):
        bar = adapmixed_ext.mixture(private[i : i + 1], public, row_of(got, i))[0]
        assert abs(math.fsum(bar.tolist()) - 1) <= 1e-12, i
        torch.testing.assert_close(bar, truth[i, 0], rtol=1e-9, atol=1e-300)


def rows(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return ordinary and distant rows, heavy tails, planted tokens and masked tokens."""
    private, public = cases.logits(50 + vocab, 6, 1, vocab, 2.5, 0.7)
    private[1] += 2 * (private[0] - public)
    private[2] = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2)) * 6
    private[3, 0, vocab // 2] += 30.0
    private[4, 0, vocab // 3] += math.log(vocab)
    private[5, 0, ::3] = -math.inf
    return private.to(dtype), public.to(dtype)


@pytest.mark.parametrize("vocab", [2, 33, 1023, 1024, 4099, 50257])
def test_rows_of_every_size(vocab: int, isa: str) -> None:
    check(*rows(vocab))
    if vocab < 10_000:
        private, public = rows(vocab)
        public[0, 1::4] = -math.inf
        for box in (BOX, (0.0, 2.0), (0.95, 1.05), (0.1, 250.0), (0.5, 5e5)):
            check(private, public, box)


@pytest.mark.parametrize("dtype", cases.DTYPES[1:], ids=str)
def test_short_floats(dtype: torch.dtype, isa: str) -> None:
    check(*rows(4099, dtype))


def test_a_sample_that_misleads(isa: str) -> None:
    """The sample takes every fourth of equal tokens, and exactly these differ from the others."""
    vocab = 4096
    public = torch.zeros(1, vocab)
    private = torch.zeros(8, 1, vocab)
    for first in range(4):
        private[first, 0, first::4] = 0.4
        private[4 + first, 0, first::4] = -3.0
    check(private, public)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_too_many_tokens_at_the_bound(share: float, isa: str) -> None:
    """All tokens of one level reach a bound just where S is 1, from above or from below."""
    vocab = 4096
    public = torch.zeros(1, vocab)
    private = torch.zeros(2, 1, vocab)
    likely = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))
    likely = likely[: int(share * vocab)]
    taken = len(likely) / vocab
    private[0, 0, likely] = math.log(BOX[1] * (1 - taken) / (1 - BOX[1] * taken))
    private[1, 0, likely] = math.log(BOX[0] * (1 - taken) / (1 - BOX[0] * taken))
    check(private, public)
