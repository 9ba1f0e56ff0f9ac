"""Events for accountants."""

import numpy as np

from adapmixed.privacy import LeaveOneOutLoss, RenyiBound

DELTA = 1e-5


def losses(values, orders=(18.0,), adjacency="add_remove", loss_error=0.0):
    return LeaveOneOutLoss(orders, np.asarray(values, dtype=np.float64), adjacency, loss_error)


def random_losses(seed, num_models=5, queries=40, orders=(18.0,)):
    generator = np.random.default_rng(seed)
    values = generator.exponential(1e-3, (num_models, queries, len(orders)))
    values[generator.random(values.shape) < 0.3] = 0.0
    return losses(np.sort(values, axis=2), orders)


def bound(order=3.0, epsilon=0.01, queries=1, **changes):
    fields = {"num_models": 5, "adjacency": "zero_out", "published": False, **changes}
    return RenyiBound(order, epsilon, queries=queries, **fields)
