"""Every operator's kernels against the oracles, and the same bits in every order of threads."""

from __future__ import annotations

import dataclasses
import math

import fuzz
import fuzz_cases
import pytest
import simulated
import torch
from checks import Report
from draws import open_rows
from torch import Tensor

import adapmixed_ext

BATCHES, EACH = 6, 30
MOST = 2_500  # logits; a fibre takes some 50 ns from barrier to barrier


def small(call: fuzz_cases.Call) -> bool:
    return call.expected is None and call.private.numel() <= MOST


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.slow
def test_fuzzed_calls(batch: int) -> None:
    total = Report()
    for seed in range(batch * EACH, (batch + 1) * EACH):
        call = fuzz_cases.build(seed)
        if small(call):
            with simulated.kernels(*simulated.ORDERS[seed % len(simulated.ORDERS)]):
                total.add(fuzz.run(call))
    assert total.values > 100
    assert not total.failures, "\n".join(total.failures[:5])


def answers(call: fuzz_cases.Call) -> list[Tensor]:
    private, public = call.private, call.public
    positions, vocab = public.shape
    projection = adapmixed_ext.project(private, public, order=call.order, radius=call.radius)
    noise = adapmixed_ext.gaussian((positions, 3), sigma=0.01, rng=fuzz.Source(call.seed))
    screening = adapmixed_ext.screen(
        private, public, noise, weight=0.3, order=call.order, threshold=0.5, top_k=3
    )
    mixture = adapmixed_ext.mixture(private, public, projection)
    losses = [
        adapmixed_ext.leave_one_out(
            private, public, projection, orders=call.orders, adjacency=adjacency
        )
        for adjacency in ("add_remove", "zero_out")
    ]
    targets = torch.arange(positions) % vocab
    pool = adapmixed_ext.log_pool(private, public, lower=-0.25, upper=1.0, scale=2.0)
    pooled = [
        pool.log_normaliser, pool.span, pool.private_lse,
        adapmixed_ext.mixture(private, public, pool),
        adapmixed_ext.log_prob(private, public, pool, targets),
    ]  # fmt: skip
    return [
        *pooled, projection.weight, projection.complement, projection.private_lse, *losses,
        mixture, noise,
        screening.divergence, adapmixed_ext.log_prob(private, public, projection, targets),
        *adapmixed_ext.renyi_divergence(private[0], public, [1.0, *call.orders, math.inf]),
        adapmixed_ext.sample(mixture, public, rng=fuzz.Source(call.seed)),
    ]  # fmt: skip


@pytest.mark.parametrize("batch", range(3))
@pytest.mark.slow
def test_the_order_of_threads_does_not_matter(batch: int) -> None:
    compared = 0
    for seed in range(1000 + batch * 20, 1000 + (batch + 1) * 20):
        call = fuzz_cases.build(seed)
        if not small(call):
            continue
        results = []
        for order in simulated.ORDERS:
            with simulated.kernels(*order):
                results.append(answers(call))
        for other in results[1:]:
            for k, (one, two) in enumerate(zip(results[0], other, strict=True)):
                assert torch.equal(one, two), f"{call}: result {k}"
        compared += 1
    assert compared > 5


