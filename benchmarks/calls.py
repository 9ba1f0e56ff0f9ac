"""Our contestants: the operators as a user calls them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import adapmixed_ext
from adapmixed.rng import SeededRandom
from adapmixed_ext import Projection
from benchmarks.harness import Call, Query

EIGHT_ORDERS = (2.0, 4.0, 8.0, 12.0, 18.0, 32.0, 64.0, 128.0)
OURS = "ours: project + leave_one_out"
OURS_8 = "ours: project + leave_one_out, K = 8"
# What a program meets whose models run in torch: torch's threads still spin when ours start.
AFTER_TORCH = "ours: the two calls right after torch"

Orders = float | Sequence[float]


def two_calls(
    query: Query, order: float, radius: float, orders: Orders
) -> tuple[Projection, Tensor]:
    """Call `project`, then `leave_one_out`."""
    projection = adapmixed_ext.project(*query, order=order, radius=radius)
    return projection, adapmixed_ext.leave_one_out(*query, projection, orders=orders)


def evaluate(query: Query, order: float, radius: float, targets: Tensor) -> Tensor:
    """Compute the log-probability of one query's target, as a perplexity does."""
    projection = adapmixed_ext.project(*query, order=order, radius=radius)
    return adapmixed_ext.log_prob(*query, projection, targets)


def draw(query: Query, order: float, radius: float, rng: SeededRandom) -> Tensor:
    """Compute the mixture of one query and draw a token."""
    projection = adapmixed_ext.project(*query, order=order, radius=radius)
    p = adapmixed_ext.mixture(*query, projection)
    return adapmixed_ext.sample(p, query[1], rng=rng)


def rotate(queries: Sequence[Query], call: Callable[..., object], *arguments: object) -> Call:
    """Return ``call`` on the query of the turn."""
    return lambda turn: call(queries[turn % len(queries)], *arguments)


def our_calls(queries: Sequence[Query], order: float, radius: float) -> dict[str, Call]:
    """Return the two calls, for one order and for eight."""
    return {
        OURS: rotate(queries, two_calls, order, radius, order),
        OURS_8: rotate(queries, two_calls, order, radius, EIGHT_ORDERS),
        AFTER_TORCH: rotate(queries, two_calls, order, radius, order),
    }


def keep_torch_busy() -> None:
    """Run an operation that wakes torch's threads."""
    _ONES.sum()


_ONES = torch.ones(2**20)
