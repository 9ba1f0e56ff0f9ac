"""Events and proposals for accountants."""

from dataclasses import dataclass

import numpy as np

from adapmixed.privacy import (
    BoundedRangeAnswer,
    ClippedAnswer,
    LeaveOneOutLoss,
    RenyiBound,
)
from adapmixed.privacy.events import Origin

DELTA = 1e-5


def losses(values, orders=(18.0,), adjacency="zero_out"):
    return LeaveOneOutLoss(orders, np.asarray(values, dtype=np.float64), adjacency)


def random_losses(seed, num_models=5, queries=40, orders=(18.0,), adjacency="zero_out"):
    generator = np.random.default_rng(seed)
    values = generator.exponential(1e-3, (num_models, queries, len(orders)))
    values[generator.random(values.shape) < 0.3] = 0.0
    return losses(np.sort(values, axis=2), orders, adjacency)


def bound(order=3.0, epsilon=0.01, queries=1, **changes):
    return RenyiBound(order, epsilon, queries=queries, **{"num_models": 5, **changes})


def clipped(queries=1, budget=500, **changes):
    fields = {"lower": 0.7, "upper": 1.6, "num_models": 20, **changes}
    return ClippedAnswer(**fields, queries=queries, budget=budget)


def pooled(queries=1, budget=None, **changes):
    fields = {"scale": 2.0, "lower": -0.25, "upper": 0.5, "num_models": 20, **changes}
    return BoundedRangeAnswer(**fields, queries=queries, budget=budget)


@dataclass(frozen=True)
class Kind:
    """A mechanism, as an accountant sees it."""

    name: str = "a mechanism"
    measure: tuple[str, float | None] | None = None
    no_budget: str = ""
    no_total: str = ""
    no_replacement: str = ""
    planned_queries: int | None = None
    largest: float | None = None

    def largest_charge(self, num_models):
        return self.largest


POOLED, BOXED = Kind(measure=("zcdp", None)), Kind(measure=("renyi", 4.0))


class Offer:
    """A ticket, as an accountant sees it, which records the outcome."""

    def __init__(self, events=(), charges=None, *, mechanism=None, ensemble=None, models=5):
        default = Kind() if charges is None else POOLED
        self.mechanism = default if mechanism is None else mechanism
        self.charges = None if charges is None else np.array(charges, dtype=np.float64)
        self.num_models = models if charges is None else len(self.charges)
        self.origin = Origin(ensemble, ())
        self.whole, self.states = list(events), []
        self.active = None

    def charge(self, pay):
        if self.states:
            raise ValueError("ticket must be charged once")
        self.states.append("begun")
        try:
            self.active = pay(self.whole, self.charges)
        except BaseException:
            self.states.append("failed")
            raise
        self.states.append("charged")
