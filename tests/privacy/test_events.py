"""Events: bad fields are named."""

import math

import numpy as np
import pytest
from privacy_cases import bound, clipped, losses, pooled

from adapmixed.privacy import (
    Caveat,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: losses([[[0.0]], [[np.nan]]]), "loss must be >= 0 and not NaN"),
        (lambda: losses([[[0.0]], [[-1e-300]]]), "loss must be >= 0 and not NaN"),
        (lambda: LeaveOneOutLoss((2.0,), np.zeros((2, 3)), "zero_out"), "loss"),
        (lambda: losses(np.zeros((2, 3, 1)), (0.5,)), "orders"),
        (lambda: losses(np.zeros((2, 3, 1)), adjacency="replace"), "adjacency"),
        (lambda: GaussianScreening(100, -1, 1e-4, 1e-2), "queries"),
        (lambda: RenyiBound(1.0, 0.1, 2, 5), "order"),
        (lambda: bound(epsilon=math.nan), "epsilon"),
        (lambda: bound(budget=0), "budget"),
        (lambda: bound(published=1), "published"),
        (lambda: clipped(lower=1.5), "lower"),
        (lambda: clipped(upper=0.5), "upper"),
        (lambda: pooled(lower=0.1), "lower"),
        (lambda: pooled(scale=-1.0), "scale"),
        (lambda: IndividualCharge(None, np.full((3, 1), -1e-9)), ">= 0"),
        (lambda: IndividualCharge(1.0, np.zeros((3, 1))), "order"),
        (lambda: Caveat("luck"), "name"),
        (lambda: PublicAnswer(-2), "queries"),
    ],
)
def test_bad_fields_of_events_are_named(make, name):
    with pytest.raises(ValueError, match=name):
        make()
