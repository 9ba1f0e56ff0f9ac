"""Properties that hold for all inputs, searched by hypothesis with fixed seeds."""

from __future__ import annotations

import math
import random

import cases
import checks
import mpmath as mp
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpf
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Projection

ORDERS = (1.01, 1.5, 2.0, 3.0, 8.0, 18.0, 64.0, 256.0)
RADII = (1e-6, 1e-3, 0.03, 0.5, 3.6, 50.0)
INF = math.inf
Pair = tuple[Tensor, Tensor]

orders = st.sampled_from(ORDERS)
radii = st.sampled_from(RADII)
adjacencies = st.sampled_from(checks.ADJACENCIES)
dtypes = st.sampled_from(cases.DTYPES)


def few(examples: int) -> settings:
    return settings(derandomize=True, deadline=None, max_examples=examples, database=None)


@st.composite
def ensembles(draw: st.DrawFn, most_models: int = 5, wide: bool = True) -> tuple[Tensor, Tensor]:
    """Draw rows number by number (with masks, ties and extremes) or from a seed."""
    models = draw(st.integers(1, most_models))
    dtype = draw(dtypes)
    if wide and draw(st.booleans()):
        vocab = draw(st.sampled_from((40, 999, 1024, 2049)))
        spread, noise = draw(st.sampled_from((1.0, 5.0, 30.0))), draw(st.sampled_from((0.01, 0.8)))
        private, public = cases.logits(draw(st.integers(0, 999)), models, 1, vocab, spread, noise)
        return private.to(dtype), public.to(dtype)
    vocab = draw(st.integers(1, 5))
    number = st.one_of(
        st.floats(-12, 12, width=16), st.sampled_from((0.0, 0.0, 1.0, -40.0, 90.0, -INF))
    )
    row = st.lists(number, min_size=vocab, max_size=vocab).filter(lambda x: max(x) > -INF)
    private = torch.tensor([[draw(row)] for _ in range(models)])
    return private.to(dtype), torch.tensor([draw(row)]).to(dtype)


def project(private: Tensor, public: Tensor, order: float, radius: float) -> Projection:
    return adapmixed_ext.project(private, public, order=order, radius=radius)


def same_weights(one: Projection, other: Projection) -> None:
    """Check that two answers to one question are within 1e-5 below the same optimum."""
    low, high = torch.minimum(one.weight, other.weight), torch.maximum(one.weight, other.weight)
    assert (low >= high * (1 - checks.TOLERANCE) - checks.LEAST).all(), (one, other)


def same_losses(one: Tensor, other: Tensor) -> None:
    """Check that two losses of one pair of distributions agree within the error of a loss."""
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    error = 1 + adapmixed_ext.loss_error
    near = (low + checks.FLOOR) * error >= (high - checks.FLOOR) / (1 + checks.TOLERANCE)
    assert (near | (low == high)).all(), (one, other)


def losses(private: Tensor, public: Tensor, weight: Tensor, order: float, way: str) -> Tensor:
    return adapmixed_ext.leave_one_out(private, public, weight, orders=order, adjacency=way)


def moved(projection: Projection, private: Tensor, public: Tensor, index: Tensor) -> Projection:
    """Return the weights of a projection for the models in another order."""
    fresh = project(private, public, 2.0, 0.5)
    return Projection(
        projection.weight[index], projection.complement[index],
        fresh.private_lse, fresh.public_lse, fresh.status,
    )  # fmt: skip


@few(240)
@given(ensembles(), orders, radii, adjacencies, st.randoms(use_true_random=False))
@pytest.mark.slow
def test_models_and_tokens_may_come_in_any_order(
    pair: Pair,
    order: float,
    radius: float,
    way: str,
    shuffle: random.Random,
) -> None:
    private, public = pair
    models, tokens = list(range(private.shape[0])), list(range(private.shape[2]))
    shuffle.shuffle(models)
    shuffle.shuffle(tokens)
    index = torch.tensor(models)
    there, public_there = private[index][..., tokens], public[:, tokens]
    here, other = (
        project(private, public, order, radius),
        project(there, public_there, order, radius),
    )
    assert torch.equal(
        project(private[index], public, order, radius).weight, here.weight[index]
    )  # a row does not depend on the others
    same_weights(moved(here, there, public_there, index), other)
    same_losses(
        losses(private, public, here, order, way)[index],
        losses(there, public_there, moved(here, there, public_there, index), order, way),
    )


