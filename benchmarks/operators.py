"""How much faster are the operators than the published algorithm on the same inputs?

    python -m benchmarks.operators --models 100 --vocab 50257

One query: the weights of all models and every model's leave-one-out loss. Contestants: the
published algorithm (a Python loop over models, 20 bisection steps, float32), the same mathematics
vectorised over models in eager torch, and `project` + `leave_one_out` as a user calls them. The
losses of the first four models alone are compared first with the float64 reference (which would
take minutes on all); float32 fails that where its sums overflow.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import reference as oracle
from benchmarks.harness import interleave, machine

STEPS = 20
Program = Callable[[Tensor, Tensor, float, float], float]


def divergence(p: Tensor, q: Tensor, order: float) -> Tensor:
    """D↔ over the last axis, as the published program sums it."""
    forward = (p**order / q ** (order - 1)).sum(-1).log() / (order - 1)
    backward = (q**order / p ** (order - 1)).sum(-1).log() / (order - 1)
    return torch.maximum(forward, backward)


def bisect_weight(p: Tensor, q: Tensor, order: float, radius: float) -> float:
    """One model's λ by bisection."""
    if float(divergence(p, q, order)) <= radius:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if float(divergence(middle * p + (1 - middle) * q, q, order)) <= radius:
            low = middle
        else:
            high = middle
    return low


def published(private: Tensor, public: Tensor, order: float, radius: float) -> float:
    """Algorithm 1, lines 11–17: one model after the other. Returns the largest loss."""
    q = public[0].softmax(-1)
    mixed = []
    for row in private[:, 0]:
        p = row.softmax(-1)
        weight = bisect_weight(p, q, order, radius)
        mixed.append(weight * p + (1 - weight) * q)
    stacked = torch.stack(mixed)
    mean = stacked.mean(0)
    worst = 0.0
    for i in range(len(stacked)):
        others = torch.cat((stacked[:i], stacked[i + 1 :])).mean(0)
        worst = max(worst, float(divergence(mean, others, order)))
    return worst


def vectorised(private: Tensor, public: Tensor, order: float, radius: float) -> float:
    """The same over all models at once."""
    q, p = public[0].softmax(-1), private[:, 0].softmax(-1)
    low, high = torch.zeros(len(p), 1), torch.ones(len(p), 1)
    full = divergence(p, q, order)[:, None] <= radius
    for _ in range(STEPS):
        middle = (low + high) / 2
        inside = divergence(middle * p + (1 - middle) * q, q, order)[:, None] <= radius
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    weight = torch.where(full, 1.0, low)
    mixed = weight * p + (1 - weight) * q
    mean = mixed.mean(0)
    others = (len(p) * mean - mixed) / (len(p) - 1)
    return float(divergence(mean, others, order).max())


def ours(private: Tensor, public: Tensor, order: float, radius: float) -> float:
    """`project`, then `leave_one_out`."""
    projection = adapmixed_ext.project(private, public, order=order, radius=radius)
    loss = adapmixed_ext.leave_one_out(private, public, projection, orders=order)
    return float(loss.max())


def reference(private: Tensor, public: Tensor, order: float, radius: float) -> float:
    """The float64 reference operators."""
    weight, _ = oracle.project(private, public, order=order, radius=radius)
    return float(oracle.leave_one_out(private, public, weight, orders=[order]).max())


def make_inputs(models: int, vocab: int) -> list[tuple[Tensor, Tensor]]:
    """Four queries in rotation: together they are larger than any cache."""
    inputs = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        public = 3.0 * torch.randn(1, vocab, generator=generator)
        noise = torch.randn(models, 1, vocab, generator=generator)
        inputs.append((public + 0.7 * noise, public))
    return inputs


def measure(
    inputs: list[tuple[Tensor, Tensor]], order: float, radius: float, runs: int
) -> list[dict[str, object]]:
    """Checks, times and prints one setting."""
    programs = {"published loop": published, "vectorised eager": vectorised, "adapmixed_ext": ours}
    few = inputs[0][0][:4], inputs[0][1]
    truth = reference(*few, order, radius)
    errors = {
        name: abs(program(*few, order, radius) - truth) / truth
        for name, program in programs.items()
    }
    if not errors["adapmixed_ext"] < 1e-4:
        raise SystemExit(f"adapmixed_ext is off by {errors['adapmixed_ext']:.1e}: no timing")
    contestants = {
        name: partial(_call, program, inputs, order, radius) for name, program in programs.items()
    }
    timings = interleave(
        contestants, {"published loop": 3, "vectorised eager": 5, "adapmixed_ext": runs}
    )
    base = timings["adapmixed_ext"].median
    print(f"order {order:g}, radius {radius:g}")
    rows: list[dict[str, object]] = []
    for name, t in timings.items():
        error = errors[name]
        print(
            f"  {name:18} {1e3 * t.median:9.2f} ms  [{1e3 * t.fastest:.2f}, "
            f"{1e3 * t.slowest:.2f}]  {t.median / base:7.1f}x  loss off by {error:.0e}"
        )
        rows.append(
            {"order": order, "radius": radius, "name": name, "seconds": t.median,
             "fastest": t.fastest, "slowest": t.slowest, "runs": t.runs,
             "ratio": t.median / base,
             "relative_error": error if math.isfinite(error) else None}
        )  # fmt: skip
    return rows


def _call(
    program: Program, inputs: list[tuple[Tensor, Tensor]], order: float, radius: float, turn: int
) -> float:
    return program(*inputs[turn % len(inputs)], order, radius)


def main() -> None:
    """Measures, prints a table, optionally writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    inputs = make_inputs(arguments.models, arguments.vocab)
    print(f"N = {arguments.models}, V = {arguments.vocab}, {arguments.threads} threads")
    results = [
        row
        for order, radius in ((18.0, 3.6), (3.0, 0.03))
        for row in measure(inputs, order, radius, arguments.runs)
    ]
    if arguments.json is not None:
        content = {
            "machine": machine(),
            "models": arguments.models,
            "vocab": arguments.vocab,
            "results": results,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
