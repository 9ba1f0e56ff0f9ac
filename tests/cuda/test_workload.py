"""The GPU's tests leave no operator out. This runs on a CPU."""

from __future__ import annotations

import pytest
import torch
import workload
from test_compile import _registered
from torch.utils._python_dispatch import TorchDispatchMode

import adapmixed_ext

# Operators that behave differently for a Clipping than for a Projection or bare weights.
OF_A_BOX = {f"{name} of a box" for name in ("leave_one_out", "log_prob", "mixture")}


class Called(TorchDispatchMode):
    """A mode that keeps the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        schema = func._schema
        space, name = schema.name.split("::")
        if space == "adapmixed":
            given = dict(zip((a.name for a in schema.arguments), args, strict=False))
            box = name in ("leave_one_out", "log_prob", "mixture") and given["upper"] > 0.0
            self.names.add(f"{name} of a box" if box else name)
        return func(*args, **(kwargs or {}))


def called(*operations: str) -> set[str]:
    x = workload.make(1, vocab=40)
    with Called() as mode:
        for name in operations:
            workload.draws(x, 1) if name == "draws" else workload.OPERATIONS[name](x)
    return mode.names


def test_every_operator_is_in_the_workload() -> None:
    assert called(*workload.OPERATIONS, "draws") == set(_registered()) | OF_A_BOX


def test_every_public_function_is_in_the_workload() -> None:
    """It is there by name, unless it comes with another one or has no kernel of its own."""
    functions = {
        name for name in adapmixed_ext.__all__
        if callable(f := getattr(adapmixed_ext, name)) and not isinstance(f, type)
    }  # fmt: skip
    assert functions - {"build_info"} == {*workload.OPERATIONS, "gaussian", "sample"}


@pytest.mark.parametrize("name", workload.OPERATIONS)
def test_an_operation_runs_its_operator(name: str) -> None:
    assert name in called(name)


def test_results_are_the_same_twice() -> None:
    x = workload.make(2, dtype=torch.bfloat16, vocab=40)
    for name, operation in workload.OPERATIONS.items():
        assert workload.same(operation(x), operation(x)), name
