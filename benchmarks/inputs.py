"""Inputs of the benchmarks, and checks of the timed calls against the float64 reference."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Projection
from adapmixed_ext import reference as oracle
from benchmarks.contestants import Result
from benchmarks.harness import Query, caches

PUBLIC_SPREAD = 3.0

# (shift shared by all models, noise of each), standard deviations of the difference to the public
# logits. At order 18, radius 3.6 the ball holds the models of "near" whole and cuts those of "far".
# Those of "shared" differ from the public model more than from each other, as adapters do.
KINDS = {"near": (0.0, 0.7), "far": (0.0, 1.5), "shared": (1.5, 0.3)}

WEIGHT_BOUND = 1e-5  # documented: at most this far below the optimum
ACCEPTED = 1e-3  # beyond this a torch program is marked as wrong


def rotation(query_bytes: int, most: int = 128, cache: int | None = None) -> int:
    """Return how many queries in rotation exceed the last-level cache, with room to spare."""
    last = cache or max(caches().values(), default=32 * 2**20)
    return min(most, max(2, math.ceil(2.2 * last / query_bytes)))


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


def make_queries(
    models: int, vocab: int, *, kind: str = "near", positions: int = 1,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    cache: int | None = None,
) -> list[Query]:  # fmt: skip
    """Make queries in rotation, together larger than the cache (the CPU's unless given)."""
    count = rotation(dtype.itemsize * models * positions * vocab, cache=cache)
    return [
        make_query(
            models, vocab, kind=kind, positions=positions, seed=seed, dtype=dtype, device=device
        )
        for seed in range(count)
    ]


def on_cpu(query: Query) -> Query:
    """Return the logits on the CPU, where the reference computes."""
    return query[0].cpu(), query[1].cpu()


def _divergences(query: Query, weight: Tensor, order: float) -> Tensor:
    """Return D↔(w p + (1-w) q || q) of every model, in float64."""
    private, public = (t.double().log_softmax(-1) for t in query)
    weight = weight.unsqueeze(-1)
    mixed = torch.logaddexp(weight.log() + private, torch.log1p(-weight) + public)
    mixed = torch.where(weight < 1, mixed, private)
    return torch.maximum(*oracle.renyi_divergence(mixed, public, order))[..., 0]


def check_weights(query: Query, weight: Tensor, order: float, radius: float) -> None:
    """Check that every weight satisfies the constraint, and that none 1e-5 larger does."""
    query, weight = on_cpu(query), weight.cpu()
    # The float64 sums are good to some 1e-14; the divergence is their logarithm over α - 1.
    slack = 1e-12 / (order - 1)
    if bool((_divergences(query, weight, order) > radius + slack).any()):
        raise SystemExit(f"project: a weight is infeasible at order {order:g}; nothing is timed")
    raised = (weight * (1 + WEIGHT_BOUND)).clamp(max=1.0)
    loose = (weight < 1) & (_divergences(query, raised, order) <= radius - slack)
    if bool(loose.any()):
        raise SystemExit(f"project: a weight is more than {WEIGHT_BOUND:g} below the optimum")


def true_losses(query: Query, projection: Projection, orders: Sequence[float]) -> Tensor:
    """Return the reference's losses for these weights, (N, B, K), on the CPU."""
    pair = projection.weight.cpu(), projection.complement.cpu()
    return oracle.leave_one_out(*on_cpu(query), pair, orders=list(orders))


def check_losses(losses: Tensor, truth: Tensor) -> None:
    """Check that every loss is within ``loss_error`` of the reference."""
    losses = losses.cpu()
    allowed = (adapmixed_ext.loss_error * truth).clamp(min=1e-12)
    if not bool(((losses - truth).abs() <= allowed).all()):
        worst = float(((losses - truth) / truth).abs().max())
        raise SystemExit(f"leave_one_out: a loss is off by {worst:.1e}; nothing is timed")


def few(tensor: Tensor) -> Tensor:
    """Return every tenth model, at least two, for the slow reference."""
    return tensor[:: max(1, min(10, len(tensor) // 2))]


def check_call(
    call: Callable[..., tuple[Projection, Tensor]], query: Query, order: float, radius: float,
    orders: Sequence[float],
) -> None:  # fmt: skip
    """Check weights and losses of ``call(query, order, radius, orders)`` on some models."""
    part = few(query[0]), query[1]
    projection, loss = call(part, order, radius, orders)
    check_weights(part, projection.weight, order, radius)
    check_losses(loss, true_losses(part, projection, orders))


def judge(result: Result, weight: Tensor, loss: Tensor) -> dict[str, object]:
    """Return the largest relative errors of a torch program; None if they are not finite.

    ``weight`` and ``loss``, on the CPU, are taken as the truth.
    """
    errors = [
        float(((mine.cpu().double() - truth) / truth).abs().nan_to_num(nan=math.inf).max())
        for mine, truth in zip(result, (weight, loss), strict=True)
    ]
    correct = max(errors) <= ACCEPTED
    shown = [e if math.isfinite(e) else None for e in errors]
    wrong = [
        f"{what} off by {e:.2%}" if math.isfinite(e) else f"{what} not finite"
        for what, e in zip(("weight", "loss"), errors, strict=True)
        if not e <= ACCEPTED
    ]
    note = f"WRONG: {', '.join(wrong)}" if wrong else ""
    return {"weight_error": shown[0], "loss_error": shown[1], "correct": correct, "note": note}
