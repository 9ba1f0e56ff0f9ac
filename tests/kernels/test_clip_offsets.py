"""Boxes with large log-sum-exps: their rounding must not change the answers."""

from __future__ import annotations

import dataclasses
import math

import cases
import pytest
import torch
from mpmath import mpf
from oracle_clip import Box
from torch import Tensor

import adapmixed_ext

BOXES = ((0.6, 1.65), (0.3, 1.0 + 1e-7), (0.97, 40.0), (1.0 - 1e-9, 1.0 + 1e-9))
WIDE = ((0.0, 50.0), (0.565, 96.27), (2e-9, 5e8), (0.0, 1e9))
OFFSETS = ((0.0, 0.0), (-8.7e5, 9.3e5), (1e5, -1e5), (9.9e5, 9.9e5), (0.0, 5e4), (7777.0, 0.0))


def shifted(private: Tensor, public: Tensor, offsets: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return shifted logits that float32 holds exactly: 1/16 is the last bit at 1e6."""
    private, public = (private * 16).round() / 16, (public * 16).round() / 16
    return private + offsets[0], public + offsets[1]


def answers(private: Tensor, public: Tensor, whole: adapmixed_ext.Clipping) -> list[Tensor]:
    """Return every row's own distributions, each (B, V)."""
    found = []
    for i in range(len(private)):
        part = slice(i, i + 1)
        own = dataclasses.replace(
            whole, log_scale=whole.log_scale[part], residual=whole.residual[part],
            private_lse=whole.private_lse[part], status=whole.status[part],
        )  # fmt: skip
        found.append(adapmixed_ext.mixture(private[part], public, own))
    return found


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("box", BOXES + WIDE)
def test_all_rows_of_a_position_sum_alike(
    box: tuple[float, float], offsets: tuple[float, float], isa: str
) -> None:
    """If the sums agree, a rescaled mean of rows is a mean of distributions in the box.

    That is the distribution which is accounted.
    """
    private, public = shifted(*cases.logits(31, 8, 2, 500, 3.0, 1.5), offsets)
    private[3:5, 0, 5:] -= 9000.0  # log s is as large if five tokens cannot hold all mass
    whole = adapmixed_ext.clip_project(private, public, lower=box[0], upper=box[1])
    total = torch.stack([answer.sum(-1) for answer in answers(private, public, whole)])
    apart = total.amax(0) - total.amin(0)
    assert (apart <= torch.tensor([4e-12, 1e-12], dtype=torch.float64)).all(), apart
    rounded = whole.public_lse.abs() + whole.log_scale.abs()
    assert ((total - 1).abs() <= 1e-12 + 2.0**-52 * rounded).all()
    holds_all = box[1] > 1e6  # then five tokens can hold all mass
    assert holds_all == (whole.log_scale[3:5, 0] < 8000).all()
    assert (whole.log_scale[:, 1] < 10).all()


@pytest.mark.parametrize("offsets", OFFSETS)
def test_tokens_at_70_digits(offsets: tuple[float, float], isa: str) -> None:
    """Tokens inside the box are also right, if hardly any mass moves with s."""
    for seed, box in enumerate(BOXES):
        private, public = shifted(*cases.logits(40 + seed, 2, 1, 40, 3.0, 1.5), offsets)
        private[:, :, :30] += 40.0  # these reach the upper bound and hold nearly all of q
        got = adapmixed_ext.clip_project(private, public, lower=box[0], upper=box[1])
        exact = Box(private[0, 0], public[0], *box)
        one = dataclasses.replace(
            got, log_scale=got.log_scale[:1], residual=got.residual[:1],
            private_lse=got.private_lse[:1], status=got.status[:1],
        )  # fmt: skip
        bar = adapmixed_ext.mixture(private[:1], public, one)[0].tolist()
        allowed = 1e-9 + 1e-14 / max(float(exact.inside()), 1e-300)
        for value, truth in zip(bar, exact.bar, strict=True):
            assert abs(mpf(value) - truth) <= allowed * truth + mpf(1e-300), (box, value, truth)


@pytest.mark.parametrize("box", [(0.1, 250.0), (0.1, 3.0)])
def test_long_rows_sum_alike(box: tuple[float, float], isa: str) -> None:
    """Adding a row up in one chain would be off by more than 1e-12, in one direction."""
    vocab = 2**20
    public = torch.zeros(1, vocab)
    private = torch.zeros(5, 1, vocab)
    levels = ((0.1, 0.3), (0.1, 5.0), (0.3, 5.0), (0.001, 0.3), (0.37, 0.3))
    for row, (share, height) in zip(private, levels, strict=True):
        row[0, : int(share * vocab)] += height
    whole = adapmixed_ext.clip_project(private, public, lower=box[0], upper=box[1])
    sums = [math.fsum(answer[0].tolist()) for answer in answers(private, public, whole)]
    assert max(sums) - min(sums) <= 5e-13
    assert max(abs(total - 1) for total in sums) <= 5e-13
