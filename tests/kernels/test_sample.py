"""sample at fixed seeds: tokens are drawn exactly in proportion to the float64 probabilities."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from cases import Source
from oracle import drawn_by_hand
from torch import Tensor
from workload import ISAS

import adapmixed_ext
from adapmixed_ext import _C

UNIT = 2.0**-100  # the unit of the integers that select a token first


def chi_square(observed: Counter[int], p: list[float], draws: int) -> tuple[float, int]:
    """Return (statistic, degrees of freedom); cells with fewer than 5 expected draws are pooled."""
    cells = [(observed[v], draws * w) for v, w in enumerate(p) if draws * w >= 5]
    rest = (draws - sum(o for o, _ in cells), draws - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    return sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1


def check_refused(p: Tensor, public: Tensor, seed: int, bad: int, message: str) -> None:
    """Check that row ``bad`` is refused, by an error or, where calls only queue work, by -1."""
    if p.device.type == "cpu":
        with pytest.raises(ValueError, match=message):
            adapmixed_ext.sample(p, public, rng=Source(seed))
    else:
        tokens = adapmixed_ext.sample(p, public, rng=Source(seed)).tolist()
        assert [b for b, token in enumerate(tokens) if token < 0] == [bad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "positions,vocab", [(400, 2), (400, 23), (60, 64), (60, 65), (60, 129), (8, 8200), (3, 50_257)]
)
def test_sample_draws_exactly_by_the_stream(positions: int, vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(13)
    p = torch.softmax(6 * torch.randn(positions, vocab, generator=generator).double(), -1)
    public = torch.randn(positions, vocab, generator=generator).to(dtype)
    public[:, 5::11] = -math.inf
    p[:, 5::22] = 0.0  # the other masked tokens keep probability, which must not count
    p[:, 7::16] *= 2.0**-99
    p[0], public[0] = 0.0, -math.inf  # a token with q > 0 and hardly any probability is drawn
    p[0, 0], p[0, 1], public[0, 1] = 1.0, 2.0**-60, 0.0
    p /= p.sum(-1, keepdim=True)
    expected = drawn_by_hand(p, public, bytes(Source(14).key.tolist()), 2**32 + 7)
    for isa in ISAS:
        assert _C.use_instruction_set(isa)
        tokens = adapmixed_ext.sample(p, public, rng=Source(14, 2**32 + 7))
        assert tokens.tolist() == expected, isa


def few_units(shares: list[float], vocab: int) -> tuple[Tensor, Tensor]:
    """Return a row with all mass on q = 0, and `shares` of UNIT spread over the rest."""
    at = [(k + 1) * (vocab // (len(shares) + 1)) for k in range(len(shares))]
    p = torch.zeros(vocab, dtype=torch.float64)
    p[0], p[at] = 1.0, UNIT * torch.tensor(shares, dtype=torch.float64)
    public = torch.full((vocab,), -math.inf)
    public[at] = -80.0
    return p, public


@pytest.mark.parametrize("vocab", [9, 12, 37])
def test_tokens_are_drawn_in_proportion(vocab: int, path: torch.device) -> None:
    """Of the longest rows integers decide; of the others, a few units with their fractions do."""
    draws, shares = 40_000, [0.0, 1e-10, 0.5, 1.0, 1.75, 2.0, 3.5, 20.25]
    if vocab == 37:
        generator = torch.Generator().manual_seed(8)
        shares = (2.5 * torch.randn(vocab, generator=generator)).exp().tolist()
        p, public = torch.tensor(shares).double() / sum(shares), torch.zeros(vocab)
    else:
        p, public = few_units(shares, vocab)
    at = (public > -math.inf).nonzero().flatten().tolist()
    rows = (t.expand(draws, vocab).to(path) for t in (p, public))
    tokens = adapmixed_ext.sample(*rows, rng=Source(17))
    assert tokens.dtype == torch.int64 and tokens.shape == (draws,)
    seen = Counter(at.index(token) for token in tokens.tolist())
    statistic, freedom = chi_square(seen, [w / sum(shares) for w in shares], draws)
    assert freedom >= 5 and statistic < freedom + 4 * math.sqrt(2 * freedom), statistic


@pytest.mark.parametrize("share", [0.0, 19.0])
def test_a_row_without_mass_on_the_public_support_is_refused(
    share: float, device: torch.device
) -> None:
    """Below 2 V units there is too little mass to draw from; from there on, tokens are drawn."""
    vocab = 10
    p, public = few_units([share], vocab)
    rows = torch.stack([torch.full_like(p, 1 / vocab), p]).to(device)
    publics = torch.stack([torch.zeros(vocab), public]).to(device)
    message = r"probabilities\[1\] must sum to V 2\^-99 or more where q"
    check_refused(rows, publics, 1, 1, message)
    p[p == share * UNIT] = 0.0
    p[5] = 2 * vocab * UNIT
    assert adapmixed_ext.sample(
        p[None].to(device), public[None].to(device), rng=Source(1)
    ).tolist() == [5]


@pytest.mark.parametrize(
    "row",
    [[0.5, math.nan], [0.5, 0.4], [1.5, -0.5], [0, 0], [math.inf, 0], [1, 2e-6], [1, -5e-324]],
)
@pytest.mark.parametrize("vocab", [2, 777])
def test_what_is_no_distribution_is_refused(
    row: list[float], vocab: int, device: torch.device
) -> None:
    """Bad values are found in any lane, also the last and the incomplete one."""
    p = torch.zeros(2, vocab, dtype=torch.float64)
    p[0, :2] = 0.5
    p[1, -2:] = torch.tensor(row, dtype=torch.float64)
    public = torch.zeros(2, vocab, device=device)
    for isa in ISAS:
        assert _C.use_instruction_set(isa)
        for rows in (p, p.flip(-1)):
            check_refused(rows.to(device), public, 16, 1, r"probabilities.*1")
