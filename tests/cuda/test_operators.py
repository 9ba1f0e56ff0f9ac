"""Fuzzed calls, torch's own checks and bad rows, on a GPU."""

from __future__ import annotations

import math

import bad_rows
import fuzz
import fuzz_cases
import pytest
import test_compile
import torch
import workload
from checks import Report
from on_device import OnDevice
from torch import Tensor

import adapmixed_ext

BATCHES, EACH = 10, 20
REPLAYED = (1227, 4014, 4493, 4896)  # seeds that once failed on a CPU


@pytest.mark.parametrize("batch", range(BATCHES))
def test_fuzzed_calls(batch: int, gpu: torch.device) -> None:
    total = Report()
    for seed in range(batch * EACH, (batch + 1) * EACH):
        call = fuzz_cases.build(seed)
        if call.expected is None:
            total.add(fuzz.run(call, OnDevice(gpu)))
    assert total.values > 200
    assert not total.failures, "\n".join(total.failures[:5])


@pytest.mark.parametrize("seed", REPLAYED)
def test_what_once_failed(seed: int, gpu: torch.device) -> None:
    report = fuzz.run(fuzz_cases.build(seed), OnDevice(gpu))
    assert not report.failures, "\n".join(report.failures[:5])


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


@pytest.mark.parametrize("dtype", test_compile.cases.DTYPES)
def test_compiled_equals_eager(dtype: torch.dtype, gpu: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(test_compile.everything, fullgraph=True, backend="aot_eager")
    given = tuple(a.to(gpu) for a in test_compile._arguments(dtype, 2, 17))
    for got, expected in zip(compiled(*given), test_compile.everything(*given), strict=True):
        assert torch.equal(got, expected)


def spoiled() -> list[fuzz_cases.Call]:
    calls = (fuzz_cases.build(seed) for seed in range(300))
    return [call for call in calls if call.expected is not None]


def test_bad_rows_are_reported_and_say_nothing(gpu: torch.device) -> None:
    calls = spoiled()
    assert len(calls) >= 10
    for call in calls:
        private, public = call.private.to(gpu), call.public.to(gpu)
        projection = adapmixed_ext.project(private, public, order=call.order, radius=call.radius)
        losses = [
            adapmixed_ext.leave_one_out(private, public, weights, orders=call.orders)
            for weights in (projection, torch.full_like(projection.weight, 0.5))
        ]
        mixture = adapmixed_ext.mixture(private, public, projection)
        tokens = adapmixed_ext.sample(mixture, public, rng=workload.Source(call.seed))
        targets = torch.zeros(len(public), dtype=torch.int64, device=gpu)
        log_prob = adapmixed_ext.log_prob(private, public, projection, targets)
        noise = torch.zeros(len(public), 3, dtype=torch.float64, device=gpu)
        screening = adapmixed_ext.screen(
            private, public, noise, weight=0.3, order=call.order, threshold=1e9, top_k=3
        )
        bad = projection.status != 0
        assert bad.any(), call
        for checked in (projection, screening):
            with pytest.raises(ValueError, match=call.expected):
                checked.check()
        assert (projection.weight[bad] == 0).all() and (projection.complement[bad] == 1).all()
        worst = bad.any(0)
        for loss in losses:
            assert (loss[:, worst] == math.inf).all() and not loss.isnan().any(), call
        assert mixture[worst].isnan().all() and not mixture[~worst].isnan().any(), call
        assert (tokens[worst] == -1).all() and (tokens[~worst] >= 0).all(), call
        assert log_prob[worst].isnan().all(), call
        assert (screening.divergence[worst] == math.inf).all(), call
        assert not screening.passed[worst].any(), call


@pytest.mark.parametrize("name", bad_rows.CALLS)
@pytest.mark.parametrize("kind", bad_rows.KINDS)
def test_bad_rows_are_told_as_on_the_cpu(kind: str, name: str, gpu: torch.device) -> None:
    private, public = bad_rows.logits(kind)
    said = bad_rows.said(name, private.to(gpu), public.to(gpu))
    assert said == bad_rows.said(name, private, public)


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
    foreign = workload.make(31).to(gpu)
    loss = adapmixed_ext.leave_one_out(foreign.private, foreign.public, projection, orders=2.0)
    assert (loss == math.inf).all()
    assert adapmixed_ext.mixture(foreign.private, foreign.public, projection).isnan().all()


def test_devices_are_not_mixed(gpu: torch.device) -> None:
    x = workload.make(32)
    with pytest.raises(ValueError, match="public_logits must be on device cuda:0, got cpu"):
        adapmixed_ext.project(x.private.to(gpu), x.public, order=2, radius=1.0)


def test_empty_batches(gpu: torch.device) -> None:
    private, public = torch.zeros(3, 0, 5, device=gpu), torch.zeros(0, 5, device=gpu)
    projection = adapmixed_ext.project(private, public, order=2, radius=1.0)
    loss = adapmixed_ext.leave_one_out(private, public, projection, orders=[2.0, 3.0])
    assert projection.weight.shape == (3, 0) and loss.shape == (3, 0, 2)
    assert adapmixed_ext.mixture(private, public, projection).shape == (0, 5)
    tokens = adapmixed_ext.sample(public.double(), public, rng=workload.Source(1))
    assert tokens.shape == (0,)
