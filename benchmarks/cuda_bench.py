"""Shared by the tables on a GPU: the card, its inputs, our calls, and the time limit."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.calls import EIGHT_ORDERS, rotate, two_calls
from benchmarks.cuda_timing import Card, Contestant, interleave
from benchmarks.harness import Query, Report, Timing
from benchmarks.inputs import make_queries, make_query
from benchmarks.scaling import Sizes

GRAPH = ", graph"
BASE = f"ours: two calls, K = 1{GRAPH}"


@dataclass
class Bench:
    """The card, the limits and the report that every table uses.

    Attributes:
        until: a ``time.monotonic()``; nothing new begins after it.
        left_out: the runs left out for lack of time or memory.
        save: writes the results so far, since the program may be ended at any time.
    """

    card: Card
    report: Report
    sizes: Sizes
    until: float = math.inf
    left_out: list[str] = field(default_factory=list)
    save: Callable[[], None] = lambda: None

    def late(self, what: str) -> bool:
        """Return whether the time is over, and say so."""
        if time.monotonic() < self.until:
            return False
        self.leave_out(what, "the time is over")
        return True

    def leave_out(self, what: str, why: object) -> None:
        """Report and keep that there is no figure."""
        first = str(why).strip().partition("\n")[0]
        self.report.say(f"  left out: {what}: {first}")
        self.left_out.append(f"{what}: {first}")

    def queries(
        self, models: int, vocab: int, *, kind: str = "near", positions: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> list[Query]:  # fmt: skip
        """Return queries in rotation on the card; one, if it far exceeds the cache."""
        device, cache = self.card.device, self.card.cache
        if dtype.itemsize * models * positions * vocab > 8 * cache:
            return [make_query(models, vocab, kind=kind, positions=positions, dtype=dtype,
                               device=device)]  # fmt: skip
        return make_queries(models, vocab, kind=kind, positions=positions, dtype=dtype,
                            device=device, cache=cache)  # fmt: skip

    def time(
        self, contestants: Mapping[str, Contestant], runs: Mapping[str, int]
    ) -> dict[str, Timing]:
        """Time one interleaved run."""
        few = {name: self.sizes.runs(count) for name, count in runs.items()}
        return interleave(self.card, contestants, few, self.leave_out)


def ours(queries: list[Query], order: float, radius: float) -> dict[str, Contestant]:
    """Return the two calls for one order and eight, replayed and called."""
    result = {}
    for orders in (order, EIGHT_ORDERS):
        label = f"ours: two calls, K = {8 if orders is EIGHT_ORDERS else 1}"
        turn = rotate(queries, two_calls, order, radius, orders)
        result[label] = Contestant(turn, len(queries))
        result[label + GRAPH] = Contestant(turn, len(queries), replay=True)
    return result


def base_of(timings: Mapping[str, Timing]) -> str:
    """Return the base of ratios: the replayed calls, or the calls if those were not captured."""
    return BASE if BASE in timings else BASE.removesuffix(GRAPH)