@few(240)
@given(
    ensembles(), orders, radii, adjacencies, st.lists(st.integers(-64, 64), min_size=6, max_size=6)
)
def test_a_constant_added_to_a_row_changes_nothing(
    pair: Pair,
    order: float,
    radius: float,
    way: str,
    shifts: list[int],
) -> None:
    """The dtype adds these constants without rounding."""
    private, public = pair
    private, public = private.float().bfloat16().float(), public.float().bfloat16().float()
    # Multiples of 1/256 up to 1000 stay exact in float32 after the shift.
    private, public = (private * 256).round() / 256, (public * 256).round() / 256
    shift = torch.tensor(shifts[: private.shape[0]], dtype=torch.float32).view(-1, 1, 1)
    there, public_there = private + shift, public + shifts[-1]
    assert torch.equal((there - shift), private)
    here, other = (
        project(private, public, order, radius),
        project(there, public_there, order, radius),
    )
    same_weights(here, other)
    index = torch.arange(private.shape[0])
    same_losses(
        losses(private, public, here, order, way),
        losses(there, public_there, moved(here, there, public_there, index), order, way),
    )


@few(200)
@given(ensembles(1), st.integers(2, 9), orders, radii, st.floats(0, 1))
def test_identical_models_lose_nothing(
    pair: Pair,
    count: int,
    order: float,
    radius: float,
    weight: float,
) -> None:
    private, public = pair
    many = private.expand(count, *public.shape)
    weights = torch.full(many.shape[:2], weight, dtype=torch.float64)
    for projection in (project(many, public, order, radius), weights):
        loss = losses(many, public, projection, order, "add_remove")
        assert (loss == 0).all(), loss
    same = public.expand(count, *public.shape)
    for way in checks.ADJACENCIES:
        assert (losses(same, public, weights, order, way) == 0).all()


@few(200)
@given(ensembles(3), st.integers(2, 9), orders, radii)
def test_emptying_one_of_identical_models_is_a_loss(
    pair: Pair,
    count: int,
    order: float,
    radius: float,
) -> None:
    """A zero-out loss is 0 only if the model equals the public one."""
    private, public = pair
    many = private[:1].expand(count, *public.shape)
    projection = project(many, public, order, radius)
    loss = losses(many, public, projection, order, "zero_out")[0, 0, 0].item()
    exact = checks.exact_loss(
        many[:, 0], public[0], projection.weight[:, 0], projection.complement[:, 0], 0, order,
        "zero_out",
    ) if public.shape[1] < 99 else None  # fmt: skip
    assert exact is None or checks.loss_holds(loss, exact), (loss, exact)
    if exact is not None and exact > 2 * checks.FLOOR:
        assert loss > 0


@few(320)
@given(ensembles(), orders, radii, st.floats(1.0, 3.0))
@pytest.mark.slow
def test_a_larger_ball_admits_no_smaller_weight(
    pair: Pair,
    order: float,
    radius: float,
    factor: float,
) -> None:
    small, large = project(*pair, order, radius), project(*pair, order, radius * factor)
    assert (large.weight >= small.weight * (1 - checks.TOLERANCE) - checks.LEAST).all()
    whole = project(*pair, order, 1e5)
    assert (whole.weight >= small.weight * (1 - checks.TOLERANCE) - checks.LEAST).all()


