"""Peak memory of weights, losses and pools, beyond inputs and results, keeps the documented bound.

It is measured as resident memory in a fresh process, whose threads have no scratch memory yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 50_257
# Pages of code and of the interpreter that the measured calls touch for the first time.
SLACK = 1 << 20
# Freed memory goes back at once, so that only memory in use is measured.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="no /proc to reset a peak in"
)

# Prints how the peak grows: over two pools; over three balls that are solved in different ways
# (lists, float sums, double sums) and losses in single and double precision; and over boxes with
# and without charges.
PROGRAM = """
import ctypes, sys
import torch
import adapmixed_ext

models, vocab, threads = map(int, sys.argv[1:4])
orders = [2.0, 4.0, 8.0, 12.0, 18.0, 32.0, 64.0, 128.0]
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages: they are resident beyond what was asked
torch.set_num_threads(threads)


def peak():
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return 1024 * int(status["VmHWM"].split()[0])


def growth(call):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak()
    kept = call()
    return peak() - before


def logits(models, vocab):
    public = torch.empty(1, vocab).normal_(0.0, 2.0)
    private = torch.empty(models, 1, vocab).normal_(0.0, 0.5)
    return private.add_(public), public


def losses(private, public):
    for order, radius in ((18.0, 3.6), (3.0, 0.03), (2.5, 0.2), (18.0, 3.6)):
        projection = adapmixed_ext.project(private, public, order=order, radius=radius)
        yield projection, adapmixed_ext.leave_one_out(private, public, projection, orders=orders)
        if order == 2.5:  # rare tokens: losses need double precision
            public[:, :100] = private[:, :, :100] = -55.0


def pool(private, public):
    box = {"lower": -0.25, "upper": 1.0, "num_models": len(private)}
    for positions in (1, 5):  # shared by the threads, or one each
        rows = private.expand(-1, positions, -1), public.expand(positions, -1)
        yield adapmixed_ext.log_pool(*rows, scale=2.0, **box)


def clip(private, public):
    for lower, upper in ((0.5, 2.0), (0.9, 9e5)):
        for orders in (None, 18.0):
            yield adapmixed_ext.clip_project(
                private, public, lower=lower, upper=upper, orders=orders
            )


torch.manual_seed(0)
for call in (pool, losses, clip):
    list(call(*logits(5, 640)))  # loads the code, starts the threads
private, public = logits(models, vocab)
for call in (pool, losses, clip):
    print(growth(lambda: list(call(private, public))))
"""


@pytest.mark.parametrize(
    "models,vocab,threads", [(64, VOCAB, 1), (256, VOCAB, 2), (64, 4 * VOCAB, 1)]
)
@pytest.mark.slow
def test_the_stated_bound_holds(models: int, vocab: int, threads: int) -> None:
    """The scratch memory that a bound allows is really used, and far below the logits."""
    arguments = [str(number) for number in (models, vocab, threads)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], check=True, capture_output=True, text=True,
        cwd=ROOT, env=os.environ | MALLOC,
    )  # fmt: skip
    pool, growth, clip = map(int, done.stdout.split())
    # As the docstrings state them, for one position and 8 orders; a pool keeps six positions.
    of_losses = threads * (32 * vocab + 2048 * models + 2**19) + (1536 * 12 + 64) * models + 2**16
    of_pools = threads * (16 * vocab + 2**14) + 6 * 8 * vocab
    assert 10 * vocab <= growth <= of_losses + SLACK < models * vocab * 4
    assert 4 * vocab <= pool <= of_pools + SLACK
    assert 10 * vocab <= clip <= threads * (37 * vocab + 2**17) + SLACK // 2
