"""Write the cases of the sanitized driver: inputs, and the answers of the Python operators.

The file holds the 8 bytes of MAGIC, the number of cases, and the cases. Everything after MAGIC is
an array: the number of elements and the size of one, both int64, then the elements, all
little-endian. `Dump.case` writes a case's arrays in the order in which case.h reads them.

    python tests/sanitize/dump_cases.py build/sanitize-cases.bin [PART OF A CASE'S NAME]
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import cases  # noqa: E402
from cases import INF, Case  # noqa: E402

import adapmixed_ext  # noqa: E402
from adapmixed_ext.inputs import likeliest  # noqa: E402

MAGIC = b"ADPMXC01"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BALLS = ((18.0, 3.6), (3.0, 0.03), (1.5, 50.0), (1.01, 1e-6), (64.0, 0.5), (1024.0, 0.5))
# Large targets, chains, powers, small weights.
FOUND_BALLS = (*BALLS[:2], (256.0, 0.3))
FLOAT_BALLS = ((18.0, 3.6), (3.0, 0.03), (2.0, 0.5), (3.0, 0.001), (18.0, 0.3))
ORDER_LISTS = (
    (18.0,),
    (3.0,),
    (2.0, 4.0, 8.0, 12.0, 18.0, 32.0, 64.0, 128.0),  # the largest number allowed
    (1.01, 2.5, 18.0),
)
# By moments, by powers and by logarithms; for the last, p = 0 where the box is too narrow for p.
BOXES = ((0.6, 1.65), (0.9, 9e5), (0.0, 50.0), (0.97, 40.0))
DIVERGENCE_ORDERS = (1.01, 1.5, 2.0, 18.0, 1024.0)


class Rng:
    """A key and one counter."""

    def __init__(self, counter: int) -> None:
        self.key = (torch.arange(32) * 37 % 256).to(torch.uint8)
        self.counter = counter

    def reserve(self) -> tuple[Tensor, int]:
        return self.key, self.counter


def gapped(case: Case) -> Case:
    """Return the same rows with NaN between them, which reveals a read past the end of a row."""

    def spread(rows: Tensor, gap: int) -> Tensor:
        wide = rows.new_full((*rows.shape[:-1], rows.shape[-1] + gap), math.nan)
        wide[..., : rows.shape[-1]] = rows
        return wide[..., : rows.shape[-1]]

    return Case(f"{case.name}-gaps", spread(case.private, 3), spread(case.public, 9))


def big() -> list[Case]:
    """Return cases with several tiles and chunks, vector tails, many models or many positions."""
    plans = [
        # V, N, B, dtype
        (5003, 20, 1, torch.float32),
        (4999, 20, 1, torch.bfloat16),
        (5001, 7, 2, torch.float16),
        (2049, 3, 1, torch.float32),
        (43, 250, 1, torch.float32),
        (33, 2, 40, torch.float32),
        (37, 3, 35, torch.bfloat16),
    ]
    result = []
    for seed, (vocab, n, b, dtype) in enumerate(plans):
        private, public = cases.logits(700 + seed, n, b, vocab, 3.0, 0.7)
        public[:, 20:24] = private[:, :, 20:24] = -800.0  # beyond the range of double
        private[0, :, 21] += 40.0
        public[:, -5:] = private[:, :, -5:] = -INF  # a vocabulary padded with masked tokens
        private[n // 2, :, 11] = -INF
        private[:, :, 26:28] -= 12.0  # a mixture far below q
        private[-1, -1, 7] += 9.0
        name = f"big-V{vocab}-N{n}-B{b}-{str(dtype)[6:]}"
        case = Case(name, private.to(dtype), public.to(dtype))
        result.append(gapped(case) if seed % 2 else case)
    return result


def tiles() -> list[Case]:
    """Return short rows that still fill several tiles of the CUDA kernels.

    Each tile has rare tokens. delete_barriers.py uses only these and :func:`found_by_one`.
    """
    private, public = cases.logits(750, 3, 1, 520, 3.0, 0.7)
    public[:, ::9] = private[:, :, ::9] = -800.0
    public[:, 4::9] = private[:, :, 4::9] = -INF
    private[0, :, ::27] += 40.0
    private[:, :, 5::31] -= 800.0  # rare in the mixture alone
    apart, apart_public = cases.logits(751, 3, 1, 520, 80.0, 80.0)  # sums that overflow
    return [
        Case("tiles-rare", private, public),
        Case("tiles-apart", apart, apart_public),
        Case("tiles-bfloat16", private.bfloat16(), public.bfloat16()),
        # Single precision serves this case, also in tiles that have no token beyond its reach.
        Case("tiles-floats", *cases.logits(752, 4, 1, 400, 3.0, 0.5)),
    ]


def found_by_one() -> Case:
    """Return rows in which one thread of `project` finds a fact that it must tell the others."""
    private, public = cases.logits(753, 4, 1, 260, 2.0, 0.02)
    public[:, 150] = private[1:, :, 150] = -INF  # uncovered by the first model
    public[:, 203] = private[:, :, 203] = -800.0
    private[1, :, 203] = -650.0  # rare, but decides the first constraint
    private[2, :, 203] = -1000.0  # decides the reverse constraint at order 256
    return Case("tiles-found-by-one", private, public)


def like_models() -> list[Case]:
    """Return rows like those of language models, with a padded vocabulary, for single precision."""
    plans = [
        # V, N, B, dtype
        (3001, 8, 2, torch.float32),
        (2993, 40, 1, torch.bfloat16),
        (3007, 100, 1, torch.float16),
        (50257, 8, 1, torch.float32),
        (50251, 5, 1, torch.bfloat16),
    ]
    result = []
    for seed, (vocab, n, b, dtype) in enumerate(plans):
        private, public = cases.logits(900 + seed, n, b, vocab, 2.0, 0.5)
        public[:, -47:] = private[:, :, -47:] = -INF
        name = f"like-models-V{vocab}-N{n}-{str(dtype)[6:]}"
        case = Case(name, private.to(dtype), public.to(dtype))
        result.append(gapped(case) if seed % 2 else case)
    return result


def refused() -> list[Case]:
    """Return rows that are not distributions, for which only the status is defined."""
    result = []
    for dtype in DTYPES:
        # One such row among many that single precision serves.
        private, public = cases.logits(810, 8, 2, 3001, 2.0, 0.5)
        private[3, 1, 1500], private[5, 0] = math.nan, math.nan
        result.append(Case(f"refused-row-{str(dtype)[6:]}", private.to(dtype), public.to(dtype)))
        public[1, 5] = math.nan
        result.append(Case(f"refused-public-{str(dtype)[6:]}", private.to(dtype), public.to(dtype)))
    for dtype in DTYPES:
        private, public = cases.logits(800, 5, 2, 19, 2.0, 0.5)
        private[0, 0, 18], private[1, 1, 3], private[2, 0, 0] = math.nan, INF, -math.nan
        private[3] = -INF
        result.append(Case(f"refused-{str(dtype)[6:]}", private.to(dtype), public.to(dtype)))
    return result


def status_of(rows: Tensor) -> Tensor:
    """Return the RowStatus (common/operators.h) of every row."""
    largest = rows.double().amax(-1)
    status = torch.zeros(rows.shape[:-1], dtype=torch.int32)
    status[largest == -INF] = 3
    status[largest == INF] = 2
    status[rows.isnan().any(-1)] = 1
    return status


def targets_of(case: Case) -> Tensor:
    positions, vocab = case.public.shape
    return (torch.arange(positions) * 7 + vocab - 1) % vocab


class Dump:
    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def raw(self, data: bytes, size: int) -> None:
        self.file.write(struct.pack("<qq", len(data) // size, size) + data)

    def ints(self, *values: int) -> None:
        self.raw(struct.pack(f"<{len(values)}q", *values), 8)

    def numbers(self, *values: float) -> None:
        self.raw(struct.pack(f"<{len(values)}d", *values), 8)

    def tensor(self, values: Tensor) -> None:
        self.raw(values.contiguous().numpy().tobytes(), values.element_size())

    def logits(self, rows: Tensor) -> None:
        """Write the strides, and the memory from the first to the last element of the rows."""
        strides = rows.stride()
        span = 1 + sum((n - 1) * s for n, s in zip(rows.shape, strides, strict=True))
        held = torch.as_strided(rows, (span if rows.numel() else 0,), (1,))
        self.ints(strides[0] if rows.dim() == 3 else 0, strides[-2], DTYPES[rows.dtype])
        self.tensor(held.view(torch.int32 if held.element_size() == 4 else torch.int16))

    def case(self, case: Case, balls: Sequence[tuple[float, float]], good: bool = True) -> None:
        private, public = case.private, case.public
        self.raw(case.name.encode(), 1)
        self.ints(*private.shape)
        for rows in (private, public):
            self.logits(rows)
            self.tensor(torch.logsumexp(rows.double(), -1))
            self.tensor(status_of(rows))
        self.tensor(targets_of(case))
        self.ints(int(good))
        if not good:
            return
        self.ints(len(balls) + 1)
        for index, (order, radius) in enumerate(balls):
            found = adapmixed_ext.project(private, public, order=order, radius=radius)
            self.numbers(order, radius)
            self.weighted(case, found.weight, index)
        generator = torch.Generator().manual_seed(1)
        weight = torch.rand(private.shape[:2], generator=generator, dtype=torch.float64)
        weight[0], weight[-1] = 0.0, 1.0
        self.numbers()
        self.weighted(case, weight, len(balls))
        self.pools(case)
        self.boxes(case)
        self.divergences(case)
        self.screens(case)
        self.draws(case, adapmixed_ext.mixture(private, public, weight))

    def weighted(self, case: Case, weight: Tensor, index: int) -> None:
        """Write the operators' answers for these weights; `index` varies the losses' options."""
        private, public = case.private, case.public
        models = private.shape[0]
        inputs = adapmixed_ext.inputs.prepare(private, public)
        projection = adapmixed_ext.Projection(weight, *inputs[2:])
        mixture = adapmixed_ext.mixture(private, public, projection)
        self.tensor(weight)
        self.tensor(mixture)
        self.tensor(adapmixed_ext.log_prob(private, public, projection, targets_of(case)))
        self.ints(2)
        for k in range(2):
            orders = ORDER_LISTS[(2 * index + k) % len(ORDER_LISTS)]
            slots = models + 3 * (index % 2)
            loss = adapmixed_ext.leave_one_out(
                private, public, projection, orders=orders, num_models=slots,
                adjacency="zero_out" if k else "add_remove",
            )  # fmt: skip
            self.numbers(*orders)
            self.ints(k, slots)
            self.tensor(loss)

    def pools(self, case: Case) -> None:
        models, positions = case.private.shape[:2]
        plans = [
            (-0.25, 1.0, 2.0, 0, False),
            (-32.0, 32.0, 0.5, 3, True),
            (-1.0, 0.0, 1.5, 0, True),
        ]
        self.ints(len(plans))
        for lower, upper, scale, absent, some in plans:
            active = torch.arange(models * positions).reshape(models, positions) % 3 > 0
            box: dict[str, Any] = {
                "lower": lower, "upper": upper, "num_models": models + absent,
                "active": active if some else None,
            }  # fmt: skip
            pool = adapmixed_ext.log_pool(case.private, case.public, scale=scale, **box)
            self.numbers(lower, upper, scale)
            self.ints(models + absent)
            self.tensor(active if some else active.new_empty(0))
            self.tensor(pool.log_normaliser)
            self.tensor(pool.span)
            self.tensor(pool.log_weights)

    def boxes(self, case: Case) -> None:
        # For long rows, logarithms take minutes in a sanitized build.
        boxes = BOXES if case.public.shape[-1] < 10_000 else BOXES[:1]
        self.ints(len(boxes))
        for k, (lower, upper) in enumerate(boxes):
            models, positions = case.private.shape[:2]
            active = torch.arange(models * positions).reshape(models, positions) % 3 > 0
            orders = ORDER_LISTS[k]
            found = adapmixed_ext.clip_project(
                case.private, case.public, lower=lower, upper=upper, orders=orders,
                num_models=models + k, active=active if k % 2 else None,
            )  # fmt: skip
            assert found.charge is not None
            self.numbers(lower, upper)
            self.ints(models + k)
            self.numbers(*orders)
            self.tensor(active if k % 2 else active.new_empty(0))
            for tensor in (found.log_scale, found.residual, found.charge):
                self.tensor(tensor)
            self.tensor(adapmixed_ext.mixture(case.private, case.public, found))
            self.tensor(
                adapmixed_ext.leave_one_out(case.private, case.public, found, orders=orders)
            )

    def divergences(self, case: Case) -> None:
        self.numbers(*DIVERGENCE_ORDERS)
        q = case.public.expand_as(case.private)
        for side in adapmixed_ext.renyi_divergence(case.private, q, DIVERGENCE_ORDERS):
            self.tensor(side)

    def screens(self, case: Case) -> None:
        models, positions, vocab = case.private.shape
        plans = [(0.3, 2.0, 1, False), (1e-2, 18.0, vocab + 3, True), (1.0, 1.5, 60, False)]
        self.ints(len(plans))
        for weight, order, top_k, some in plans:
            generator = torch.Generator().manual_seed(top_k)
            noise = torch.randn(positions, top_k, generator=generator, dtype=torch.float64) / 100
            active = torch.arange(models * positions).reshape(models, positions) % 3 > 0
            result = adapmixed_ext.screen(
                case.private, case.public, noise, weight=weight, order=order, threshold=0.2,
                top_k=top_k, num_models=models + some, active=active if some else None,
            )  # fmt: skip
            tokens = likeliest(case.public, min(top_k, vocab), by_rank=True)
            self.numbers(weight, order, 0.2)
            self.ints(tokens.shape[1], models + some)
            self.tensor(noise[:, : tokens.shape[1]])
            self.tensor(tokens)
            self.tensor(active if some else active.new_empty(0))
            self.tensor(result.divergence)

    def draws(self, case: Case, probabilities: Tensor) -> None:
        rng = Rng(2**33 + 5)
        sizes = (1, 5, 64, 1023)
        self.tensor(rng.key)
        self.ints(rng.counter)
        self.tensor(probabilities)
        self.tensor(adapmixed_ext.sample(probabilities, case.public, rng=rng))
        self.ints(len(sizes))
        for size in sizes:
            self.tensor(adapmixed_ext.gaussian(size, sigma=0.7, rng=rng))


def main(path: Path, name_part: str = "") -> None:
    empty = Case("no-positions", torch.zeros(3, 0, 5), torch.zeros(0, 5))
    plans: list[tuple[Case, Sequence[tuple[float, float]]]] = [
        *((case, BALLS) for case in cases.small() + cases.corners()),
        *((case, BALLS[:3]) for case in cases.wide() + big() + tiles()),
        (found_by_one(), FOUND_BALLS),
        *((case, FLOAT_BALLS if case.public.shape[-1] < 10_000 else FLOAT_BALLS[:2])
          for case in like_models()),
        (empty, BALLS[:1]),
        *((case, ()) for case in refused()),
    ]  # fmt: skip
    plans = [plan for plan in plans if name_part in plan[0].name]
    torch.set_num_threads(1)
    with path.open("wb") as file:
        file.write(MAGIC)
        dump = Dump(file)
        dump.ints(len(plans))
        for case, balls in plans:
            dump.case(case, balls, good=len(balls) > 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
