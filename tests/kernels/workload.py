"""Every operator as a function from inputs to results, for tests of what holds of them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import plans
import torch
from plans import Source
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C, Projection

ORDERS = (2.0, 5.5, 18.0)


def _instruction_sets() -> list[str]:
    before = _C.instruction_set()
    sets = [isa for isa in ("scalar", "avx2", "avx512") if _C.use_instruction_set(isa)]
    _C.use_instruction_set(before)
    return sets


ISAS = _instruction_sets()  # of this machine


class Batch(NamedTuple):
    """Logits (N, B, V) and (B, V), noise (B, k), targets (B,), and active members (N, B)."""

    private: Tensor
    public: Tensor
    noise: Tensor
    targets: Tensor
    active: Tensor

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self))

    def position(self, b: int) -> Batch:
        """Return the inputs of one position."""
        at = slice(b, b + 1)
        return Batch(
            self.private[:, at], self.public[at], self.noise[at], self.targets[at],
            self.active[:, at].contiguous(),
        )  # fmt: skip

    def take(self, other: Batch) -> None:
        """Copy the other's values into these tensors, whose addresses stay."""
        for tensor, value in zip(self, other, strict=True):
            tensor.copy_(value)


def make(
    seed: int, models: int = 5, positions: int = 3, vocab: int = 1003,
    dtype: torch.dtype = torch.float32, top_k: int = 20,
) -> Batch:  # fmt: skip
    """Return inputs on the CPU, with a few masked tokens and one model far from the others."""
    private, public = plans.logits(seed, models, positions, vocab, 3.0, 0.6)
    generator = torch.Generator().manual_seed(seed)
    private[0] += 2.0 * torch.randn(positions, vocab, generator=generator)
    private[-1, :, vocab // 2] = -plans.INF
    noise = 0.01 * torch.randn(positions, top_k, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (positions,), generator=generator)
    active = torch.rand(models, positions, generator=generator) < 0.8
    return Batch(private.to(dtype), public.to(dtype), noise, targets, active)


def project(x: Batch, order: float = 18.0, radius: float = 3.6) -> Projection:
    return adapmixed_ext.project(x.private, x.public, order=order, radius=radius)


def parts(*results: Any) -> tuple[Tensor, ...]:
    """Return all tensors of these results."""
    groups = [
        [getattr(item, field.name) for field in fields(item)] if is_dataclass(item) else [item]
        for item in results
    ]
    return tuple(part for group in groups for part in group if isinstance(part, Tensor))


def _project(x: Batch) -> tuple[Tensor, ...]:
    # A large target, a small one with an integer order, and one that needs double precision.
    settings = ((18.0, 3.6), (3.0, 0.03), (2.5, 0.4))
    return parts(*(project(x, *setting) for setting in settings))


def _leave_one_out(x: Batch) -> tuple[Tensor, ...]:
    projection = project(x)
    slots = len(x.private) + 45
    loss = adapmixed_ext.leave_one_out
    return (
        loss(x.private, x.public, projection, orders=ORDERS),
        loss(x.private, x.public, projection, orders=18, adjacency="zero_out"),
        loss(x.private, x.public, 0.5 * projection.weight, orders=[3.0, 64.0], num_models=slots),
    )


def many_orders(x: Batch) -> tuple[Tensor, ...]:
    """Return losses at 8 orders: the sums of some positions fill the workspace."""
    orders = [1.0 + 0.5 * k for k in range(1, 9)]
    return (adapmixed_ext.leave_one_out(x.private, x.public, project(x), orders=orders),)


def in_groups(models: int, positions: int, vocab: int) -> bool:
    """Tell whether the positions of :func:`many_orders` use the workspace in groups."""
    size = _C.cuda.leave_one_out_workspace
    single, all_of_them, more = (size((models, b, vocab), 8) for b in (1, positions, 2 * positions))
    return bool(single < all_of_them == more)


def _mixture(x: Batch) -> tuple[Tensor, ...]:
    return (adapmixed_ext.mixture(x.private, x.public, project(x)),)


def _log_prob(x: Batch) -> tuple[Tensor, ...]:
    return (adapmixed_ext.log_prob(x.private, x.public, project(x), x.targets),)


def _log_pool(x: Batch) -> tuple[Tensor, ...]:
    box: dict[str, Any] = {
        "lower": -0.25, "upper": 1.0, "num_models": len(x.private) + 2, "active": x.active,
    }  # fmt: skip
    pool = adapmixed_ext.log_pool(x.private, x.public, scale=2.0, **box)
    p = adapmixed_ext.mixture(x.private, x.public, pool)
    return parts(pool, p, adapmixed_ext.log_prob(x.private, x.public, pool, x.targets))


def _clip_project(x: Batch) -> tuple[Tensor, ...]:
    """Run clip_project and all that takes its result: mixtures, and losses in double precision."""
    logits = x.private, x.public
    slots = len(x.private) + 2
    results: list[Any] = [adapmixed_ext.clip_project(*logits, lower=0.5, upper=2.0)]
    # Charges by moments, by powers of any order and by logarithms. One model does not fit its box.
    for lower, upper, orders in ((0.6, 1.65, ORDERS), (0.9, 9e5, (2.5,)), (0.0, 50.0, (64.0,))):
        clipping = adapmixed_ext.clip_project(
            *logits, lower=lower, upper=upper, orders=orders, num_models=slots, active=x.active
        )
        results += [clipping, adapmixed_ext.mixture(*logits, clipping)]
        results.append(adapmixed_ext.log_prob(*logits, clipping, x.targets))
        results.append(
            adapmixed_ext.leave_one_out(*logits, clipping, orders=orders, num_models=slots)
        )
    return parts(*results)


def _screen(x: Batch) -> tuple[Tensor, ...]:
    return parts(adapmixed_ext.screen(
        x.private, x.public, x.noise, weight=0.1, order=18.0, threshold=0.5,
        top_k=x.noise.shape[1], active=x.active,
    ))  # fmt: skip


def _renyi_divergence(x: Batch) -> tuple[Tensor, ...]:
    return adapmixed_ext.renyi_divergence(x.private, x.public, [1.01, 1.5, 18.0, 64.0])


Operation = Callable[[Batch], tuple[Tensor, ...]]

# All operators that do not draw, which a graph can capture; test_workload.py checks that none is
# left out.
OPERATIONS: dict[str, Operation] = {
    "project": _project,
    "clip_project": _clip_project,
    "leave_one_out": _leave_one_out,
    "mixture": _mixture,
    "log_prob": _log_prob,
    "log_pool": _log_pool,
    "screen": _screen,
    "renyi_divergence": _renyi_divergence,
}

NAMES = (*OPERATIONS, "draws")


def draws(x: Batch, seed: int) -> tuple[Tensor, ...]:
    """Run both operators that draw."""
    rng = Source(seed)
    noise = adapmixed_ext.gaussian((17, 59), sigma=0.7, rng=rng, device=x.public.device)
    tokens = adapmixed_ext.sample(x.public.double().softmax(-1), x.public, rng=rng)
    return noise, tokens


def run(name: str, x: Batch) -> tuple[Tensor, ...]:
    """Run one of NAMES."""
    return draws(x, 1) if name == "draws" else OPERATIONS[name](x)


def everything(x: Batch) -> tuple[Tensor, ...]:
    return tuple(result for name in NAMES for result in run(name, x))


def same(first: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Tell whether all bits agree."""
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, other, strict=True))
