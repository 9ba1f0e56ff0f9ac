"""Results do not depend on threads, forks or floating-point modes.

The instruction set changes them by rounding only.
"""

from __future__ import annotations

import os
import pickle
import threading

import cases
import checks
import oracle
import pytest
import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C, reference

ISAS = ("scalar", "avx2", "avx512")


class Rng:
    seeded = True

    def reserve(self) -> tuple[Tensor, int]:
        return torch.arange(32, dtype=torch.uint8), 5


def everything(case: cases.Case) -> list[Tensor]:
    """Run every operator once on the given inputs."""
    private, public = case.private, case.public
    results: list[Tensor] = []
    for order, radius in ((18.0, 3.6), (3.0, 0.03), (2.5, 50.0)):
        projection = adapmixed_ext.project(private, public, order=order, radius=radius)
        results += [projection.weight, projection.complement, projection.private_lse]
        for adjacency in ("add_remove", "zero_out"):
            results.append(
                adapmixed_ext.leave_one_out(
                    private, public, projection, orders=[1.5, 8.0, 18.0], adjacency=adjacency
                )
            )
        mixture = adapmixed_ext.mixture(private, public, projection)
        targets = torch.arange(public.shape[0]) % public.shape[1]
        results += [
            mixture,
            adapmixed_ext.log_prob(private, public, projection, targets),
            adapmixed_ext.sample(mixture, public, rng=Rng()),
        ]
    for lower, upper in ((-0.25, 1.0), (-60.0, 50.0)):
        box = {"lower": lower, "upper": upper, "num_models": private.shape[0] + 2}
        pool = adapmixed_ext.log_pool(private, public, scale=2.0, **box)
        results += [pool.log_normaliser, pool.span, pool.private_lse, pool.public_lse]
        results += [
            adapmixed_ext.mixture(private, public, pool),
            adapmixed_ext.log_prob(private, public, pool, targets),
        ]
    for lower, upper in ((0.6, 2.7), (0.9, 1e6)):
        clipping = adapmixed_ext.clip_project(
            private, public, lower=lower, upper=upper, orders=[3.0, 18.0]
        )
        assert clipping.charge is not None
        results += [clipping.log_scale, clipping.residual, clipping.charge, clipping.private_lse]
        results.append(adapmixed_ext.mixture(private, public, clipping))
        results.append(adapmixed_ext.leave_one_out(private, public, clipping, orders=[18.0]))
    noise = adapmixed_ext.gaussian((public.shape[0], 9), sigma=0.01, rng=Rng())
    screening = adapmixed_ext.screen(
        private, public, noise, weight=0.1, order=18.0, threshold=1.0, top_k=9
    )
    results += [noise, screening.divergence, screening.passed]
    results += adapmixed_ext.renyi_divergence(private, public, [1.0, 2.0, 7.3])
    results.append(adapmixed_ext.gaussian((70_001,), sigma=1.0, rng=Rng()))
    return results


def inputs() -> list[cases.Case]:
    private, public = cases.logits(30, 5, 9, 700, 3.0, 0.8)
    one, one_public = cases.logits(31, 64, 1, 5000, 3.0, 0.8)
    by_name = {case.name: case for case in cases.corners()}
    return [
        cases.Case("many-positions", private, public),
        cases.Case("one-position", one, one_public),
        by_name["rare-tokens"],
    ]


@pytest.mark.parametrize("case", inputs(), ids=cases.ids(inputs()))
def test_thread_counts_do_not_change_a_bit(case: cases.Case) -> None:
    torch.set_num_threads(1)
    single = everything(case)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for got, expected in zip(everything(case), single, strict=True):
            assert torch.equal(got, expected), threads


def test_repeated_runs_do_not_change_a_bit() -> None:
    torch.set_num_threads(2)
    case = inputs()[0]
    first = everything(case)
    for _ in range(3):
        for got, expected in zip(everything(case), first, strict=True):
            assert torch.equal(got, expected)


