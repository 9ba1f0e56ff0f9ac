"""Every operator's kernels against the oracles, and the same bits in every order of threads."""

from __future__ import annotations

import math

import fuzz
import fuzz_cases
import pytest
import simulated
import torch
import workload
from checks import Report
from draws import open_rows
from screenings import far_from_public
from torch import Tensor

import adapmixed_ext

MOST = 2_500  # logits; a fibre takes some 50 ns from barrier to barrier


def check(seeds: range, most: int = MOST, *, sizes_of_a_gpu: bool = False) -> None:
    """Check the calls of these seeds that are small enough."""
    total = Report()
    for seed in seeds:
        call = fuzz_cases.build(seed)
        if call.private.numel() <= most:
            order = simulated.ORDERS[seed % len(simulated.ORDERS)]
            with simulated.kernels(*order, sizes_of_a_gpu=sizes_of_a_gpu):
                total.add(fuzz.run(call))
    assert total.values > 100
    assert not total.failures, "\n".join(total.failures[:5])


def test_a_few_calls() -> None:
    check(range(20), 400)


@pytest.mark.parametrize("batch", range(1, 6))
@pytest.mark.slow
def test_fuzzed_calls(batch: int) -> None:
    check(range(30 * batch, 30 * batch + 30))


@pytest.mark.slow
def test_fuzzed_calls_in_tiles_of_a_gpu() -> None:
    check(range(3000, 3060), 1500, sizes_of_a_gpu=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", workload.OPERATIONS)
def test_the_order_of_threads_and_the_batch_do_not_matter(name: str, dtype: torch.dtype) -> None:
    x = workload.make(3, 5, 2, 147, dtype)
    found = []
    for order in simulated.ORDERS:
        with simulated.kernels(*order):
            found.append(workload.OPERATIONS[name](x))
    assert workload.same(found[0], found[1]) and workload.same(found[0], found[2])
    with simulated.kernels("random", 3):
        for b in range(2):
            for one, many in zip(workload.OPERATIONS[name](x.position(b)), found[0], strict=True):
                assert torch.equal(one, many.narrow(one.shape.index(1), b, 1))


def test_random_numbers_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(3)
    public = 3 * torch.randn(4, 777, generator=generator)
    public[1, :300] = -math.inf
    rows = [(public.double().softmax(-1), public), open_rows(4, 777, generator)]

    def draw() -> tuple[Tensor, Tensor]:
        tokens = [
            adapmixed_ext.sample(*row, rng=workload.Source(seed))
            for row in rows
            for seed in range(6)
        ]
        noise = adapmixed_ext.gaussian(1003, sigma=0.7, rng=workload.Source(5))
        return noise, torch.stack(tokens)

    expected = draw()
    with simulated.kernels():
        assert workload.same(draw(), expected)


def test_screening_of_models_that_leave_the_kept_tokens() -> None:
    for seed in range(24):
        with simulated.kernels(*simulated.ORDERS[seed % len(simulated.ORDERS)]):
            fault = far_from_public(seed).fault(torch.device("cpu"))
        assert fault is None, f"seed {seed}: {fault}"


@pytest.mark.parametrize("vocab", [40, 1100])
def test_a_log_sum_exp_has_the_same_bits_wherever_its_row_is(vocab: int) -> None:
    """Alone, among the rows of a batch, and in each operator that takes it: one or two parts."""
    generator = torch.Generator().manual_seed(vocab)
    rows = 3 * torch.randn(9, 2, vocab, generator=generator)
    with simulated.kernels("reverse"):
        lse, status = torch.ops.adapmixed.log_sum_exp(rows, "private_logits")
        for model, position in ((0, 0), (8, 0), (3, 1)):
            own = torch.ops.adapmixed.log_sum_exp(rows[model, position : position + 1], "rows")
            assert torch.equal(own[0], lse[model, position][None])
        projection = adapmixed_ext.project(rows[1:], rows[0], order=18.0, radius=3.6)
        clipping = adapmixed_ext.clip_project(rows[1:], rows[0], lower=0.5, upper=2.0)
    assert (status == 0).all()
    torch.testing.assert_close(lse, rows.double().logsumexp(-1), rtol=5e-16, atol=3e-14)
    for found in (projection, clipping):
        assert torch.equal(found.private_lse, lse[1:])
        assert torch.equal(found.public_lse, lse[0])
