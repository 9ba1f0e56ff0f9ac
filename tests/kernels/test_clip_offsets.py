"""Boxes with large log-sum-exps and long rows: their rounding must not change the answers."""

from __future__ import annotations

import math

import cases
import pytest
import torch
from oracle_clip import row_of
from torch import Tensor

import adapmixed_ext

BOXES = ((0.6, 1.65), (0.3, 1.0 + 1e-7), (0.97, 40.0), (1.0 - 1e-9, 1.0 + 1e-9), (0.0, 1e6))
OFFSETS = ((0.0, 0.0), (1e5, -1e5), (0.0, 5e4))


def shifted(private: Tensor, public: Tensor, offsets: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return shifted logits that float32 holds exactly."""
    private, public = (private * 16).round() / 16, (public * 16).round() / 16
    return private + offsets[0], public + offsets[1]


def sums(private: Tensor, public: Tensor, whole: adapmixed_ext.Clipping) -> Tensor:
    """Return the sum of every row's own distribution, (N, B)."""
    found = []
    for i in range(len(private)):
        answer = adapmixed_ext.mixture(private[i : i + 1], public, row_of(whole, i))
        found.append([math.fsum(row.tolist()) for row in answer])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("box", BOXES)
def test_all_rows_of_a_position_sum_alike(
    box: tuple[float, float], offsets: tuple[float, float], isa: str
) -> None:
    """If the sums agree, a rescaled mean of rows is a mean of distributions in the box.

    That is the distribution which is accounted.
    """
    private, public = shifted(*cases.logits(31, 8, 2, 500, 3.0, 1.5), offsets)
    private[3:5, 0, 5:] -= 560.0  # log s is as large if five tokens cannot hold all mass
    whole = adapmixed_ext.clip_project(private, public, lower=box[0], upper=box[1])
    total = sums(private, public, whole)
    apart = total.amax(0) - total.amin(0)
    assert (apart <= 1e-12).all(), apart
    rounded = whole.public_lse.abs() + whole.log_scale.abs()
    assert ((total - 1).abs() <= 1e-12 + 2.0**-52 * rounded).all()
    assert (box[1] >= 1e6) == (whole.log_scale[3:5, 0] < 500).all()
    assert (whole.log_scale[:, 1] < 10).all()


def test_long_rows_sum_alike(isa: str) -> None:
    """Adding a row up in one chain would be off by more than 1e-12, in one direction."""
    vocab = 2**20
    public = torch.zeros(1, vocab)
    private = torch.zeros(3, 1, vocab)
    levels = ((0.1, 0.3), (0.3, 5.0), (0.001, 0.3))
    for row, (share, height) in zip(private, levels, strict=True):
        row[0, : int(share * vocab)] += height
    whole = adapmixed_ext.clip_project(private, public, lower=0.1, upper=250.0)
    total = sums(private, public, whole)
    assert (total.amax() - total.amin()).item() <= 5e-13
    assert (total - 1).abs().max().item() <= 5e-13