@few(320)
@given(
    ensembles(), orders, radii, adjacencies, st.lists(st.floats(1.01, 256), min_size=2, max_size=6)
)
def test_a_higher_order_sees_no_smaller_loss(
    pair: Pair,
    order: float,
    radius: float,
    way: str,
    several: list[float],
) -> None:
    several = sorted(several)
    projection = project(*pair, order, radius)
    loss = adapmixed_ext.leave_one_out(*pair, projection, orders=several, adjacency=way)
    lower, higher = loss[..., :-1], loss[..., 1:]
    upper = higher * (1 + adapmixed_ext.loss_error) + checks.FLOOR
    assert (upper >= (lower - checks.FLOOR) / (1 + checks.TOLERANCE)).all(), loss


@few(240)
@given(ensembles(4, wide=False), orders, radii, orders, adjacencies)
def test_every_neighbour_of_a_tiny_ensemble(
    pair: Pair,
    order: float,
    radius: float,
    loss_order: float,
    way: str,
) -> None:
    """Weights and losses match ensembles rebuilt without each model, at 70 digits both ways."""
    private, public = pair
    result = project(private, public, order, radius)
    loss = losses(private, public, result, loss_order, way)
    bars, q = oracle.projected(
        private[:, 0], public[0], result.weight[:, 0], result.complement[:, 0]
    )
    mixture = oracle.mean(bars)
    for i in range(private.shape[0]):
        ball = oracle.Ball(private[i, 0], public[0])
        w, c = result.weight[i, 0].item(), result.complement[i, 0].item()
        assert not checks.weight_fault(ball, w, c, order, radius), (i, w, c)
        other = oracle.neighbour(bars, q, i, way)
        ways = oracle.renyi(mixture, other, loss_order), oracle.renyi(other, mixture, loss_order)
        got = loss[i, 0, 0].item()
        upper = mpf(got) * (1 + mpf(adapmixed_ext.loss_error)) + checks.FLOOR
        assert all(exact <= upper for exact in ways), (i, got, [mp.nstr(x) for x in ways])
        assert checks.loss_holds(got, max(ways)), (i, got, mp.nstr(max(ways), 17))


@few(160)
@given(ensembles(4, wide=False), st.floats(0, 1), orders, adjacencies)
def test_every_neighbour_at_any_weights(pair: Pair, weight: float, order: float, way: str) -> None:
    private, public = pair
    weights = torch.linspace(weight, 1.0, private.shape[0], dtype=torch.float64).view(-1, 1)
    loss = losses(private, public, weights, order, way)
    for i in range(private.shape[0]):
        exact = checks.exact_loss(
            private[:, 0], public[0], weights[:, 0], 1 - weights[:, 0], i, order, way
        )
        assert checks.loss_holds(loss[i, 0, 0].item(), exact), (i, loss[i, 0, 0], exact)


@pytest.mark.parametrize("way", checks.ADJACENCIES)
def test_the_laws_notice_a_wrong_answer(way: str) -> None:
    """The comparisons above are tight enough to notice errors just beyond the bounds."""
    private, public = cases.logits(5, 3, 1, 9, 2.0, 1.0)
    right = project(private, public, 3.0, 0.03)
    wrong = Projection(right.weight * (1 - 2e-5), 1 - right.weight * (1 - 2e-5), *_rest(right))
    with pytest.raises(AssertionError):
        same_weights(right, wrong)
    loss = losses(private, public, right, 3.0, way)
    with pytest.raises(AssertionError):
        same_losses(loss, loss * (1 - 3e-5))
    for i in range(3):
        ball = oracle.Ball(private[i, 0], public[0])
        above = right.weight[i, 0].item() * (1 + 2e-5)
        below = right.weight[i, 0].item() * (1 - 2e-5)
        assert checks.weight_fault(ball, above, 1 - above, 3.0, 0.03) == "infeasible"
        assert checks.weight_fault(ball, below, 1 - below, 3.0, 0.03) == "weight too small"


def _rest(projection: Projection) -> tuple[Tensor, Tensor, Tensor]:
    return projection.private_lse, projection.public_lse, projection.status
