"""Bad rows, which check() reports as on the CPU, and bad data that no status reports."""

from __future__ import annotations

import math

import bad_rows
import pytest
import simulated
import torch
from workload import Source

import adapmixed_ext


@pytest.mark.parametrize("kind", bad_rows.KINDS)
def test_bad_rows_are_reported_and_say_nothing(kind: str) -> None:
    private, public = bad_rows.logits(kind)
    error = bad_rows.raised(private, public)
    with simulated.kernels("reverse"):
        bad_rows.check(private, public, error)


def test_the_faults_of_a_row_in_any_part() -> None:
    """A NaN comes before +inf, wherever both are; the other rows are as ever."""
    generator = torch.Generator().manual_seed(7)
    public = torch.randn(1, 1100, generator=generator)
    private = public + 0.5 * torch.randn(5, 1, 1100, generator=generator)
    good = private.clone()
    private[0, 0, 3], private[0, 0, 1090] = math.inf, math.nan
    private[1, 0, 10], private[1, 0, 11] = math.nan, math.inf
    private[2, 0, 1050] = math.inf
    private[3, 0] = -math.inf
    box = {"lower": -0.25, "upper": 1.0, "scale": 2.0}
    with simulated.kernels("reverse"):
        pool = adapmixed_ext.log_pool(private, public, **box)
        clean = adapmixed_ext.log_pool(good, public, **box)
        found = adapmixed_ext.project(private, public, order=18.0, radius=3.6)
    assert pool.status.flatten().tolist() == found.status.flatten().tolist() == [1, 1, 2, 3, 0]
    assert pool.log_normaliser.isnan().all() and pool.span[:4].isnan().all()
    assert pool.span[4] == clean.span[4] and pool.private_lse[4] == clean.private_lse[4]


def test_what_no_status_reports() -> None:
    """A target outside the vocabulary, noise, and probabilities that are no distribution."""
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(2, 70, generator=generator)
    private = public + 0.3 * torch.randn(5, 2, 70, generator=generator)
    weight = torch.full((5, 2), 0.25, dtype=torch.float64)
    noise = torch.zeros(2, 6, dtype=torch.float64)
    noise[1, 2] = math.nan
    p = public.double().softmax(-1).repeat(2, 1)
    p[0] *= 1.1
    p[1, 3], p[1, 4] = -p[1, 3], 3 * p[1, 4]
    p[2, 3] = math.nan
    with simulated.kernels():
        for target in (-1, 70):
            found = adapmixed_ext.log_prob(private, public, weight, torch.tensor([3, target]))
            assert found.isnan().tolist() == [False, True]
        screening = adapmixed_ext.screen(
            private, public, noise, weight=0.1, order=2.0, threshold=5.0, top_k=6
        )
        tokens = adapmixed_ext.sample(p, public.repeat(2, 1), rng=Source(1))
    assert screening.passed.tolist() == [True, False] and screening.divergence[1] == math.inf
    assert (tokens[:3] == -1).all() and tokens[3] >= 0
