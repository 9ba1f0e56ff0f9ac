"""Fuzzed calls, torch's own checks and bad rows, on a GPU."""

from __future__ import annotations

import math

import cases
import checks
import pytest
import test_compile
import torch
import workload
from checks import on_device
from torch import Tensor

import adapmixed_ext

BATCHES, EACH = 10, 20


@pytest.mark.parametrize("batch", range(BATCHES))
def test_fuzzed_calls(batch: int, gpu: torch.device) -> None:
    operators = [name for name in checks.CHECKS if name != "clip_project"]  # see test_contract.py
    values = 0
    for seed in range(batch * EACH, (batch + 1) * EACH):
        report = checks.run(operators, *cases.fuzzed(seed), on_device(gpu))
        values += report.values
        assert not report.failures, "\n".join(report.failures[:5])
    assert values > 200


def arguments(name: str, gpu: torch.device) -> tuple[object, ...]:
    """Return the arguments of the CPU's test on the GPU; keys stay on the CPU, which reads them."""
    given = test_compile._inputs()[name]
    moved = (a.to(gpu) if isinstance(a, Tensor) and a.dtype != torch.uint8 else a for a in given)
    return (*moved, gpu) if name == "gaussian" else tuple(moved)


@pytest.mark.parametrize("name", test_compile._registered())
def test_opcheck(name: str, gpu: torch.device) -> None:
    operator = getattr(torch.ops.adapmixed, name).default
    result = torch.library.opcheck(operator, arguments(name, gpu))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", workload.OPERATIONS)
def test_compiled_equals_eager(name: str, gpu: torch.device) -> None:
    torch._dynamo.reset()
    operation = workload.OPERATIONS[name]
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    x = workload.make(21, 3, 2, 17, top_k=4).to(gpu)
    assert workload.same(compiled(x), operation(x))


@pytest.mark.parametrize("kind", cases.BAD)
def test_bad_rows_are_reported_and_say_nothing(kind: str, gpu: torch.device) -> None:
    private, public = cases.bad(kind)
    error = checks.raised(private, public)
    checks.check_bad_rows(private.to(gpu), public.to(gpu), error)


def test_arguments_that_the_cpu_would_refuse(gpu: torch.device) -> None:
    """A GPU cannot raise at once, so the answers are NaN and the losses infinite."""
    x = workload.make(30).to(gpu)
    projection = workload.project(x)
    targets = x.targets.clone()
    targets[1] = -1
    targets[2] = x.public.shape[1]
    log_prob = adapmixed_ext.log_prob(x.private, x.public, projection, targets)
    assert log_prob.isnan().tolist() == [False, True, True]
    weight = torch.full_like(projection.weight, 0.5)
    weight[1, 1] = 1.5
    loss = adapmixed_ext.leave_one_out(x.private, x.public, weight, orders=2.0)
    assert (loss[:, 1] == math.inf).all() and loss[:, [0, 2]].isfinite().all()
    assert adapmixed_ext.mixture(x.private, x.public, weight)[1].isnan().all()


def test_devices_are_not_mixed(gpu: torch.device) -> None:
    x = workload.make(32)
    with pytest.raises(ValueError, match="public_logits must be on device cuda:0, got cpu"):
        adapmixed_ext.project(x.private.to(gpu), x.public, order=2, radius=1.0)
