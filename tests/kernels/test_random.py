"""gaussian and sample, at fixed seeds; the generator beneath them is test_chacha.py's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import mpmath
import pytest
import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C, reference


class FixedRng:
    """The rng protocol: a key and, at each call, the next counter."""

    seeded = True

    def __init__(self, seed: int = 0, counter: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.key = torch.randint(0, 256, (32,), generator=generator, dtype=torch.uint8)
        self.counter = counter

    def reserve(self) -> tuple[Tensor, int]:
        self.counter += 1
        return self.key, self.counter - 1


def block(key: bytes, counter: int, nonce: bytes) -> bytes:
    return _C.chacha20_block(key, counter, nonce)


def instruction_sets() -> Iterator[str]:
    """Every one that this machine has, in use while the caller's loop runs."""
    for isa in ("scalar", "avx2", "avx512"):
        if _C.use_instruction_set(isa):
            yield isa


def kolmogorov(x: Tensor) -> float:
    """sqrt(n) times the distance from the uniform law on [0, 1]."""
    n, cdf = x.numel(), x.sort().values
    grid = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = torch.maximum((cdf - grid).abs().max(), (cdf - grid + 1 / n).abs().max())
    return distance.item() * math.sqrt(n)


def test_gaussian_is_normal(device: torch.device) -> None:
    """Kolmogorov-Smirnov and moments of 400 000 variates, at 5 standard errors."""
    count = 400_000
    x = adapmixed_ext.gaussian((count,), sigma=1.0, rng=FixedRng(1)).to(device).cpu()
    assert x.dtype == torch.float64 and x.shape == (count,) and torch.isfinite(x).all()
    assert kolmogorov(torch.special.ndtr(x)) < 1.95  # p = 0.001
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = (x**power).mean().item() - moment
        assert abs(error) < 5 * math.sqrt(variance / count), power
    tail = (x.abs() > 4).sum().item()
    assert 8 <= tail <= 50  # 25.3 expected
    # Neighbours share a block and a Box-Muller pair: neither they nor their squares correlate.
    for lag in (1, 2, 4, 8):
        for y in (x, x**2 - 1):
            correlation = (y[lag:] * y[:-lag]).mean().item() / y.var().item()
            assert abs(correlation) < 5 / math.sqrt(count), lag
    # A pair is a point of the plane: exp(-radius^2 / 2) and angle are uniform and independent.
    u = torch.exp(-(x[::2] ** 2 + x[1::2] ** 2) / 2)
    turn = torch.atan2(x[1::2], x[::2]) / (2 * math.pi) + 0.5
    assert kolmogorov(u) < 1.95 and kolmogorov(turn) < 1.95
    cells = Counter((64 * (64 * u).long() + (64 * turn).long() % 64).tolist())
    statistic, freedom = chi_square(cells, [1 / 4096] * 4096, count // 2)
    assert freedom == 4095 and statistic < freedom + 4 * math.sqrt(2 * freedom)


def words_of(rng: FixedRng, count: int) -> list[int]:
    """The first 64-bit words of the next call's stream, one block at a time."""
    nonce = rng.counter.to_bytes(8, "little") + bytes(4)
    stream = b"".join(block(bytes(rng.key.tolist()), k, nonce) for k in range(-(-count // 8)))
    return [int.from_bytes(stream[8 * k : 8 * k + 8], "little") for k in range(count)]


def test_gaussian_is_the_same_on_every_path() -> None:
    """Bit for bit: the scalar pair of two words, every instruction set, every thread count."""
    rng = FixedRng(6, counter=2**40 + 3)
    words = words_of(rng, 20_002)
    pairs = [_C.normal_pair(*words[k : k + 2]) for k in range(0, len(words), 2)]
    expected = torch.tensor(pairs, dtype=torch.float64).flatten()
    for isa in instruction_sets():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for count in (1, 7, 8, 9, 31, 33, 60, 64, 65, 127, 128, 129, 8191, 8193, 20_001):
                again = FixedRng(6, counter=2**40 + 3)
                got = adapmixed_ext.gaussian((count,), sigma=1.0, rng=again)
                assert torch.equal(got, expected[:count]), (isa, threads, count)


def test_normal_pairs_are_accurate() -> None:
    """Box-Muller of the upper 53 bits against mpmath, at the ends and the quarter turns too."""
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
        one = adapmixed_ext.gaussian(shape, sigma=1.0, rng=FixedRng(2))
        small = adapmixed_ext.gaussian(shape, sigma=0.01, rng=FixedRng(2))
        assert one.shape == shape
        torch.testing.assert_close(small, 0.01 * one, rtol=1e-15, atol=0.0)
    assert (adapmixed_ext.gaussian((4,), sigma=0.0, rng=FixedRng(2)) == 0).all()


def test_gaussian_never_repeats_across_calls_or_keys() -> None:
    rng = FixedRng(3)
    first, second = (adapmixed_ext.gaussian((1000,), sigma=1.0, rng=rng) for _ in range(2))
    other = adapmixed_ext.gaussian((1000,), sigma=1.0, rng=FixedRng(4))
    high = adapmixed_ext.gaussian((1000,), sigma=1.0, rng=FixedRng(3, counter=2**32))
    draws = torch.cat([first, second, other, high])
    assert draws.unique().numel() == 4000
    again = adapmixed_ext.gaussian((1000,), sigma=1.0, rng=FixedRng(3))
    assert torch.equal(first, again)


def test_gaussian_of_a_longer_shape_continues_a_shorter_one() -> None:
    long = adapmixed_ext.gaussian((5000,), sigma=1.0, rng=FixedRng(5))
    for count in (1, 7, 8, 9, 4999):
        short = adapmixed_ext.gaussian((count,), sigma=1.0, rng=FixedRng(5))
        assert torch.equal(short, long[:count])


def chi_square(observed: Counter[int], p: list[float], draws: int) -> tuple[float, int]:
    """Cells with fewer than 5 expected draws are pooled."""
    cells = [(observed[v], draws * w) for v, w in enumerate(p) if draws * w >= 5]
    rest = (draws - sum(o for o, _ in cells), draws - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    return sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1


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
    for _ in range(4000):
        first = adapmixed_ext.sample(p, public, rng=rng).item()
        second = adapmixed_ext.sample(p, public, rng=rng).item()
        pairs[2 * int(first) + int(second)] += 1
    statistic, _ = chi_square(pairs, [0.25] * 4, 4000)
    assert statistic < 16.3  # p = 0.001 at 3 degrees of freedom


def test_tokens_outside_the_public_support_are_never_drawn(device: torch.device) -> None:
    """Even where a caller hands over probability on such a token: q decides the support."""
    public = torch.tensor([-math.inf, 0.0, -math.inf, -50.0, -math.inf])
    p = torch.tensor([0.3, 0.4, 0.1, 0.2, 0.0], dtype=torch.float64)
    tokens = adapmixed_ext.sample(
        p.expand(5000, 5).to(device), public.expand(5000, 5).to(device), rng=FixedRng(11)
    )
    assert set(tokens.tolist()) == {1, 3}
    # ... nor at either end of a row, nor where it is the only token with probability 1.
    edge = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    ends = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert adapmixed_ext.sample(edge.to(device), ends.to(device), rng=FixedRng(12)).item() == 1


def test_rare_tokens_keep_a_weight() -> None:
    """A token with q > 0 can be drawn whatever its probability rounds to; one with q = 0 cannot."""
    public = torch.tensor([[0.0, -90.0, -3e4, -math.inf]])
    for p in ([1.0, 0.0, 0.0, 0.0], [1.0, 1e-40, 5e-324, 0.0], [1.0, 1e-25, 1e-30, 0.5]):
        weights = reference.sampling_weights(torch.tensor([p], dtype=torch.float64), public)[0]
        assert all(w >= 1 for w in weights[:3]) and weights[3] == 0


def drawn_by_hand(p: Tensor, public: Tensor, key: bytes, counter: int) -> list[int]:
    """Rebuilt from the stream: 128-bit words, masked to the width of 1.5 times the total, rejected
    beyond the total, then the first token whose cumulative weight exceeds the draw."""
    tokens = []
    for b, weights in enumerate(reference.sampling_weights(p, public)):
        draw, token = uniform_below(key, counter, b, sum(weights)), 0
        while draw >= weights[token]:
            draw -= weights[token]
            token += 1
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "positions,vocab", [(400, 1), (400, 23), (60, 64), (60, 65), (60, 129), (8, 8200), (3, 50_257)]
)
def test_sample_draws_exactly_the_integer_law(
    positions: int, vocab: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(13)
    p = torch.softmax(6 * torch.randn(positions, vocab, generator=generator).double(), -1)
    public = torch.randn(positions, vocab, generator=generator).to(dtype)
    public[:, 5::11] = -math.inf
    p[:, 5::22] = 0.0  # the other masked tokens keep a probability that must not count
    p[:, 7::16] *= 2.0**-99
    p /= p.sum(-1, keepdim=True)
    counter = 2**32 + 7
    expected = drawn_by_hand(p, public, bytes(FixedRng(14).key.tolist()), counter)
    for isa in instruction_sets():
        tokens = adapmixed_ext.sample(p, public, rng=FixedRng(14, counter=counter))
        assert tokens.tolist() == expected, isa


def test_no_token_with_q_above_0_is_lost(device: torch.device) -> None:
    """With all the mass where q = 0, what is left are weights of a few units: 1 for each that
    rounds to 0, floor(p 2^100) for the others."""
    units = [0.0, 5e-324, 1e-40, 2.0**-101, 2.0**-100, 1.75 * 2.0**-100, 2.0**-99, 3.5 * 2.0**-100]
    weights = [1, 1, 1, 1, 1, 1, 2, 3]
    draws = 20_000
    for vocab in (9, 900):
        at = [(k + 1) * (vocab // 9) for k in range(8)]
        p = torch.zeros(vocab, dtype=torch.float64)
        p[0], p[at] = 1.0, torch.tensor(units, dtype=torch.float64)
        public = torch.full((vocab,), -math.inf)
        public[at] = -80.0
        for isa in instruction_sets():
            rows = (t.expand(draws, vocab).to(device) for t in (p, public))
            tokens = adapmixed_ext.sample(*rows, rng=FixedRng(17))
            seen = Counter(at.index(token) for token in tokens.tolist())
            statistic, freedom = chi_square(seen, [w / 11 for w in weights], draws)
            assert freedom == 7 and statistic < 24.3, (vocab, isa)  # p = 0.001


def uniform_below(key: bytes, counter: int, lane: int, total: int) -> int:
    nonce = counter.to_bytes(8, "little") + lane.to_bytes(4, "little")
    mask = (1 << (total - 1 + total // 2).bit_length()) - 1
    for index in range(100):
        stream = block(key, index, nonce)
        for start in range(0, 64, 16):
            draw = int.from_bytes(stream[start : start + 16], "little") & mask
            if draw < total:
                return draw
    raise AssertionError("a hundred blocks were rejected")


def test_sample_of_one_token_and_of_nothing(device: torch.device) -> None:
    one = torch.ones(3, 1, dtype=torch.float64, device=device)
    public = torch.zeros(3, 1, device=device)
    assert adapmixed_ext.sample(one, public, rng=FixedRng(15)).tolist() == [0, 0, 0]
    none = torch.zeros(0, 4, dtype=torch.float64, device=device)
    tokens = adapmixed_ext.sample(none, torch.zeros(0, 4, device=device), rng=FixedRng(15))
    assert tokens.shape == (0,) and tokens.dtype == torch.int64


@pytest.mark.parametrize(
    "row",
    [[0.5, math.nan], [0.5, 0.4], [1.5, -0.5], [0, 0], [math.inf, 0], [1, 2e-6], [1, -5e-324]],
)
@pytest.mark.parametrize("vocab", [2, 777])
def test_what_is_no_distribution_is_refused(
    row: list[float], vocab: int, device: torch.device
) -> None:
    """In any lane, the last and incomplete ones included."""
    p = torch.zeros(2, vocab, dtype=torch.float64)
    p[0, :2] = 0.5
    p[1, -2:] = torch.tensor(row, dtype=torch.float64)
    public = torch.zeros(2, vocab, device=device)
    for _ in instruction_sets():
        for rows in (p, p.flip(-1)):
            with pytest.raises(ValueError, match=r"probabilities.*1"):
                adapmixed_ext.sample(rows.to(device), public, rng=FixedRng(16))
