"""Fuzzed inputs: build(seed) returns the call that a seed stands for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases import DTYPES
from checks import ADJACENCIES
from torch import Tensor

from adapmixed_ext import _C

INF = math.inf
ORDERS = (1.01, 1.5, 2.0, 3.0, 6.0, 8.0, 18.0, 32.0, 64.0, 128.0, 256.0)
RADII = (0.0, 1e-6, 1e-4, 1e-2, 0.03, 0.5, 3.6, 50.0, 1000.0)
KINDS = (
    "ordinary", "near", "shared", "repeated", "masks", "offsets", "ties", "denormals",
    "canary", "mixed", "large", "very-negative", "bad",
)  # fmt: skip
SMALL_KINDS = ("large", "very-negative")  # most of their values need 70 digits
ISAS = ("scalar", "avx2", "avx512")


@dataclass
class Call:
    """One fuzzed call of every operator."""

    seed: int
    kind: str
    private: Tensor
    public: Tensor
    order: float
    radius: float
    orders: list[float]
    adjacency: str
    slots: int
    threads: int
    isa: str
    expected: str | None  # pattern of the error message, if a row is bad

    def __str__(self) -> str:
        shape, strides = tuple(self.private.shape), self.private.stride()
        return (
            f"seed {self.seed} ({self.kind}, {shape} strides {strides} {self.private.dtype}, "
            f"order {self.order}, radius {self.radius}, {self.isa}, {self.threads} threads)"
        )


def build(seed: int) -> Call:
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kind = choose.choice(KINDS)
    models, positions, vocab = _shape(choose, kind)
    dtype = choose.choice((torch.float32, *DTYPES))
    public = _randn(generator, positions, vocab) * choose.choice((0.1, 1.0, 3.0, 10.0, 30.0, 80.0))
    noise = choose.choice((1e-6, 0.01, 0.1, 0.5, 2.0, 10.0))
    if kind == "ordinary":
        private = _randn(generator, models, positions, vocab) * choose.choice((1.0, 5.0, 30.0))
    else:
        private = public + noise * _randn(generator, models, positions, vocab)
    if kind == "repeated":
        private = private[:1].expand_as(private).clone()
        if choose.random() < 0.5:
            private, public = (
                private[:, :1].expand_as(private).clone(),
                public[:1].expand_as(public),
            )
            public = public.clone()
    if kind in ("shared", "mixed"):
        private = private + choose.choice((0.5, 3.0)) * _randn(generator, positions, vocab)
    for name in ("masks", "offsets", "ties", "denormals", "canary", "large", "very-negative"):
        if kind == name or (kind == "mixed" and choose.random() < 0.4 and name not in SMALL_KINDS):
            private, public = _SPECIALS[name](choose, private, public)
    if dtype == torch.float16:  # 1e5 would be +inf, which another test covers
        private = torch.where(private > 6e4, 6e4, private)
        public = torch.where(public > 6e4, 6e4, public)
    private, public = private.to(dtype), public.to(dtype)
    private, public = _revive(private), _revive(public)
    expected = _spoil(choose, private, public) if kind == "bad" else None
    private, public = _restride(choose, private), _restride(choose, public)
    return Call(
        seed, kind, private, public, _order(choose), choose.choice(RADII),
        [_order(choose) for _ in range(choose.choice((1, 1, 3)))], choose.choice(ADJACENCIES),
        models + choose.choice((0, 0, 0, 1, 7)), choose.choice((1, 2)),
        choose.choice([isa for isa in ISAS if _supported(isa)]), expected,
    )  # fmt: skip


def _supported(isa: str) -> bool:
    before = _C.instruction_set()
    known = _C.use_instruction_set(isa)
    _C.use_instruction_set(before)
    return known


def _shape(choose: random.Random, kind: str) -> tuple[int, int, int]:
    if kind in SMALL_KINDS:
        return choose.randint(1, 4), choose.randint(1, 2), choose.randint(1, 24)
    vocab = choose.choice(
        (1, 2, choose.randint(3, 40), choose.randint(41, 999), choose.randint(1000, 5000))
    )
    models = choose.choice((1, 2, 3, choose.randint(4, 40)))
    positions = choose.randint(1, 4)
    # The oracle takes 0.1 us for a token and an evaluation.
    while models * positions * vocab > 40_000:
        models, positions = max(1, models // 2), max(1, positions // 2)
        if models == positions == 1:
            break
    return models, positions, vocab


def _order(choose: random.Random) -> float:
    if choose.random() < 0.25:
        return 1.0 + math.exp(choose.uniform(math.log(0.01), math.log(300.0)))
    return choose.choice(ORDERS)


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _some_tokens(choose: random.Random, vocab: int) -> list[int]:
    return choose.sample(range(vocab), choose.randint(1, max(1, min(vocab // 2, 20))))


def _masks(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    side = choose.choice(("both", "private", "public", "one model", "one model and public"))
    tokens = _some_tokens(choose, public.shape[1])
    if side in ("both", "public", "one model and public"):
        public[:, tokens] = -INF
    if side in ("both", "private"):
        private[..., tokens] = -INF
    if side.startswith("one model"):
        private[choose.randrange(private.shape[0])][:, tokens] = -INF
    return private, public


def _offsets(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    size = choose.choice((10.0, 1e3, 1e5, 9e5))
    return private + choose.choice((-1, 0, 1)) * size, public + choose.choice((-1, 1)) * size


def _ties(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    step = choose.choice((0.5, 4.0))
    private, public = (private / step).round() * step, (public / step).round() * step
    if choose.random() < 0.5:
        private[choose.randrange(private.shape[0])] = public
    return private, public


def _denormals(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    for rows in (private, public):
        rows[..., _some_tokens(choose, public.shape[1])] = choose.choice((1e-40, -1e-45, 1e-38))
    return private, public


def _canary(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    token, rare = choose.randrange(public.shape[1]), choose.choice((1e-12, 1e-6, 1e-30, 1e-44))
    public[:, token] = torch.logsumexp(public, -1) + math.log(rare)
    model = choose.randrange(private.shape[0])
    private[model, :, token] = torch.logsumexp(private[model], -1) - math.log(1e-12)
    return private, public


def _large(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    for rows in (private, public):
        for token in _some_tokens(choose, public.shape[1]):
            rows[..., token] = choose.choice((-1e6, -1e5, -1e4, 1e4, 1e5, 9e5))
    return private, public


def _very_negative(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    for rows in (private, public):
        tokens = _some_tokens(choose, public.shape[1])[: public.shape[1] - 1]
        rows[..., tokens] = choose.choice((-1e30, -3e38, -2000.0, -760.0, -720.0, -690.0))
    return private, public


_SPECIALS: dict[str, Callable[[random.Random, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "masks": _masks, "offsets": _offsets, "ties": _ties, "denormals": _denormals,
    "canary": _canary, "large": _large, "very-negative": _very_negative,
}  # fmt: skip


def _revive(rows: Tensor) -> Tensor:
    """Replace rows that a mask or a narrow dtype left without a usable value, or beyond 1e6."""
    top = rows.float().amax(-1, keepdim=True)
    rows = torch.where((top < -9.9e5) | (top > 9.9e5), torch.zeros_like(rows), rows)
    return rows


def _spoil(choose: random.Random, private: Tensor, public: Tensor) -> str:
    """Make one row bad and return the pattern of its error message."""
    value, words = choose.choice(
        ((math.nan, "contains NaN"), (INF, r"contains \+inf"), (-INF, "has no finite value"),
         (1.01e6, "largest logit beyond"), (-1.01e6, "largest logit beyond"))
    )  # fmt: skip
    name, rows = choose.choice((("private_logits", private), ("public_logits", public)))
    if rows.dtype == torch.float16 and abs(value) > 6e4 and not math.isinf(value):
        value, words = math.nan, "contains NaN"
    at = tuple(choose.randrange(size) for size in rows.shape[:-1])
    whole = value in (-INF, -1.01e6)
    rows[at if whole else (*at, choose.randrange(rows.shape[-1]))] = value
    return rf"{name}\[{', '.join(map(str, at))}\] .*{words}"


def _restride(choose: random.Random, rows: Tensor) -> Tensor:
    """Return the same values with other strides, for instance inside a larger storage."""
    how = choose.choice(("as it is", "inside", "steps", "turned", "inner", "repeated"))
    shape = rows.shape
    if how == "inside":
        store = torch.full((*shape[:-1], shape[-1] + 7), math.nan, dtype=rows.dtype)
        view = store[..., 3 : 3 + shape[-1]]
        return view.copy_(rows)
    if how == "steps":
        store = torch.full((*(3 * n for n in shape[:-1]), shape[-1] + 1), INF, dtype=rows.dtype)
        view = store[tuple(slice(1, None, 3) for _ in shape[:-1])][..., 1:]
        return view.copy_(rows)
    if how == "turned" and rows.dim() == 3:
        return rows.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "inner":
        store = torch.full((*shape[:-1], 2 * shape[-1]), math.nan, dtype=rows.dtype)
        return store[..., ::2].copy_(rows)
    if how in ("repeated", "turned"):  # an axis of equal rows (without NaN) gets stride 0
        for axis in range(rows.dim() - 1):
            first = rows.narrow(axis, 0, 1)
            if bool((rows == first).all()):
                rows = first.expand(shape)
    return rows
