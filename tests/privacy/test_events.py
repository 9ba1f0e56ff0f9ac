"""Events with bad fields raise clear messages, and events cannot be changed afterwards."""

import dataclasses
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
    UnprotectedAnswer,
)


def loss_event(loss, orders=(18.0,), adjacency="add_remove", loss_error=1e-6):
    return LeaveOneOutLoss(orders, loss, adjacency, loss_error)


def test_loss_is_a_read_only_copy():
    loss = np.ones((3, 2, 1))
    event = loss_event(loss)
    loss[0, 0, 0] = 7.0  # the caller's array stays the caller's
    assert event.loss[0, 0, 0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        event.loss[0, 0, 0] = 0.0
    assert (event.num_models, event.queries) == (3, 2)


def test_infinite_loss_and_zero_positions_are_legal():
    assert np.isinf(loss_event(np.full((2, 1, 1), np.inf)).loss).all()
    assert loss_event(np.zeros((2, 0, 1))).queries == 0
    assert loss_event(np.zeros((1, 4, 2)), orders=[2, 8]).orders == (2.0, 8.0)


@pytest.mark.parametrize("bad", [np.nan, -1e-300, -np.inf])
def test_loss_rejects_nan_and_negative(bad):
    loss = np.zeros((2, 3, 1))
    loss[1, 2, 0] = bad
    with pytest.raises(ValueError, match="loss must be >= 0 and not NaN"):
        loss_event(loss)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": np.zeros((2, 3))}, "loss must have shape"),
        ({"loss": np.zeros((0, 3, 1))}, "loss must have shape"),
        ({"loss": np.zeros((2, 3, 2))}, "loss must have shape"),
        ({"loss": np.zeros((2, 3, 1), np.float32)}, "float64 numpy array, got float32"),
        ({"loss": [[[0.0]]]}, "float64 numpy array, got list"),
        ({"orders": (0.5,)}, "orders must be > 1, got 0.5"),
        ({"orders": (float("inf"),)}, "orders must be finite, got inf"),
        ({"orders": (float("nan"),)}, "orders must be > 1, got nan"),
        ({"orders": 18.0}, "orders must be a sequence"),
        ({"orders": ()}, "one or more distinct"),
        ({"orders": (2, 2), "loss": np.zeros((2, 3, 2))}, "one or more distinct"),
        ({"adjacency": "replace"}, "adjacency must be one of"),
        ({"loss_error": -1e-6}, "loss_error must be"),
    ],
)
def test_leave_one_out_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        loss_event(**{"loss": np.zeros((2, 3, 1)), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_models": 0}, "num_models must be an integer >= 1, got 0"),
        ({"num_models": 2.0}, "num_models must be an integer, got 2.0"),
        ({"num_models": True}, "num_models must be an integer >= 1, got True"),
        ({"queries": -1}, "queries must be an integer >= 0, got -1"),
        ({"weight": 1.5}, "weight must be"),
        ({"weight": float("nan")}, "weight must be"),
        ({"sigma": 0.0}, "sigma must be"),
        ({"sigma": float("inf")}, "sigma must be finite"),
        ({"sigma": "small"}, "sigma must be a number, got 'small'"),
    ],
)
def test_screening_errors(arguments, message):
    good = {"num_models": 100, "queries": 1, "weight": 1e-4, "sigma": 1e-2}
    assert GaussianScreening(**good).num_models == 100
    with pytest.raises(ValueError, match=message):
        GaussianScreening(**{**good, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": 1.0}, "order must be > 1, got 1.0"),
        ({"epsilon": -0.1}, "epsilon must be >= 0, got -0.1"),
        ({"epsilon": float("nan")}, "epsilon must be >= 0, got nan"),
        ({"num_models": 0}, "num_models must be"),
        ({"queries": 1.5}, "queries must be"),
        ({"budget": 0}, "budget must be an integer >= 1, got 0"),
        ({"published": "yes"}, "published must be True or False"),
    ],
)
def test_renyi_bound_errors(arguments, message):
    good = {"order": 3, "epsilon": 0.1, "num_models": 2, "queries": 5}
    assert RenyiBound(**good).published is False
    with pytest.raises(ValueError, match=message):
        RenyiBound(**{**good, **arguments})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: clipped(lower=1.5), "lower"),
        (lambda: clipped(upper=0.5), r"upper \(a ratio\) must be >= 1, got 0.5"),
        (lambda: clipped(budget=0), "budget must be an integer >= 1, got 0"),
        (lambda: clipped(budget=None), "budget must be an integer, got None"),
        (lambda: clipped(queries=-1), "queries must be an integer >= 0, got -1"),
        (lambda: clipped(num_models=0), "num_models must be an integer >= 1"),
        (lambda: pooled(lower=0.1), "lower"),
        (lambda: pooled(lower=-math.inf), "lower"),
        (lambda: pooled(upper=-0.1), "upper"),
        (lambda: pooled(scale=-1.0), "scale must be"),
        (lambda: pooled(lower="a"), "lower"),
        (lambda: clipped(budget=10**400), "budget must be"),
        (lambda: pooled(budget=1.5), "budget must be an integer, got 1.5"),
    ],
)
def test_errors_of_clipped_answers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("charges", "message"),
    [
        (np.zeros(3), "charge must have shape"),
        (np.zeros((0, 1)), "charge must have shape"),
        (np.zeros((3, 1), dtype=np.float32), "float64 numpy array, got float32"),
        (np.full((3, 1), np.nan), "not NaN"),
        (np.full((3, 1), -1e-9), ">= 0"),
    ],
)
def test_bad_charges_are_refused(charges, message):
    with pytest.raises(ValueError, match=message):
        IndividualCharge("zcdp", None, charges)


def test_a_charge_is_a_read_only_copy_in_a_unit():
    charges = np.ones((3, 2))
    event = IndividualCharge("renyi", 4, charges)
    charges[0, 0] = 7.0
    assert event.charge[0, 0] == 1.0 and not event.charge.flags.writeable
    assert (event.num_models, event.queries, event.order) == (3, 2, 4.0)
    for unit in (("renyi", None), ("zcdp", 2.0), ("pure", None), ("renyi", 1.0)):
        with pytest.raises(ValueError, match="measure must be|order must be"):
            IndividualCharge(*unit, charges)


def test_a_caveat_is_a_known_one():
    assert Caveat("seeded").name == "seeded"
    with pytest.raises(ValueError, match="name must be one of .*, got 'luck'"):
        Caveat("luck")


@pytest.mark.parametrize("kind", [PublicAnswer, UnprotectedAnswer])
def test_answers_count_queries(kind):
    assert kind(np.int64(3)).queries == 3
    with pytest.raises(ValueError, match="queries must be an integer >= 0, got -2"):
        kind(-2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind(3).queries = 0
