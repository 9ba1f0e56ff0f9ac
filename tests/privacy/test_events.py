"""Events with bad fields raise clear messages, and events cannot be changed afterwards."""

import math

import numpy as np
import pytest
from accountant_cases import clipped, pooled

from adapmixed.privacy import (
    Caveat,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
)


def loss_event(loss, orders=(18.0,), adjacency="add_remove"):
    return LeaveOneOutLoss(orders, loss, adjacency)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: loss_event(np.array([[[0.0]], [[np.nan]]])), "loss must be >= 0 and not NaN"),
        (lambda: loss_event(np.array([[[0.0]], [[-1e-300]]])), "loss must be >= 0 and not NaN"),
        (lambda: loss_event(np.array([[[0.0]], [[-np.inf]]])), "loss must be >= 0 and not NaN"),
        (lambda: loss_event(np.zeros((2, 3))), "loss"),
        (lambda: loss_event(np.zeros((2, 3, 1)), (0.5,)), "orders"),
        (lambda: loss_event(np.zeros((2, 3, 1)), adjacency="replace"), "adjacency"),
        (lambda: GaussianScreening(0, 1, 1e-4, 1e-2), "num_models"),
        (lambda: GaussianScreening(100, -1, 1e-4, 1e-2), "queries"),
        (lambda: GaussianScreening(100, 1, 1.5, 1e-2), "weight"),
        (lambda: GaussianScreening(100, 1, 1e-4, 0.0), "sigma"),
        (lambda: RenyiBound(1.0, 0.1, 2, 5), "order"),
        (lambda: RenyiBound(3, math.nan, 2, 5), "epsilon"),
        (lambda: RenyiBound(3, 0.1, 2, 5, budget=0), "budget"),
        (lambda: clipped(lower=1.5), "lower"),
        (lambda: clipped(upper=0.5), "upper"),
        (lambda: pooled(lower=0.1), "lower"),
        (lambda: pooled(scale=-1.0), "scale"),
        (lambda: IndividualCharge("zcdp", None, np.full((3, 1), -1e-9)), ">= 0"),
        (lambda: IndividualCharge("renyi", None, np.zeros((3, 1))), "order"),
        (lambda: Caveat("luck"), "name"),
        (lambda: PublicAnswer(-2), "queries"),
    ],
)
def test_bad_fields_are_named(make, name):
    with pytest.raises(ValueError, match=name):
        make()
