"""Bad rows, which check() reports as on the CPU, and bad data that no status reports.

For the latter the operators must answer on CUDA as their docstrings say.
"""

from __future__ import annotations

import dataclasses
import math

import bad_rows
import fuzz
import pytest
import simulated
import torch
from torch import Tensor

import adapmixed_ext

WEIGHT = torch.full((5, 2), 0.25, dtype=torch.float64)


def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(2, 70, generator=generator)
    return public + 0.3 * torch.randn(5, 2, 70, generator=generator), public


@pytest.mark.parametrize("name", bad_rows.CALLS)
def test_bad_rows_are_told_as_on_the_cpu(name: str) -> None:
    """The message names public rows first, the fault of a row, and the number of such rows."""
    for kind in bad_rows.KINDS:
        private, public = bad_rows.logits(kind)
        expected = bad_rows.said(name, private, public)
        which = "public" if "public" in kind or kind == "both" else "private"
        assert expected.startswith(f"{which}_logits["), expected
        with simulated.kernels():
            assert bad_rows.said(name, private, public) == expected


@pytest.mark.parametrize("name", bad_rows.CALLS)
def test_rows_far_beyond_the_limit_are_told_as_on_the_cpu(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    public = torch.randn(3, 300, generator=generator)
    private = public + 0.3 * torch.randn(4, 3, 300, generator=generator)
    private[1] = 1e30 * torch.randn(3, 300, generator=generator)
    expected = bad_rows.said(name, private, public)
    assert "has its largest logit beyond" in expected
    with simulated.kernels():
        assert bad_rows.said(name, private, public) == expected


def test_a_projection_made_by_hand_knows_which_public_rows_are_bad() -> None:
    private, public = bad_rows.logits("public rows")
    with simulated.kernels():
        found = adapmixed_ext.project(private, public, order=2.0, radius=1.0)
    bare = dataclasses.replace(found, public_status=None)
    with pytest.raises(ValueError, match=r"^public_logits\[1\] contains NaN or.*\(2 of 3 rows are"):
        bare.check()


@pytest.mark.parametrize("by", [1e-3, -20.0])
@pytest.mark.parametrize("models", [2, 5])  # the sums in double, and those in floats
def test_rows_moved_by_a_constant_are_those_of_no_projection(models: int, by: float) -> None:
    private, public = logits()
    private = private[:models]
    with simulated.kernels():
        projection = adapmixed_ext.project(private, public, order=18, radius=3.6)
        loss = adapmixed_ext.leave_one_out(private + by, public + by, projection, orders=[2.0, 18])
    assert (loss == math.inf).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_row_under_bare_weights(value: float) -> None:
    """Only the position of the bad row is without an answer."""
    private, public = logits()
    private[3, 1, 7] = value
    targets = torch.tensor([4, 5])
    with simulated.kernels():
        loss = adapmixed_ext.leave_one_out(private, public, WEIGHT, orders=[2.0, 3.5])
        mixture = adapmixed_ext.mixture(private, public, WEIGHT)
        log_prob = adapmixed_ext.log_prob(private, public, WEIGHT, targets)
    assert (loss[:, 1] == math.inf).all() and loss[:, 0].isfinite().all()
    assert mixture[1].isnan().all() and mixture[0].isfinite().all()
    assert log_prob[1].isnan() and log_prob[0].isfinite()


def test_rows_of_another_projection() -> None:
    private, public = logits()
    with simulated.kernels():
        projection = adapmixed_ext.project(private, public, order=3, radius=0.1)
        other = private + torch.randn(70, generator=torch.Generator().manual_seed(1))
        loss = adapmixed_ext.leave_one_out(other, public, projection, orders=2.0)
        mixture = adapmixed_ext.mixture(other, public, projection)
    assert (loss == math.inf).all() and mixture.isnan().all()


@pytest.mark.parametrize("target", [-1, 70])
def test_a_target_outside_the_vocabulary(target: int) -> None:
    with simulated.kernels():
        found = adapmixed_ext.log_prob(*logits(), WEIGHT, torch.tensor([3, target]))
    assert found[0].isfinite() and found[1].isnan()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_noise_and_divergences(value: float) -> None:
    private, public = logits()
    noise = torch.zeros(2, 6, dtype=torch.float64)
    noise[1, 2] = value
    options = {"weight": 0.1, "order": 2.0, "threshold": 5.0, "top_k": 6}
    bad = private[0].clone()
    bad[1, 3] = value
    with simulated.kernels():
        found = adapmixed_ext.screen(private, public, noise, **options)
        forward, backward = adapmixed_ext.renyi_divergence(bad, public, [1.0, 3.0, math.inf])
    assert found.divergence[0].isfinite() and found.divergence[1] == math.inf
    assert found.passed.tolist() == [True, False]
    assert dataclasses.replace(found).check() is not None  # nothing reports the noise
    for divergence in (forward, backward):
        assert divergence[0].isfinite().all() and (divergence[1] == math.inf).all()


def test_what_is_no_distribution_has_no_token() -> None:
    public = torch.zeros(4, 30)
    p = public.double().softmax(-1)
    p[0] *= 1.1
    p[1, 3], p[1, 4] = -p[1, 3], 3 * p[1, 4]
    p[2, 3] = math.nan
    with simulated.kernels():
        tokens = adapmixed_ext.sample(p, public, rng=fuzz.Source(1))
    assert (tokens[:3] == -1).all() and tokens[3] >= 0


@pytest.mark.parametrize("value", [math.nan, math.inf, 2e6, -2e6])
def test_a_bad_public_row_has_no_token(value: float) -> None:
    public = torch.zeros(2, 30)
    public[0, slice(None) if value == -2e6 else 7] = value
    p = torch.full((2, 30), 1 / 30, dtype=torch.float64)
    with simulated.kernels():
        tokens = adapmixed_ext.sample(p, public, rng=fuzz.Source(1))
    assert tokens[0] == -1 and tokens[1] >= 0
