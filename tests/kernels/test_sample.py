"""sample at fixed seeds: tokens are drawn exactly in proportion to the float64 probabilities."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from draws import UNIT, FixedRng, chi_square, drawn_by_hand, instruction_sets, open_rows
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import reference


def check_refused(p: Tensor, public: Tensor, seed: int, bad: int, message: str) -> None:
    """Check that row ``bad`` is refused, by an error or, where calls only queue work, by -1."""
    if p.device.type == "cpu":
        with pytest.raises(ValueError, match=message):
            adapmixed_ext.sample(p, public, rng=FixedRng(seed))
    else:
        tokens = adapmixed_ext.sample(p, public, rng=FixedRng(seed)).tolist()
        assert [b for b, token in enumerate(tokens) if token < 0] == [bad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sample_follows_the_probabilities(dtype: torch.dtype, device: torch.device) -> None:
    draws, vocab = 40_000, 37
    generator = torch.Generator().manual_seed(8)
    p = torch.softmax(2.5 * torch.randn(vocab, generator=generator, dtype=torch.float64), -1)
    public = torch.zeros(vocab, dtype=dtype)
    tokens = adapmixed_ext.sample(
        p.expand(draws, vocab).to(device), public.expand(draws, vocab).to(device), rng=FixedRng(9)
    )
    assert tokens.dtype == torch.int64 and tokens.shape == (draws,)
    statistic, freedom = chi_square(Counter(tokens.tolist()), p.tolist(), draws)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), statistic


def test_calls_are_independent(device: torch.device) -> None:
    p = torch.tensor([[0.5, 0.5]], dtype=torch.float64, device=device)
    rng, pairs = FixedRng(10), Counter()
    public = torch.zeros(1, 2, device=device)
    for _ in range(1000):
        first = adapmixed_ext.sample(p, public, rng=rng).item()
        second = adapmixed_ext.sample(p, public, rng=rng).item()
        pairs[2 * int(first) + int(second)] += 1
    statistic, _ = chi_square(pairs, [0.25] * 4, 1000)
    assert statistic < 16.3  # p = 0.001 at 3 degrees of freedom


def test_tokens_outside_the_public_support_are_never_drawn(device: torch.device) -> None:
    """The support of q decides, even if a caller gives such a token probability."""
    public = torch.tensor([-math.inf, 0.0, -math.inf, -50.0, -math.inf])
    p = torch.tensor([0.3, 0.4, 0.1, 0.2, 0.0], dtype=torch.float64)
    tokens = adapmixed_ext.sample(
        p.expand(5000, 5).to(device), public.expand(5000, 5).to(device), rng=FixedRng(11)
    )
    assert set(tokens.tolist()) == {1, 3}
    # Also at either end of a row, and if the token has all but 2^-60 of the probability.
    edge = torch.tensor([[1.0, 2.0**-60, 0.0]], dtype=torch.float64)
    ends = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert adapmixed_ext.sample(edge.to(device), ends.to(device), rng=FixedRng(12)).item() == 1


def test_rare_tokens_keep_a_weight() -> None:
    """A token with q > 0 can be drawn even if p rounds to 0; one with q = 0 cannot."""
    public = torch.tensor([[0.0, -90.0, -3e4, -math.inf]])
    for p in ([1.0, 0.0, 0.0, 0.0], [1.0, 1e-40, 5e-324, 0.0], [1.0, 1e-25, 1e-30, 0.5]):
        weights = reference.sampling_weights(torch.tensor([p], dtype=torch.float64), public)[0]
        assert all(w >= 1 for w in weights[:3]) and weights[3] == 0
        exact = [Fraction(w, 2**1074) for w in weights]
        assert [x for x in exact[:3] if x > 5e-324] == [x for x in p[:3] if x > 5e-324]


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
    p /= p.sum(-1, keepdim=True)
    check_against_the_stream(p, public, 2**32 + 7)


def check_against_the_stream(p: Tensor, public: Tensor, counter: int) -> list[int]:
    expected = drawn_by_hand(p, public, bytes(FixedRng(14).key.tolist()), counter)
    for isa in instruction_sets():
        tokens = adapmixed_ext.sample(p, public, rng=FixedRng(14, counter=counter))
        assert tokens.tolist() == expected, isa
    return expected


def few_units(shares: list[float], vocab: int) -> tuple[Tensor, Tensor]:
    """Return a row with all mass on q = 0, and `shares` of UNIT spread over the rest."""
    at = [(k + 1) * (vocab // (len(shares) + 1)) for k in range(len(shares))]
    p = torch.zeros(vocab, dtype=torch.float64)
    p[0], p[at] = 1.0, UNIT * torch.tensor(shares, dtype=torch.float64)
    public = torch.full((vocab,), -math.inf)
    public[at] = -80.0
    return p, public


def test_what_integers_leave_open_is_decided_by_the_fraction() -> None:
    """If a row has a few hundred units in all, integers alone hardly ever decide a draw."""
    generator = torch.Generator().manual_seed(3)
    for vocab in (10, 65, 301):
        check_against_the_stream(*open_rows(400, vocab, generator), 5)


def test_units_are_drawn_in_proportion_to_their_fractions(device: torch.device) -> None:
    shares = [0.0, 1e-10, 0.5, 1.0, 1.75, 2.0, 3.5, 20.25]
    draws, total = 20_000, sum(shares)
    for vocab in (9, 12):
        p, public = few_units(shares, vocab)
        at = (public > -math.inf).nonzero().flatten().tolist()
        for isa in instruction_sets():
            rows = (t.expand(draws, vocab).to(device) for t in (p, public))
            tokens = adapmixed_ext.sample(*rows, rng=FixedRng(17))
            seen = Counter(at.index(token) for token in tokens.tolist())
            statistic, freedom = chi_square(seen, [w / total for w in shares], draws)
            assert freedom == 5 and statistic < 20.5, (vocab, isa)  # p = 0.001


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
        p[None].to(device), public[None].to(device), rng=FixedRng(1)
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
    for _ in instruction_sets():
        for rows in (p, p.flip(-1)):
            check_refused(rows.to(device), public, 16, 1, r"probabilities.*1")
