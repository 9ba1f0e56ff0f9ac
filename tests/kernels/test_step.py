"""The fused step gives the bits and errors of its two operators called one by one."""

from __future__ import annotations

import math
from collections.abc import Callable

import cases
import pytest
import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C, Projection
from adapmixed_ext._leave_one_out import step

ISAS = ("scalar", "avx2", "avx512")
ORDERS = [3.0, 18.0]


def one_by_one(
    private: Tensor, public: Tensor, order: float, radius: float, **options: object
) -> tuple[Projection, Tensor]:
    projection = adapmixed_ext.project(private, public, order=order, radius=radius)
    return projection, adapmixed_ext.leave_one_out(private, public, projection, **options)


def fused(
    private: Tensor, public: Tensor, order: float, radius: float, **options: object
) -> tuple[Projection, Tensor]:
    return step(private, public, order=order, radius=radius, **options)


def tensors(result: tuple[Projection, Tensor]) -> list[Tensor]:
    found, loss = result
    return [found.weight, found.complement, found.private_lse, found.public_lse, found.status, loss]


def inputs(dtype: torch.dtype) -> list[cases.Case]:
    """Return many models, computed in single precision, and corner cases, which are not."""
    private, public = cases.logits(40, 6, 3, 1501, 2.0, 0.5)
    private[:, :, -47:] = public[:, -47:] = -math.inf
    private[2, 1, 7] = -math.inf
    plain = cases.Case("plain", private.to(dtype), public.to(dtype))
    # float16 ends at 65504, so the larger offsets of the corner cases are not finite.
    corners = [c for c in cases.corners() if c.private.to(dtype).isfinite().any(-1).all()]
    corners = [c for c in corners if not c.private.to(dtype).isposinf().any()]
    corners = [c for c in corners if c.public.to(dtype).isfinite().any(-1).all()]
    return [plain] + [cases.Case(c.name, c.private.to(dtype), c.public.to(dtype)) for c in corners]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_step_is_its_parts(dtype: torch.dtype, isa: str) -> None:
    if not _C.use_instruction_set(isa):
        pytest.skip(f"this machine or build has no {isa} path")
    for case in (*inputs(dtype), *cases.strided()):
        for order, radius in ((18.0, 3.6), (3.0, 0.03), (2.0, 0.5)):
            for adjacency, extra in (("add_remove", 0), ("zero_out", 3)):
                options = {
                    "orders": ORDERS,
                    "adjacency": adjacency,
                    "num_models": case.private.shape[0] + extra,
                }
                torch.set_num_threads(1)
                expected = tensors(one_by_one(case.private, case.public, order, radius, **options))
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    got = tensors(fused(case.private, case.public, order, radius, **options))
                    for ours, theirs in zip(got, expected, strict=True):
                        assert ours.dtype == theirs.dtype
                        assert torch.equal(ours, theirs), (case.name, order, adjacency, threads)


def test_no_positions() -> None:
    projection, loss = step(
        torch.zeros(3, 0, 5), torch.zeros(0, 5), order=3, radius=1, orders=ORDERS
    )
    assert projection.weight.shape == (3, 0)
    assert loss.shape == (3, 0, 2)


def _nan_private(private: Tensor, public: Tensor) -> None:
    private[2, 1, 5] = math.nan


def _inf_private(private: Tensor, public: Tensor) -> None:
    private[4, 0, 700] = math.inf


def _empty_private(private: Tensor, public: Tensor) -> None:
    private[0, 1] = -math.inf


def _nan_public(private: Tensor, public: Tensor) -> None:
    public[1, 6] = math.nan


def _both(private: Tensor, public: Tensor) -> None:
    private[3, 0, 2] = math.nan
    public[1] = -math.inf


def _large(private: Tensor, public: Tensor) -> None:
    private[5, 1] += 2e6


@pytest.mark.parametrize(
    "spoil", [_nan_private, _inf_private, _empty_private, _nan_public, _both, _large]
)
def test_bad_rows_raise_as_one_by_one(spoil: Callable[[Tensor, Tensor], None]) -> None:
    private, public = cases.logits(41, 6, 2, 1501, 2.0, 0.5)
    spoil(private, public)
    for order, radius in ((18.0, 3.6), (3.0, 0.03), (2.0, 0.5)):
        messages = []
        for call in (one_by_one, fused):
            with pytest.raises(ValueError) as error:
                call(private, public, order, radius, orders=ORDERS)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize(
    "changed",
    [
        {"order": 1.0},
        {"radius": -1.0},
        {"radius": math.nan},
        {"orders": []},
        {"orders": [1.0]},
        {"orders": [2.0] * 33},
        {"adjacency": "replace"},
        {"num_models": 5},
        {"num_models": 6.0},
    ],
    ids=str,
)
def test_bad_arguments_raise_as_one_by_one(changed: dict[str, object]) -> None:
    private, public = cases.logits(42, 6, 2, 33, 2.0, 0.5)
    options: dict[str, object] = {"order": 3.0, "radius": 1.0, "orders": ORDERS, **changed}
    messages = []
    for call in (one_by_one, fused):
        with pytest.raises(ValueError) as error:
            call(private, public, **options)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert next(iter(changed)) in messages[0]


def test_the_step_is_internal() -> None:
    assert "step" not in adapmixed_ext.__all__
