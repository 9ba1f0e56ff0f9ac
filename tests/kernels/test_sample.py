"""gaussian and sample at fixed seeds, from the words of ChaCha20 to the last bit.

The generator is compared with RFC 8439, normals with Box-Muller of its words, pair by pair. Tokens
are drawn exactly in proportion to the float64 probabilities.
"""

from __future__ import annotations

import math
from collections import Counter

import mpmath
import pytest
import torch
from oracle import drawn_by_hand
from plans import Source
from torch import Tensor
from workload import ISAS

import adapmixed_ext
from adapmixed_ext import _C

KEY = bytes(range(32))


def keystream(key: bytes, nonce: bytes, block: int, size: int) -> bytes:
    """Return `size` bytes of keystream, in the terms of the RFC.

    The nonce is a 64-bit counter followed by a 32-bit lane.
    """
    counter, lane = int.from_bytes(nonce[:8], "little"), int.from_bytes(nonce[8:], "little")
    return _C.keystream(key, counter, lane << 32 | block, -(-size // 64))[:size]


# (key, nonce, block counter, keystream): section 2.3.2, then appendix A.1, vectors 1 to 5.
BLOCKS = [
    (
        KEY.hex(), "000000090000004a00000000", 1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        "00" * 32, "00" * 12, 0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32, "00" * 12, 1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (  # a nonce and a counter with their highest bits
        KEY.hex(), "efcdab8967452301fdffffff", 0xFFFFFFFE,
        "94a6058e3bc6b61ba7d735c9963980cc9d25a3deaccd0767369609be3510055b"
        "7a0aa85c57e9b9b361771dbdb372e4194c50944c187f463c5202995fb52710d3",
    ),
    (
        "00" * 31 + "01", "00" * 12, 1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30, "00" * 12, 2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        "00" * 32, "00" * 11 + "02", 0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]  # fmt: skip


@pytest.mark.parametrize("key,nonce,block,expected", BLOCKS)
def test_rfc_8439_blocks(key: str, nonce: str, block: int, expected: str, isa: str) -> None:
    assert keystream(bytes.fromhex(key), bytes.fromhex(nonce), block, 64).hex() == expected


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 15, 16, 17, 33, 100])
def test_many_blocks_are_single_blocks(count: int, isa: str) -> None:
    """Block k of a call is block k mod 2^32 of lane k / 2^32.

    A group of blocks may cross the end of a lane, and neither part may wrap around.
    """
    counter = 0x0123456789ABCDEF
    lanes = [
        (lane << 32) - before for lane in (1, 2**31, 2**32 - 1) for before in (1, 4, 8, 15, 16)
    ]
    for first in (0, 5, 2**31 - 3, *lanes):
        got = _C.keystream(KEY, counter, first, count)
        blocks = [_C.keystream(KEY, counter, k, 1) for k in range(first, first + count)]
        assert got == b"".join(blocks), first
        assert len(set(blocks)) == count


def test_what_is_no_key_or_count_is_refused() -> None:
    for key, count in ((bytes(31), 1), (bytes(33), 1), (bytes(32), -1)):
        with pytest.raises(ValueError):
            _C.keystream(key, 0, 0, count)


def words_of(rng: Source, count: int) -> list[int]:
    """Return the first 64-bit words of the next call's stream, computed one block at a time."""
    key, blocks = bytes(rng.key.tolist()), range(-(-count // 8))
    stream = b"".join(_C.keystream(key, rng.counter, k, 1) for k in blocks)
    return [int.from_bytes(stream[8 * k : 8 * k + 8], "little") for k in range(count)]


def test_gaussian_is_the_same_on_every_path(path: torch.device) -> None:
    """All instruction sets, thread counts and devices give the bits of the scalar code."""
    rng = Source(6)
    words = words_of(rng, 20_002)
    pairs = [_C.normal_pair(*words[k : k + 2]) for k in range(0, len(words), 2)]
    expected = torch.tensor(pairs, dtype=torch.float64).flatten()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (1, 7, 8, 9, 31, 33, 60, 64, 65, 127, 128, 129, 8191, 8193, 20_001):
            got = adapmixed_ext.gaussian((count,), sigma=1.0, rng=Source(6), device=path)
            assert got.device.type == path.type
            assert torch.equal(got.cpu(), expected[:count]), (threads, count)


def test_normal_pairs_are_accurate() -> None:
    """Box-Muller of the upper 53 bits matches mpmath, also at the ends and quarter turns."""
    edges = [n << 61 for n in range(8)]
    edges = [w for e in edges for w in (e, e + 2**11, (e - 2**11) % 2**64)]
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(-(2**63), 2**63 - 1, (600,), generator=generator).tolist()
    words = [w % 2**64 for w in drawn]
    pairs = [(a, b) for a in edges for b in edges] + list(zip(words[::2], words[1::2], strict=True))
    with mpmath.workdps(40):
        for a, b in pairs:
            u, v = mpmath.mpf((a >> 11) + 1) / 2**53, mpmath.mpf(b >> 11) / 2**53
            radius = mpmath.sqrt(-2 * mpmath.log(u))
            exact = radius * mpmath.cospi(2 * v), radius * mpmath.sinpi(2 * v)
            for got, value in zip(_C.normal_pair(a, b), exact, strict=True):
                assert abs(got - value) <= 1e-15 * abs(value), (a, b)
    assert _C.normal_pair(0, 0) == (pytest.approx(8.5717, abs=1e-4), 0.0)


def test_gaussian_scales_and_shapes() -> None:
    for shape in ((), (1,), (3, 5), (2, 0), (7, 1, 9)):
        unit = adapmixed_ext.gaussian(shape, sigma=1.0, rng=Source(2))
        small = adapmixed_ext.gaussian(shape, sigma=0.01, rng=Source(2))
        assert unit.shape == shape
        torch.testing.assert_close(small, 0.01 * unit, rtol=1e-15, atol=0.0)
    assert (adapmixed_ext.gaussian((4,), sigma=0.0, rng=Source(2)) == 0).all()


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
def test_sample_draws_exactly_by_the_stream(
    positions: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
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
        tokens = adapmixed_ext.sample(p.to(device), public.to(device), rng=Source(14, 2**32 + 7))
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