def test_random_numbers_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(3)
    public = 3 * torch.randn(4, 777, generator=generator)
    public[1, :300] = -math.inf
    rows = [(public.double().softmax(-1), public), open_rows(4, 777, generator)]

    def draw() -> tuple[Tensor, Tensor]:
        tokens = [
            adapmixed_ext.sample(*row, rng=fuzz.Source(seed)) for row in rows for seed in range(20)
        ]
        return adapmixed_ext.gaussian(1003, sigma=0.7, rng=fuzz.Source(5)), torch.stack(tokens)

    expected = draw()
    with simulated.kernels():
        got = draw()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_bad_rows_are_reported_and_say_nothing() -> None:
    seen = 0
    for seed in range(300):
        call = fuzz_cases.build(seed)
        if call.expected is None or call.private.numel() > MOST:
            continue
        seen += 1
        with simulated.kernels(*simulated.ORDERS[seed % len(simulated.ORDERS)]):
            projection = adapmixed_ext.project(
                call.private, call.public, order=call.order, radius=call.radius
            )
            loss = adapmixed_ext.leave_one_out(
                call.private, call.public, projection, orders=call.orders
            )
            mixture = adapmixed_ext.mixture(call.private, call.public, projection)
            tokens = adapmixed_ext.sample(mixture, call.public, rng=fuzz.Source(seed))
            targets = torch.zeros(len(call.public), dtype=torch.int64)
            log_prob = adapmixed_ext.log_prob(call.private, call.public, projection, targets)
            box = {"lower": -0.25, "upper": 1.0, "num_models": len(call.private)}
            pool = adapmixed_ext.log_pool(call.private, call.public, scale=2.0, **box)
            pooled = adapmixed_ext.mixture(call.private, call.public, pool)
            pooled_log = adapmixed_ext.log_prob(call.private, call.public, pool, targets)
            # An inactive row may be bad.
            others = adapmixed_ext.log_pool(
                call.private, call.public, scale=2.0, active=pool.status == 0, **box
            )
        bad = projection.status != 0
        assert bad.any(), call
        # For a public row the message lists the possible faults.
        with pytest.raises(ValueError, match=call.expected):
            projection.check()
        assert (projection.weight[bad] == 0).all() and (projection.complement[bad] == 1).all()
        worst = bad.any(0)
        assert (loss[:, worst] == math.inf).all(), call
        assert mixture[worst].isnan().all() and not mixture[~worst].isnan().any(), call
        assert (tokens[worst] == -1).all() and (tokens[~worst] >= 0).all(), call
        assert log_prob[worst].isnan().all(), call
        assert torch.equal(pool.status != 0, bad)
        with pytest.raises(ValueError, match=call.expected):
            pool.check()
        assert torch.equal(pool.span.isnan(), bad) and pool.log_normaliser[worst].isnan().all()
        assert pooled[worst].isnan().all() and not pooled[~worst].isnan().any(), call
        assert pooled_log[worst].isnan().all() and not pooled_log[~worst].isnan().any(), call
        without_public = (pool.status == 5).any(0)
        assert torch.equal(others.log_normaliser.isnan(), without_public), call
        assert not loss.isnan().any()
    assert seen >= 5


def test_weights_that_are_none_give_no_answer() -> None:
    public = torch.linspace(-1.0, 1.0, 40)[None]
    private = public + torch.linspace(0.3, -0.3, 40) * torch.ones(3, 1, 1)
    with simulated.kernels():
        good = adapmixed_ext.project(private, public, order=18.0, radius=3.6)
        for weight, complement in ((0.5, 0.9), (-0.1, 1.1), (1.5, -0.5), (math.nan, 0.5)):
            changed = good.weight.clone(), good.complement.clone()
            changed[0][1], changed[1][1] = weight, complement
            projection = dataclasses.replace(good, weight=changed[0], complement=changed[1])
            given = private, public, projection
            assert (adapmixed_ext.leave_one_out(*given, orders=2.0) == math.inf).all()
            assert adapmixed_ext.mixture(*given).isnan().all()
            targets = torch.zeros(1, dtype=torch.int64)
            assert adapmixed_ext.log_prob(*given, targets).isnan().all(), (weight, complement)


@pytest.mark.parametrize("vocab", [40, 1100])
def test_a_log_sum_exp_has_the_same_bits_wherever_its_row_is(vocab: int) -> None:
    """Alone, among the rows of a batch, and in each operator that takes it: one or two parts."""
    generator = torch.Generator().manual_seed(vocab)
    rows = 3 * torch.randn(9, 2, vocab, generator=generator)
    rows[5, 1, 7], rows[6, 1], rows[7, 1, 39] = math.nan, -math.inf, math.inf
    with simulated.kernels("reverse"):
        lse, status = torch.ops.adapmixed.log_sum_exp(rows, "private_logits")
        for model, position in ((0, 0), (8, 0), (3, 1), (5, 1), (7, 1)):
            own = torch.ops.adapmixed.log_sum_exp(rows[model, position : position + 1], "rows")
            assert torch.equal(own[0].nan_to_num(), lse[model, position][None].nan_to_num())
            assert torch.equal(own[1], status[model, position][None])
        projection = adapmixed_ext.project(rows[1:], rows[0], order=18.0, radius=3.6)
        clipping = adapmixed_ext.clip_project(rows[1:], rows[0], lower=0.5, upper=2.0)
    assert status[:, 0].tolist() == [0] * 9
    assert status[:, 1].tolist() == [0] * 5 + [1, 3, 2, 0]
    expected = rows.double().logsumexp(-1)
    torch.testing.assert_close(lse[status == 0], expected[status == 0], rtol=5e-16, atol=3e-14)
    assert lse[status != 0].isnan().all()
    for found in (projection, clipping):
        assert torch.equal(found.status, status[1:])
        assert torch.equal(found.private_lse.nan_to_num(), lse[1:].nan_to_num())
        assert torch.equal(found.public_lse, lse[0])
