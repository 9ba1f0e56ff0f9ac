"""The torch programs that the operators are compared with.

Every program takes float32 logits (N, B, V) and (B, V), an order and a radius. It returns the
weights and the losses of all models: (N, B), or (N,) if B is 1. ``published`` takes one query.

* ``published``: the published algorithm as written. A Python loop over models finds each weight by
  20 bisection steps on the plain Rényi sums. The mean of the others is taken from the running sum,
  which is cheaper than summing N - 1 rows N times.
* ``smart``: the program of a careful user of torch, and the fair peer. Its sums are scaled so that
  float32 holds them, it uses Newton's method from above, and its losses do not cancel.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Result = tuple[Tensor, Tensor]
Program = Callable[..., Result]
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

BISECTIONS = 20
NEWTON_STEPS = 5

LOOP = "published algorithm, loop over models"
SMART = "smart (Newton), eager"
SMART_CONSTANT = "smart (Newton), compiled, order constant"


def divergence(p: Tensor, q: Tensor, order: float | Tensor) -> Tensor:
    """Return D↔ over the last axis, summed as in the published program."""
    forward = (p**order / q ** (order - 1)).sum(-1).log() / (order - 1)
    backward = (q**order / p ** (order - 1)).sum(-1).log() / (order - 1)
    return torch.maximum(forward, backward)


def _bisect(p: Tensor, q: Tensor, order: float, radius: float) -> float:
    if float(divergence(p, q, order)) <= radius:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if float(divergence(middle * p + (1 - middle) * q, q, order)) <= radius:
            low = middle
        else:
            high = middle
    return low


def published(private: Tensor, public: Tensor, order: float, radius: float) -> Result:
    """Run Algorithm 1, lines 10–16, one model after the other."""
    q = public[0].softmax(-1)
    weights, mixed = [], []
    for row in private[:, 0]:
        p = row.softmax(-1)
        weight = _bisect(p, q, order, radius)
        weights.append(weight)
        mixed.append(weight * p + (1 - weight) * q)
    total = torch.stack(mixed).sum(0)
    mean = total / len(mixed)
    losses = [divergence(mean, (total - row) / (len(mixed) - 1), order) for row in mixed]
    return torch.tensor(weights, device=q.device), torch.stack(losses)


def _forward_weights(
    private: Tensor, public: Tensor, order: float, radius: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, d = p/q - 1, and the largest weight with F = Σ q (1 + w d)^α <= T = e^((α-1)R).

    Scaled by s = (q/T)^(1/α), each term of F/T is (s (1 + w d))^α. No single term may pass 1, which
    bounds w from above. F^(1/α) is convex, so Newton's method descends from that bound without
    overshooting.
    """
    log_q = public.log_softmax(-1)
    d = torch.expm1(private.log_softmax(-1) - log_q)
    scale = torch.exp((log_q - (order - 1) * radius) / order)
    slope = scale * d
    room = torch.where(slope > 0, (1 - scale) / slope, math.inf)
    weight = room.amin(-1, keepdim=True).clamp(max=1.0)
    for _ in range(NEWTON_STEPS):
        u = scale + weight * slope
        power = u ** (order - 1)
        total, rise = (power * u).sum(-1, keepdim=True), (power * slope).sum(-1, keepdim=True)
        norm = total ** (1 / order)
        step = (norm - 1) / (norm ** (1 - order) * rise)
        weight = (weight - step.clamp(min=0.0)).clamp(min=0.0)
    return log_q.exp(), d, weight


