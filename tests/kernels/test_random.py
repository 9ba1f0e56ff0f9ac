"""gaussian, sample and the generator beneath them, at fixed seeds."""

from __future__ import annotations

import math
from collections import Counter

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


def test_rfc_8439_block_function() -> None:
    """Section 2.3.2."""
    out = block(bytes(range(32)), 1, bytes.fromhex("000000090000004a00000000"))
    assert out.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize(
    "key_end,counter,nonce_end,start",
    [
        (0, 0, 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"),
        (0, 1, 0, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"),
        (1, 1, 0, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"),
        (0, 0, 2, "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"),
    ],
)
def test_rfc_8439_appendix(key_end: int, counter: int, nonce_end: int, start: str) -> None:
    """Appendix A.1, test vectors 1, 2, 3 and 5."""
    key, nonce = bytes(31) + bytes([key_end]), bytes(11) + bytes([nonce_end])
    assert block(key, counter, nonce).hex().startswith(start)


def test_gaussian_is_normal(device: torch.device) -> None:
    """Kolmogorov-Smirnov and moments of 400 000 variates, at 5 standard errors."""
    count = 400_000
    x = adapmixed_ext.gaussian((count,), sigma=1.0, rng=FixedRng(1)).to(device).cpu()
    assert x.dtype == torch.float64 and x.shape == (count,) and torch.isfinite(x).all()
    cdf = torch.special.ndtr(x.sort().values)
    grid = torch.arange(1, count + 1, dtype=torch.float64) / count
    distance = torch.maximum((cdf - grid).abs().max(), (cdf - grid + 1 / count).abs().max())
    assert distance.item() < 1.95 / math.sqrt(count)  # p = 0.001
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


def test_sample_draws_exactly_the_integer_law() -> None:
    """Rebuilt from the stream: 128-bit words, masked to the total's width, rejected beyond it, then
    the first token whose cumulative weight exceeds the draw."""
    generator = torch.Generator().manual_seed(13)
    positions, vocab = 200, 23
    p = torch.softmax(8 * torch.randn(positions, vocab, generator=generator).double(), -1)
    public = torch.randn(positions, vocab, generator=generator)
    public[:, 5] = -math.inf
    p[:, 5] = 0.0
    p /= p.sum(-1, keepdim=True)
    rng = FixedRng(14, counter=2**32 + 7)
    tokens = adapmixed_ext.sample(p, public, rng=rng)
    key = bytes(rng.key.tolist())
    weights = reference.sampling_weights(p, public)
    for b in range(positions):
        total = sum(weights[b])
        draw = uniform_below(key, 2**32 + 7, b, total)
        token = 0
        while draw >= weights[b][token]:
            draw -= weights[b][token]
            token += 1
        assert tokens[b].item() == token, b


def uniform_below(key: bytes, counter: int, lane: int, total: int) -> int:
    nonce = counter.to_bytes(8, "little") + lane.to_bytes(4, "little")
    mask = (1 << (total - 1).bit_length()) - 1
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
    "row", [[0.5, math.nan], [0.5, 0.4], [1.5, -0.5], [0.0, 0.0], [math.inf, 0.0]]
)
def test_what_is_no_distribution_is_refused(row: list[float], device: torch.device) -> None:
    good = [0.5, 0.5]
    p = torch.tensor([good, row], dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match=r"probabilities.*1"):
        adapmixed_ext.sample(p, torch.zeros(2, 2, device=device), rng=FixedRng(16))
