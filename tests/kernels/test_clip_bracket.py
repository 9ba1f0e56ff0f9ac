"""The search of clip_project for s: a sample gives a bracket, in which few tokens change sides.

If the bracket fails, s is found from all tokens.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
from pathlib import Path

import cases
import pytest
import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C, reference

ROOT = Path(__file__).resolve().parents[2]
BOX = (0.6, 1.65)
SIZES = (1, 2, 33, 500, 1023, 1024, 4099, 50257, 2**17)


@pytest.mark.parametrize("flags", [[], ["-march=native"]], ids=["baseline", "native"])
def test_a_bracket_knows_all_tokens(flags: list[str], tmp_path: Path) -> None:
    program, source = tmp_path / "bracket", Path(__file__).with_name("clip_bracket.cpp")
    flags = [*flags, "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra"]
    definitions = ["-DADAPMIXED_ISA=checked", f"-I{ROOT / 'csrc'}"]
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run([*compiler, *flags, *definitions, "-o", program, source], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")
    found = {name: values for name, *values in map(str.split, filter(None, lines))}
    first, second, third, estimate, error, slope = map(float, found.pop("around"))
    # A bracket around s is narrowed; a second one that excludes s is rejected and changes nothing.
    assert (first, second, third) == (1, 1, 0)
    assert 0 < abs(estimate) < 1e-4 and error < 2e-15 and slope < 1e-12
    assert set(found) == {"above", "below", "wide", "at_bound"}
    assert all(float(values[0]) == 0 for values in found.values())


def check(private: Tensor, public: Tensor, box: tuple[float, float] = BOX) -> None:
    """Check that every row sums to 1 over all tokens and matches the reference."""
    got = adapmixed_ext.clip_project(private, public, lower=box[0], upper=box[1])
    truth = reference.clip_project(private, public, lower=box[0], upper=box[1])
    for i in range(len(private)):
        own = dataclasses.replace(
            got, log_scale=got.log_scale[i : i + 1], residual=got.residual[i : i + 1],
            private_lse=got.private_lse[i : i + 1], status=got.status[i : i + 1],
        )  # fmt: skip
        bar = adapmixed_ext.mixture(private[i : i + 1], public, own)[0]
        assert abs(math.fsum(bar.tolist()) - 1) <= 1e-12, i
        torch.testing.assert_close(bar, truth[i, 0], rtol=1e-9, atol=1e-300)


def rows(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return ordinary and distant rows, heavy tails, planted tokens and masked tokens."""
    private, public = cases.logits(50 + vocab, 6, 1, vocab, 2.5, 0.7)
    private[1] += 2 * (private[0] - public)
    private[2] = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2)) * 6
    private[3, 0, vocab // 2] += 30.0
    private[4, 0, vocab // 3] += math.log(vocab)
    private[5, 0, ::3] = -math.inf if vocab > 1 else 0.0
    return private.to(dtype), public.to(dtype)


@pytest.mark.parametrize("vocab", SIZES)
def test_rows_of_every_size(vocab: int, isa: str) -> None:
    check(*rows(vocab))
    if 1 < vocab < 10_000:
        private, public = rows(vocab)
        public[0, 1::4] = -math.inf
        check(private, public)
        for box in ((0.0, 2.0), (0.95, 1.05), (0.1, 250.0), (0.5, 1e6)):
            check(private, public, box)


@pytest.mark.parametrize("dtype", cases.DTYPES[1:], ids=str)
def test_short_floats(dtype: torch.dtype, isa: str) -> None:
    check(*rows(4099, dtype))


def test_a_peaked_public_row(isa: str) -> None:
    """Hardly any token represents others, or a row has its mass where the public row has little."""
    private, public = rows(4099)
    check(private + 4 * public, 5 * public)
    check(torch.flip(private, (-1,)) + 4 * public, 5 * public)


def test_a_sample_that_misleads(isa: str) -> None:
    """The sample takes every fourth of equal tokens, and exactly these differ from the others."""
    vocab = 4096
    public = torch.zeros(1, vocab)
    private = torch.zeros(8, 1, vocab)
    for first in range(4):
        private[first, 0, first::4] = 0.4
        private[4 + first, 0, first::4] = -3.0
    check(private, public)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_too_many_tokens_at_the_bound(share: float, isa: str) -> None:
    """All tokens of one level reach a bound just where S is 1, from above or from below."""
    vocab = 4096
    public = torch.zeros(1, vocab)
    private = torch.zeros(2, 1, vocab)
    likely = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))
    likely = likely[: int(share * vocab)]
    taken = len(likely) / vocab
    private[0, 0, likely] = math.log(BOX[1] * (1 - taken) / (1 - BOX[1] * taken))
    private[1, 0, likely] = math.log(BOX[0] * (1 - taken) / (1 - BOX[0] * taken))
    check(private, public)


def test_charges_and_threads_change_nothing() -> None:
    private, public = rows(50257)
    lower, upper = BOX
    one = adapmixed_ext.clip_project(private, public, lower=lower, upper=upper)
    torch.set_num_threads(2)
    two = adapmixed_ext.clip_project(private, public, lower=lower, upper=upper, orders=3.0)
    assert torch.equal(one.log_scale, two.log_scale)


def test_instruction_sets_agree() -> None:
    private, public = rows(50257)
    found = []
    for name in ("scalar", "avx2", "avx512"):
        if _C.use_instruction_set(name):
            got = adapmixed_ext.clip_project(private, public, lower=BOX[0], upper=BOX[1])
            found.append(got.log_scale)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-11)
