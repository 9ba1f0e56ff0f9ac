"""Events are validated in words and cannot be changed afterwards."""

import dataclasses

import numpy as np
import pytest

from adapmixed.privacy import (
    GaussianScreening,
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
        ({"loss_error": -1e-6}, "loss_error must be finite and >= 0"),
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
        ({"weight": 1.5}, r"weight must be in \[0, 1\], got 1.5"),
        ({"weight": float("nan")}, "weight must be finite and >= 0, got nan"),
        ({"sigma": 0.0}, "sigma must be > 0, got 0.0"),
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
        ({"adjacency": "zero-out"}, "adjacency must be one of"),
        ({"published": "yes"}, "published must be True or False"),
    ],
)
def test_renyi_bound_errors(arguments, message):
    good = {"order": 3, "epsilon": 0.1, "num_models": 2, "queries": 5, "adjacency": "zero_out"}
    assert RenyiBound(**good).published is False
    with pytest.raises(ValueError, match=message):
        RenyiBound(**{**good, **arguments})


@pytest.mark.parametrize("kind", [PublicAnswer, UnprotectedAnswer])
def test_answers_count_queries(kind):
    assert kind(np.int64(3)).queries == 3
    with pytest.raises(ValueError, match="queries must be an integer >= 0, got -2"):
        kind(-2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind(3).queries = 0
