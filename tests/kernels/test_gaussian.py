"""gaussian: Box-Muller of the words that test_chacha.py tests, pair by pair, to the last bit."""

from __future__ import annotations

import mpmath
import pytest
import torch
from cases import Source
from workload import ISAS

import adapmixed_ext
from adapmixed_ext import _C


def words_of(rng: Source, count: int) -> list[int]:
    """Return the first 64-bit words of the next call's stream, computed one block at a time."""
    key, blocks = bytes(rng.key.tolist()), range(-(-count // 8))
    stream = b"".join(_C.keystream(key, rng.counter, k, 1) for k in blocks)
    return [int.from_bytes(stream[8 * k : 8 * k + 8], "little") for k in range(count)]


def test_gaussian_is_the_same_on_every_path() -> None:
    """All instruction sets and thread counts give the bits of the scalar code."""
    rng = Source(6)
    words = words_of(rng, 20_002)
    pairs = [_C.normal_pair(*words[k : k + 2]) for k in range(0, len(words), 2)]
    expected = torch.tensor(pairs, dtype=torch.float64).flatten()
    for isa in ISAS:
        assert _C.use_instruction_set(isa)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for count in (1, 7, 8, 9, 31, 33, 60, 64, 65, 127, 128, 129, 8191, 8193, 20_001):
                again = Source(6)
                got = adapmixed_ext.gaussian((count,), sigma=1.0, rng=again)
                assert torch.equal(got, expected[:count]), (isa, threads, count)


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
        one = adapmixed_ext.gaussian(shape, sigma=1.0, rng=Source(2))
        small = adapmixed_ext.gaussian(shape, sigma=0.01, rng=Source(2))
        assert one.shape == shape
        torch.testing.assert_close(small, 0.01 * one, rtol=1e-15, atol=0.0)
    assert (adapmixed_ext.gaussian((4,), sigma=0.0, rng=Source(2)) == 0).all()
