"""The sampler: does it draw the stated distribution, and never the same randomness twice?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path

import scipy  # it loads scipy.stats on its first use
import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom, SeededRandom
from adapmixed_ext.reference import sampling_weights
from adapmixed_ext.types import RandomSource
from adapmixed_lab.audit import Effort, Finding
from adapmixed_lab.audit.search import CONFIDENCE, chi_square, chi_square_limit

DRAWS_PER_SECOND = 100_000.0
CHUNK = 1 << 16
RARE, RARE_TOKENS = 2.0**-20, 256
UNIT = 2.0**-100  # of the integer weights that decide nearly every draw
UNITS = [0.25, 0.5, 1.0, 1.75, 2.0, 3.5, 4.25, 9.75]
"""Multiples of `UNIT` that whole units do not tell apart."""
RESERVED = 100  # (key, counter) pairs that are compared after a fork


def exact_shares(p: Tensor, public: Tensor) -> list[float]:
    """Return the distribution that the sampler must draw from, p/Σp over tokens with q > 0."""
    weights = sampling_weights(p[None], public[None])[0]
    total = sum(weights)
    return [float(Fraction(weight, total)) for weight in weights]


def drawn(p: Tensor, public: Tensor, draws: int, rng: RandomSource) -> list[int]:
    """Return how often each token of one row is drawn."""
    seen = torch.zeros(len(p), dtype=torch.int64)
    while draws > 0:
        chunk = min(draws, CHUNK)
        tokens = ops.sample(p.expand(chunk, -1), public.expand(chunk, -1), rng=rng)
        seen += torch.bincount(tokens, minlength=len(p))
        draws -= chunk
    return [int(count) for count in seen]


def _chi_square(
    name: str, counts: list[int], stated: list[float], control: bool = False
) -> Finding:
    held = [(count, share) for count, share in zip(counts, stated, strict=True) if share > 0]
    lost = sum(counts) - sum(count for count, _ in held)
    statistic, freedom = chi_square([c for c, _ in held], [s for _, s in held])
    return Finding(
        "sampler", name, f"χ² against the stated distribution, {freedom} degrees",
        chi_square_limit(freedom), math.inf if lost else statistic, CONFIDENCE, control,
    )  # fmt: skip


def _draws(effort: Effort) -> Iterator[Finding]:
    draws = effort.count(DRAWS_PER_SECOND, 20_000)
    generator = effort.generator("sampler/draws")
    p = torch.from_numpy(generator.dirichlet([0.3] * 40))
    public = torch.zeros(40)
    public[3::7] = -math.inf
    p = torch.where(public == 0, p, 0.0)
    p = p / p.sum()
    counts = drawn(p, public, draws, effort.source("sampler/chi"))
    yield _chi_square("40 tokens, 6 of them outside q", counts, exact_shares(p, public))
    # Probability where q = 0 does not count, so a few of the sampler's units are left.
    units = torch.tensor(UNITS, dtype=torch.float64)
    public = torch.tensor([-math.inf] + [-80.0] * len(units))
    small = exact_shares(torch.cat([torch.ones(1), UNIT * units]), public)
    for floored in (False, True):
        p = torch.cat([torch.ones(1), UNIT * (units.floor() if floored else units)]).double()
        counts = drawn(p, public, draws, effort.source(f"sampler/units{floored:d}"))
        name = "fractions of 2^-100 cut off" if floored else "fractions of 2^-100"
        yield _chi_square(name, counts, small, control=floored)
    # A control: drawn from one distribution, tested against another.
    biased = torch.tensor([0.26, 0.25, 0.25, 0.24], dtype=torch.float64)
    counts = drawn(biased, torch.zeros(4), draws, effort.source("sampler/control"))
    yield _chi_square("probabilities off by 4 %", counts, [0.25] * 4, control=True)


def _rare(effort: Effort) -> Iterator[Finding]:
    """Draw tokens of probability 2^-20, each of them rarely but all together often enough."""
    least = 1 << 19  # 128 rare draws expected, 92 to 167 with this confidence
    stated = torch.full((1 + RARE_TOKENS,), RARE, dtype=torch.float64)
    stated[0] = 1 - RARE_TOKENS * RARE  # one token has the rest
    public = torch.zeros(len(stated))
    shares = exact_shares(stated, public)
    share = math.fsum(shares[1:])
    places = torch.arange(len(stated))
    worlds = {
        "": places < 0,
        "probabilities below 2^-16 taken for 0": stated < 2.0**-16,
        "half of the rare tokens lost": places % 2 == 1,
    }
    for bug, gone in worlds.items():
        draws = least if bug else effort.count(DRAWS_PER_SECOND, least)
        running = torch.where(gone, 0.0, stated)
        running[0] += 1 - running.sum()
        counts = drawn(running, public, draws, effort.source(f"sampler/rare{bug}"))
        hits = sum(counts[1:])
        name = f"{RARE_TOKENS} tokens of probability 2^-20 in {draws} draws: {hits}"
        yield Finding(
            "sampler",
            f"{bug}; {name}" if bug else name,
            f"confidence that they are not drawn as often as stated ({draws * share:.0f} times)",
            CONFIDENCE,
            1 - float(scipy.stats.binomtest(hits, draws, share).pvalue),  # two-sided
            CONFIDENCE,
            control=bool(bug),
        )
        if not bug:
            yield _chi_square(f"{RARE_TOKENS} tokens of probability 2^-20", counts, shares)


Pairs = list[tuple[bytes, int]]


def reserved(rng: RandomSource) -> Pairs:
    """Return `RESERVED` pairs of key and counter, which determine all draws."""
    pairs = (rng.reserve() for _ in range(RESERVED))
    return [(bytes(key.tolist()), counter) for key, counter in pairs]


def after_fork(rng: RandomSource) -> tuple[Pairs, Pairs]:
    """Return the pairs that the parent and a forked child reserve next."""
    context = get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writing.send(reserved(rng)))
    child.start()
    writing.close()  # a child that dies is then seen
    there: Pairs = reading.recv()
    child.join()
    return reserved(rng), there


def _repeats(name: str, make: Callable[[], RandomSource], control: bool = False) -> Finding:
    rng = make()
    before = reserved(rng)
    here, there = after_fork(rng)
    every = before + here + there
    repeated = len(every) - len(set(every))
    claim = f"streams repeated of {len(every)}"
    return Finding("sampler", name, claim, 0.0, float(repeated), 1.0, control)


def charged_beside_a_ledger(rng: RandomSource) -> bool:
    """Return whether a ledger accepts the charge for an answer from this source."""
    mechanism = ClippedLogPool(-1.0, 1.0)
    ticket = mechanism.propose(torch.zeros(2, 1, 3), torch.zeros(1, 3), rng=rng)
    with tempfile.TemporaryDirectory() as folder:
        with Accountant(0.1, path=Path(folder) / "ledger.db") as accountant, suppress(ValueError):
            accountant.charge(ticket)
            return True
    return False


def _replay() -> Iterator[Finding]:
    for name, rng, control in (
        ("a seeded source and a ledger", SeededRandom(0), False),
        ("a secure source and a ledger", SecureRandom(), True),
    ):
        accepted = float(charged_beside_a_ledger(rng))
        yield Finding("sampler", name, "sources that are accepted", 0.0, accepted, 1.0, control)


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack the drawn distribution, rare tokens, forks and replays."""
    yield from _draws(effort)
    yield from _rare(effort)
    yield _repeats("a secure source across a fork", SecureRandom)
    yield _repeats("a seeded source across a fork", lambda: SeededRandom(0), True)
    yield from _replay()
