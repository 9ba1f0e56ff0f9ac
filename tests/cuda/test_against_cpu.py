"""The GPU's answers at the sizes of real models, against the CPU's operators.

Each answer is within its documented bound of the truth, so two answers differ by at most the sum of
both bounds.
"""

from __future__ import annotations

import bad_rows
import ball_checks
import pytest
import reports
import torch
import workload
from reports import Report
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C
from adapmixed_ext.inputs import likeliest

# N, B, V: usual sizes, the largest vocabularies, many models, a batch.
SHAPES = {
    "usual": (100, 2, 50_257),
    "wide": (4, 1, 262_144),
    "many-models": (4096, 1, 64),
    "batch": (8, 64, 2_003),
}
# A kernel gets 48 KiB of shared memory unless it asks for more, and static memory counts. These are
# deviations of 48 240 bytes, and rows of 48 520 to 49 152 bytes in shared memory.
LIMITS = {
    "deviations": (28, 1, 600),
    "first-row": (2, 1, 12_129), "last-row": (2, 1, 12_288),
    "first-short-row": (2, 1, 24_257), "last-short-row": (2, 1, 24_576),
}  # fmt: skip
PLANS = [(name, torch.float32) for name in (*SHAPES, *LIMITS)]
PLANS += [(name, dtype) for name in ("usual", "batch") for dtype in (torch.bfloat16, torch.float16)]
PLANS += [(name, torch.bfloat16) for name in LIMITS]
BALLS = ((18.0, 3.6), (3.0, 0.03), (2.5, 0.4))
ORDERS = [1.5, 2.0, 8.0, 18.0, 64.0]


def close(got: Tensor, expected: Tensor, relative: float, absolute: float) -> None:
    torch.testing.assert_close(got.cpu(), expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize(("name", "dtype"), PLANS)
def test_large_inputs(name: str, dtype: torch.dtype, gpu: torch.device) -> None:
    x = workload.make(20, *(SHAPES | LIMITS)[name], dtype=dtype, top_k=60)
    there = x.to(gpu)
    for order, radius in BALLS:
        expected = workload.project(x, order, radius)
        projection = workload.project(there, order, radius).check()
        close(projection.private_lse, expected.private_lse, 0.0, 1e-9)  # both in double
        close(projection.weight, expected.weight, 2.1e-4, 1e-12)
        rows = torch.tensor([0, x.private.shape[0] // 2]), torch.tensor([0, 0])
        report, weight = Report(), projection.weight.cpu()[rows].unsqueeze(0)
        ball_checks.check_weights(
            x.private[rows], x.public[rows[1]], weight, order, [radius], report
        )  # fmt: skip
        assert not report.failures, report.failures
        # Both continue with the GPU's projection.
        moved = reports.moved(projection, "cpu")
        for adjacency in ("add_remove", "zero_out"):
            losses = [
                adapmixed_ext.leave_one_out(
                    at.private, at.public, at_projection, orders=ORDERS, adjacency=adjacency
                )
                for at, at_projection in ((there, projection), (x, moved))
            ]
            close(*losses, 1e-4, 1e-9)
        mixture = adapmixed_ext.mixture(there.private, there.public, projection)
        close(mixture, adapmixed_ext.mixture(x.private, x.public, moved), 2e-6, 1e-300)
        assert float((mixture.sum(-1) - 1).abs().max()) < 1e-9
        log_prob = adapmixed_ext.log_prob(there.private, there.public, projection, there.targets)
        expected_log_prob = adapmixed_ext.log_prob(x.private, x.public, moved, x.targets)
        close(log_prob, expected_log_prob, 2e-12, 2e-6)
    for operation in ("log_pool", "screen", "renyi_divergence"):
        answers = workload.OPERATIONS[operation](there), workload.OPERATIONS[operation](x)
        for got, value in zip(*answers, strict=True):
            if value.is_floating_point():
                close(got, value, 2e-5, 2e-12)
            elif value.dtype != torch.bool:  # a divergence may lie at the threshold
                assert torch.equal(got.cpu(), value)


def test_a_batch_in_groups_is_its_positions(gpu: torch.device) -> None:
    """No bit of a position depends on the positions that share the workspace."""
    shape = 20, 20, 50_257
    assert workload.in_groups(*shape)
    x = workload.make(21, *shape, dtype=torch.bfloat16).to(gpu)
    (together,) = workload.many_orders(x)
    weights = workload.project(x).weight
    for b in (0, 11, 12, 19):
        position = x.position(b)
        assert torch.equal(workload.many_orders(position)[0], together[:, b : b + 1])
        assert torch.equal(workload.project(position).weight, weights[:, b : b + 1])


def test_what_no_status_reports(gpu: torch.device) -> None:
    bad_rows.check_what_no_status_reports(gpu)


def test_devices_are_not_mixed(gpu: torch.device) -> None:
    x = workload.make(32)
    with pytest.raises(ValueError, match="public_logits must be on device cuda:0, got cpu"):
        adapmixed_ext.project(x.private.to(gpu), x.public, order=2, radius=1.0)


def test_the_build_serves_this_gpu(gpu: torch.device) -> None:
    """It has machine code, or PTX of an older architecture (one without "-real")."""
    major, minor = torch.cuda.get_device_capability(gpu)
    names = _C.cuda_architectures.split()
    here = 10 * major + minor
    real = [int("".join(c for c in name if c.isdigit())) for name in names]
    binary = any(n // 10 == major and n <= here for n in real)
    ptx = any(n <= here for n, name in zip(real, names, strict=True) if "-real" not in name)
    assert binary or ptx, names


def test_the_likeliest_tokens_ascend_and_ties_go_to_the_smaller(gpu: torch.device) -> None:
    rows = torch.randint(-40, 40, (8, 50_257), generator=torch.Generator().manual_seed(0)).float()
    for count in (1, 4_096, 50_257):
        assert torch.equal(likeliest(rows.to(gpu), count).cpu(), likeliest(rows, count))