def _backward_weights(q: Tensor, d: Tensor, weight: Tensor, order: float, radius: float) -> Tensor:
    """Lower the weights until G = Σ q (1 + w d)^(1-α) <= T too; G^(-1/(α-1)) is concave."""
    scale = (q * math.exp(-(order - 1) * radius)) ** (-1 / (order - 1))
    slope = scale * d
    room = torch.where(slope < 0, (1 - scale) / slope, math.inf)
    weight = torch.minimum(weight, room.amin(-1, keepdim=True))
    for _ in range(NEWTON_STEPS):
        v = scale + weight * slope
        power = v**-order
        total, fall = (power * v).sum(-1, keepdim=True), (power * slope).sum(-1, keepdim=True)
        norm = total ** (-1 / (order - 1))
        step = (1 - norm) / (norm * -fall / total)
        weight = weight - torch.where(fall < 0, step, 0.0).clamp(min=0.0)
    return weight


def _excess_losses(q: Tensor, d: Tensor, weight: Tensor, order: float) -> Tensor:
    """Return log1p Σ p ((1 + x)^s - 1 - s x) / (α-1) for s = α and 1 - α; nothing cancels."""
    models = d.shape[0]
    y = weight * d
    mean = y.mean(0)
    x = (mean - y) / ((1 + mean) * (models - 1))
    log_ratio, p = torch.log1p(x), q * (1 + mean)
    forward = (p * (torch.expm1(order * log_ratio) - order * x)).sum(-1)
    backward = (p * (torch.expm1((1 - order) * log_ratio) - (1 - order) * x)).sum(-1)
    return torch.log1p(torch.maximum(forward, backward)) / (order - 1)


class Smart:
    """The smart program; each of its parts goes through the compiler, if there is one."""

    def __init__(self, compiler: Compiler | None = None) -> None:
        parts = (_forward_weights, _backward_weights, _excess_losses)
        if compiler is not None:
            parts = tuple(compiler(part) for part in parts)
        self._forward, self._backward, self._losses = parts

    def __call__(
        self, private: Tensor, public: Tensor, order: float, radius: float,
        backward: bool | None = None,
    ) -> Result:  # fmt: skip
        """Return weights and losses; ``backward``: also solve the other direction, if known.

        Finding that out waits for the device, which a CUDA graph cannot do.
        """
        q, d, weight = self._forward(private, public, order, radius)
        if self._binds(weight, radius) if backward is None else backward:
            weight = self._backward(q, d, weight, order, radius)
        return weight[..., 0].squeeze(1), self._losses(q, d, weight, order).squeeze(1)

    def backward(self, private: Tensor, public: Tensor, order: float, radius: float) -> bool:
        """Return whether the other direction must be solved for these logits."""
        return self._binds(self._forward(private, public, order, radius)[2], radius)

    @staticmethod
    def _binds(weight: Tensor, radius: float) -> bool:
        """Return the weight below which G never binds, since 1 + w d >= 1 - w."""
        return float(weight.max()) > -math.expm1(-radius)


def torch_programs(
    order: float, radius: float, inputs: tuple[Tensor, Tensor], *, backend: str = "inductor",
    refused: Callable[[str, Exception], None],
) -> dict[str, Program]:  # fmt: skip
    """Compile the contestants for the shape of ``inputs``; return them by name.

    The compiler gets the order as a constant: it turns an integer power into multiplications, and
    is tenfold faster than with an order at run time. ``refused`` is called with a program that the
    compiler does not take (on a GPU that needs more than torch), and the program is left out.
    """
    torch._dynamo.reset()
    # fullgraph: an error instead of a program that is compiled in pieces.
    compiler = partial(torch.compile, dynamic=False, fullgraph=True, backend=backend)
    smart, smart_compiled = Smart(), Smart(compiler)
    programs: dict[str, Program] = {
        LOOP: lambda z, z0: published(z, z0, order, radius),
        SMART: lambda z, z0: smart(z, z0, order, radius),
        SMART_CONSTANT: lambda z, z0, *backward: smart_compiled(z, z0, order, radius, *backward),
    }
    try:
        programs[SMART_CONSTANT](*inputs)
    except Exception as error:
        refused(SMART_CONSTANT, error)
        del programs[SMART_CONSTANT]
    return programs
