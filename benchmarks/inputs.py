"""Inputs of the benchmarks, and the check of what is timed against the float64 reference."""

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

# (shift shared by all models, noise of each): standard deviations of the difference to the public
# logits. What is fast depends on them: at order 18, radius 3.6 the ball holds the models of "near"
# whole (all weights are 1) and cuts all those of "far"; those of "shared" differ from the public
# model much more than from each other, as adapters trained on similar text do.
KINDS = {"near": (0.0, 0.7), "far": (0.0, 1.5), "shared": (1.5, 0.3)}

WEIGHT_BOUND = 1e-5  # documented: at most this far below the optimum
ACCEPTED = 1e-3  # beyond this a torch program is marked as wrong


def rotation(query_bytes: int, most: int = 128, cache: int | None = None) -> int:
    """How many queries in rotation are larger than the last-level cache, with room to spare."""
    last = cache or max(caches().values(), default=32 * 2**20)
    return min(most, max(2, math.ceil(2.2 * last / query_bytes)))


def make_query(
    models: int, vocab: int, *, kind: str = "near", positions: int = 1, seed: int = 0,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
) -> Query:  # fmt: skip
    """One call's logits, made model by model where they shall be: no second array of their size.

    A seed means other numbers on another kind of device.
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
    """Queries in rotation; together they are larger than the cache, the CPU's unless given."""
    count = rotation(dtype.itemsize * models * positions * vocab, cache=cache)
    return [
        make_query(
            models, vocab, kind=kind, positions=positions, seed=seed, dtype=dtype, device=device
        )
        for seed in range(count)
    ]


def on_cpu(query: Query) -> Query:
    """The logits where the reference shall compute."""
    return query[0].cpu(), query[1].cpu()


def _divergences(query: Query, weight: Tensor, order: float) -> Tensor:
    """D↔(w p + (1-w) q || q) of every model, in float64."""
    private, public = (t.double().log_softmax(-1) for t in query)
    weight = weight.unsqueeze(-1)
    mixed = torch.logaddexp(weight.log() + private, torch.log1p(-weight) + public)
    mixed = torch.where(weight < 1, mixed, private)
    return torch.maximum(*oracle.renyi_divergence(mixed, public, order))[..., 0]


def check_weights(query: Query, weight: Tensor, order: float, radius: float) -> None:
    """Every weight must satisfy the constraint, and none that is 1e-5 larger may."""
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
    """The reference's losses for these weights, (N, B, K), on the CPU."""
    pair = projection.weight.cpu(), projection.complement.cpu()
    return oracle.leave_one_out(*on_cpu(query), pair, orders=list(orders))


def check_losses(losses: Tensor, truth: Tensor) -> None:
    """Every loss must be within ``loss_error`` of the reference."""
    losses = losses.cpu()
    allowed = (adapmixed_ext.loss_error * truth).clamp(min=1e-12)
    if not bool(((losses - truth).abs() <= allowed).all()):
        worst = float(((losses - truth) / truth).abs().max())
        raise SystemExit(f"leave_one_out: a loss is off by {worst:.1e}; nothing is timed")


def few(tensor: Tensor) -> Tensor:
    """Every tenth model, at least two: what the slow reference is asked about."""
    return tensor[:: max(1, min(10, len(tensor) // 2))]


def check_call(
    call: Callable[..., tuple[Projection, Tensor]], query: Query, order: float, radius: float,
    orders: Sequence[float],
) -> None:  # fmt: skip
    """Weights and losses of ``call(query, order, radius, orders)`` on some of the models."""
    part = few(query[0]), query[1]
    projection, loss = call(part, order, radius, orders)
    check_weights(part, projection.weight, order, radius)
    check_losses(loss, true_losses(part, projection, orders))


def judge(result: Result, weight: Tensor, loss: Tensor) -> dict[str, object]:
    """Largest relative errors of a torch program; None where they are not finite.

    ``weight`` and ``loss``, which are taken as the truth, are on the CPU.
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