def test_calls_from_several_threads() -> None:
    torch.set_num_threads(2)
    case = inputs()[0]
    first = everything(case)
    results: list[list[Tensor]] = []
    workers = [threading.Thread(target=lambda: results.append(everything(case))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    assert len(results) == 3
    for result in results:
        for got, expected in zip(result, first, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_the_same() -> None:
    """The parent's worker threads do not exist in the child, so waiting for them would hang."""
    torch.set_num_threads(2)
    case = inputs()[0]
    expected = [t.numpy().tobytes() for t in everything(case)]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            got = [t.numpy().tobytes() for t in everything(case)]
            with os.fdopen(write, "wb") as pipe:
                pickle.dump([a == b for a, b in zip(got, expected, strict=True)], pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    killer = threading.Timer(60, os.kill, (child, 9))
    killer.start()
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    killer.cancel()
    assert status == 0, "the child hung or failed"
    assert all(pickle.loads(data))
    # The parent's threads still work.
    assert [t.numpy().tobytes() for t in everything(case)] == expected


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", inputs(), ids=cases.ids(inputs()))
def test_flushing_denormals_does_not_change_a_bit(case: cases.Case, threads: int) -> None:
    torch.set_num_threads(threads)
    plain = everything(case)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    flushed = everything(case)
    tiny = torch.tensor([1e-310], dtype=torch.float64)
    assert (tiny * 1.0).item() == 0.0, "the caller's mode was not restored"
    torch.set_flush_denormal(False)
    for got, expected in zip(flushed, plain, strict=True):
        assert torch.equal(got, expected)


def test_denormal_logits_and_probabilities_count() -> None:
    """q near 1e-38 (denormal in float32) still bounds the weight."""
    public = torch.tensor([[0.0, -88.0, 1e-42]])
    private = torch.tensor([[[0.0, -20.0, 0.0]]])
    ball = oracle.Ball(private[0, 0], public[0])
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        result = adapmixed_ext.project(private, public, order=3.0, radius=0.03)
        torch.set_flush_denormal(False)
        pair = (result.weight.item(), result.complement.item())
        assert ball.admits(*pair, 3.0, 0.03) and ball.nearly_maximal(*pair, 3.0, 0.03, 1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str) -> None:
    """Each instruction set may differ by rounding but must keep the bounds against the oracle."""
    if not _C.use_instruction_set(isa):
        pytest.skip(f"this machine or build has no {isa} path")
    assert _C.instruction_set() == isa
    for case in (*cases.ordinary()[::3], *cases.masked(), *cases.canary(), *cases.corners()):
        for order, radius in ((18.0, 3.6), (3.0, 0.03), (1.5, 1e-3), (256.0, 50.0)):
            projection = adapmixed_ext.project(
                case.private, case.public, order=order, radius=radius
            )
            for i, b in case.rows:
                ball = oracle.Ball(case.private[i, b], case.public[b])
                pair = projection.weight[i, b].item(), projection.complement[i, b].item()
                fault = checks.weight_fault(ball, *pair, order, radius)
                assert not fault, (fault, case.name, order, radius, i, b, pair)
    for case in (
        *cases.wide()[:1],
        cases.wide()[3],
        *cases.strided(),
        *cases.identical(),
        *cases.masked(),
    ):
        projection = adapmixed_ext.project(case.private, case.public, order=18.0, radius=3.6)
        pair = (projection.weight, projection.complement)
        exact = reference.project(case.private, case.public, order=18.0, radius=3.6)
        assert (pair[0] <= exact[0] * (1 + 1e-9)).all(), case.name
        assert (pair[0] >= exact[0] * (1 - 1e-5)).all(), case.name
        for adjacency in ("add_remove", "zero_out"):
            loss = adapmixed_ext.leave_one_out(
                case.private, case.public, projection, orders=[1.5, 18.0], adjacency=adjacency
            )
            truth = reference.leave_one_out(
                case.private, case.public, pair, orders=[1.5, 18.0], adjacency=adjacency
            )
            assert (loss * (1 + adapmixed_ext.loss_error) + 1e-12 >= truth).all(), case.name
            assert (loss <= truth * (1 + 1e-5) + 1e-12).all(), case.name
        torch.testing.assert_close(
            adapmixed_ext.mixture(case.private, case.public, projection),
            reference.mixture(case.private, case.public, pair), rtol=1e-6, atol=1e-300,
        )  # fmt: skip
        both = adapmixed_ext.renyi_divergence(case.private, case.public, [1.0, 2.0, 18.0])
        expected = reference.renyi_divergence(case.private, case.public, [1.0, 2.0, 18.0])
        for got, value in zip(both, expected, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-12)


def test_the_instruction_set_is_reported() -> None:
    assert adapmixed_ext.build_info()["instruction_set"] == _C.instruction_set()
    assert _C.instruction_set() in ISAS
    assert not _C.use_instruction_set("sse")
