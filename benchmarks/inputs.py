"""Inputs and calls of the benchmarks, and how far torch programs are off."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import adapmixed_ext
from adapmixed.rng import SeededRandom
from adapmixed_ext import Projection, reference
from benchmarks.contestants import Result
from benchmarks.harness import Query, caches

ORDER, RADIUS = 18.0, 3.6
POOL = {"lower": -0.25, "upper": 1.0, "scale": 2.0}
PUBLIC_SPREAD = 3.0

# (shift shared by all models, noise of each), standard deviations of the difference to the public
# logits. At order 18, radius 3.6 the ball holds the models of "near" whole and cuts those of "far".
# Those of "shared" differ from the public model more than from each other, as adapters do.
KINDS = {"near": (0.0, 0.7), "far": (0.0, 1.5), "shared": (1.5, 0.3)}

ACCEPTED = 1e-3  # beyond this a torch program is marked as wrong


def two_calls(
    query: Query, order: float, radius: float, orders: float | Sequence[float]
) -> tuple[Projection, Tensor]:
    """Call `project`, then `leave_one_out`."""
    projection = adapmixed_ext.project(*query, order=order, radius=radius)
    return projection, adapmixed_ext.leave_one_out(*query, projection, orders=orders)


def pool_mixture(query: Query) -> Tensor:
    """Compute the mixture of a clipped pool."""
    return adapmixed_ext.mixture(*query, adapmixed_ext.log_pool(*query, **POOL))


def pool_token(query: Query, rng: SeededRandom) -> Tensor:
    """Draw a token of a clipped pool."""
    return adapmixed_ext.sample(pool_mixture(query), query[1], rng=rng)


def rotation(query_bytes: int, cache: int | None) -> int:
    """Return how many queries in rotation exceed the last cache (None: the CPU's) with room.

    One that far exceeds the cache needs no rotation.
    """
    last = cache or max(caches().values(), default=32 * 2**20)
    return min(128, max(1 + (query_bytes < 8 * last), math.ceil(2.2 * last / query_bytes)))


def make_query(
    models: int, vocab: int, *, kind: str = "near", positions: int = 1, seed: int = 0,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
) -> Query:  # fmt: skip
    """Make one call's logits model by model in place, without a second array of their size.

    The same seed gives other numbers on another kind of device.
    """
    shift, noise = KINDS[kind]
    generator = torch.Generator(device).manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(positions, vocab, generator=generator, device=device)

    public = PUBLIC_SPREAD * normal()
    common = public + shift * normal()
    private = torch.empty(models, positions, vocab, dtype=dtype, device=device)
    for row in private:
        row.copy_(common + noise * normal())
    return private, public.to(dtype)


def check_ours(query: Query, order: float, radius: float) -> None:
    """Exit unless weights and losses of some models keep their bounds by the reference.

    No weight may leave the ball, and none may be farther below the largest that stays in it than
    `project` states.
    """
    part = query[0][:: max(1, len(query[0]) // 8)], query[1]
    projection, loss = two_calls(part, order, radius, order)
    private, public = (logits.double().cpu().log_softmax(-1) for logits in part)
    slack = 1e-12 / (order - 1)  # of the reference's sums
    stated = 2e-4 + 1e-5 / (order - 1)
    for factor, bad in ((1.0, "infeasible"), (1 + stated, "below the optimum")):
        weight = (projection.weight.cpu() * factor).clamp(max=1.0).unsqueeze(-1)
        mixed = torch.logaddexp(weight.log() + private, torch.log1p(-weight) + public)
        mixed = torch.where(weight < 1, mixed, private)
        divergence = torch.maximum(*reference.renyi_divergence(mixed, public, order))[..., 0]
        wrong = divergence > radius + slack
        if factor > 1:
            wrong = (projection.weight.cpu() < 1) & (divergence <= radius - slack)
        if bool(wrong.any()):
            raise SystemExit(f"project: a weight is {bad} at order {order:g}; nothing is timed")
    weight = projection.weight.cpu()
    truth = reference.leave_one_out(*(logits.cpu() for logits in part), weight, orders=[order])
    more = loss.cpu() - truth
    if not bool(((more >= -1e-12) & (more <= 1e-4 * truth + 1e-9)).all()):
        raise SystemExit(f"leave_one_out: a loss is off at order {order:g}; nothing is timed")


def judge(result: Result, weight: Tensor, loss: Tensor) -> dict[str, object]:
    """Return whether a torch program is right, and a note of what is off.

    ``weight`` and ``loss``, (N, B), are taken as the truth.
    """
    wrong = []
    for what, mine, truth in zip(("weight", "loss"), result, (weight, loss), strict=True):
        error = float(((mine - truth.squeeze(1)) / truth.squeeze(1)).abs().max())
        if not error <= ACCEPTED:
            wrong.append(
                f"{what} off by {error:.2%}" if math.isfinite(error) else f"{what} not finite"
            )
    return {"correct": not wrong, "note": f"WRONG: {', '.join(wrong)}" if wrong else ""}
