"""gaussian at fixed seeds; test_chacha.py tests the generator."""

from __future__ import annotations

import math
from collections import Counter

import mpmath
import pytest
import torch
from cases import Source
from test_sample import chi_square
from torch import Tensor
from workload import ISAS

import adapmixed_ext
from adapmixed_ext import _C


def kolmogorov(x: Tensor) -> float:
    """Return sqrt(n) times the distance from the uniform distribution on [0, 1]."""
    n, cdf = x.numel(), x.sort().values
    grid = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = torch.maximum((cdf - grid).abs().max(), (cdf - grid + 1 / n).abs().max())
    return distance.item() * math.sqrt(n)


def test_gaussian_is_normal(device: torch.device) -> None:
    """400 000 variates pass Kolmogorov-Smirnov, with moments right within 5 standard errors."""
    count = 400_000
    x = adapmixed_ext.gaussian((count,), sigma=1.0, rng=Source(1)).to(device).cpu()
    assert x.dtype == torch.float64 and x.shape == (count,) and torch.isfinite(x).all()
    assert kolmogorov(torch.special.ndtr(x)) < 1.95  # p = 0.001
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = (x**power).mean().item() - moment
        assert abs(error) < 5 * math.sqrt(variance / count), power
    tail = (x.abs() > 4).sum().item()
    assert 8 <= tail <= 50  # 25.3 expected
    # Neighbours share a block and a Box-Muller pair, and must not correlate, nor their squares.
    for lag in (1, 2, 4, 8):
        for y in (x, x**2 - 1):
            correlation = (y[lag:] * y[:-lag]).mean().item() / y.var().item()
            assert abs(correlation) < 5 / math.sqrt(count), lag
    # A pair is a point of the plane: exp(-radius^2 / 2) and its angle are independent and uniform.
    u = torch.exp(-(x[::2] ** 2 + x[1::2] ** 2) / 2)
    turn = torch.atan2(x[1::2], x[::2]) / (2 * math.pi) + 0.5
    assert kolmogorov(u) < 1.95 and kolmogorov(turn) < 1.95
    cells = Counter((64 * (64 * u).long() + (64 * turn).long() % 64).tolist())
    statistic, freedom = chi_square(cells, [1 / 4096] * 4096, count // 2)
    assert freedom == 4095 and statistic < freedom + 4 * math.sqrt(2 * freedom)


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


def test_gaussian_never_repeats_across_calls_or_keys() -> None:
    rng = Source(3, 0, step=1)
    first, second = (adapmixed_ext.gaussian((1000,), sigma=1.0, rng=rng) for _ in range(2))
    other = adapmixed_ext.gaussian((1000,), sigma=1.0, rng=Source(4))
    high = adapmixed_ext.gaussian((1000,), sigma=1.0, rng=Source(3, 2**32))
    draws = torch.cat([first, second, other, high])
    assert draws.unique().numel() == 4000
    again = adapmixed_ext.gaussian((1000,), sigma=1.0, rng=Source(3, 0))
    assert torch.equal(first, again)
