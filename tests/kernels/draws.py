"""A fixed source of random numbers, and the sampler's distribution rebuilt from its stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, count

import torch
from torch import Tensor

from adapmixed_ext import _C, reference

UNIT = 2.0**-100  # the unit of the integers that select a token first
FRACTION_BITS = 974  # a fraction of that unit is counted in 2^-1074


class FixedRng:
    """A random source that hands out one key, and the next counter at each call."""

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
    """Yield every instruction set of this machine, and use it while the caller's loop runs."""
    for isa in ("scalar", "avx2", "avx512"):
        if _C.use_instruction_set(isa):
            yield isa


def chi_square(observed: Counter[int], p: list[float], draws: int) -> tuple[float, int]:
    """Return (statistic, degrees of freedom); cells with fewer than 5 expected draws are pooled."""
    cells = [(observed[v], draws * w) for v, w in enumerate(p) if draws * w >= 5]
    rest = (draws - sum(o for o, _ in cells), draws - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    return sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1


def drawn_by_hand(p: Tensor, public: Tensor, key: bytes, counter: int) -> list[int]:
    """Return one token per row: the first whose cumulative weight exceeds the number drawn."""
    tokens = []
    for b, weights in enumerate(reference.sampling_weights(p, public)):
        number = uniform_below(key, counter, b, weights)
        tokens.append(next(v for v, end in enumerate(accumulate(weights)) if number < end))
    return tokens


def uniform_below(key: bytes, counter: int, lane: int, weights: list[int]) -> int:
    """Return a random number below the total of the weights, in units of 2^-1074.

    Its integer part, in units of 2^-100, is a 128-bit word. The word is masked to the width of 1.5
    times the sum of the weights' integer parts. Its fraction comes from two further blocks. A
    number at or above the total is rejected, and the next one is tried.
    """
    nonce = counter.to_bytes(8, "little") + lane.to_bytes(4, "little")
    whole = sum(weight >> FRACTION_BITS for weight in weights)
    mask = (1 << (whole - 1 + whole // 2).bit_length()) - 1
    total = sum(weights)
    for number in count():
        stream, at = block(key, number // 4, nonce), number % 4 * 16
        draw = int.from_bytes(stream[at : at + 16], "little") & mask
        words = b"".join(block(key, 2**31 + 2 * number + k, nonce) for k in range(2))
        fraction = int.from_bytes(words, "little") % 2**FRACTION_BITS
        if draw << FRACTION_BITS | fraction < total:
            return draw << FRACTION_BITS | fraction
    raise AssertionError


def open_rows(positions: int, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return probabilities for which integers of 2^-100 hardly ever decide the token.

    All mass is on a token with q = 0. The others have a few such units, less, 0, or the least a
    double can hold.
    """
    shares = 5 + 9 * torch.rand(positions, vocab - 1, generator=generator, dtype=torch.float64)
    shares[:, 2::7] *= 2.0**-300
    shares[:, 3::7] = 0.0
    shares[:, 4::7] *= 2.0**-974
    p = torch.cat([torch.ones(positions, 1, dtype=torch.float64), UNIT * shares], 1)
    public = torch.zeros(positions, vocab)
    public[:, 0] = -torch.inf
    return p, public
