"""What holds of every operator, whatever it computes.

No result depends on threads, batches, other rows, strides, forks or floating-point modes, and no
argument is changed.
"""

from __future__ import annotations

import math
import os
import pickle
import threading

import bad_rows
import plans
import pytest
import torch
import workload
from torch import Tensor
from workload import Batch

import adapmixed_ext
from adapmixed_ext import _C

# Many positions; one; several tiles and a short vector; many models; a batch.
CPU = {
    "positions": workload.make(1, 5, 4, 700, top_k=9),
    "one": workload.make(2, 16, 1, 5000),
    "tiles": workload.make(3, 20, 1, 5003, torch.bfloat16),
    "models": workload.make(4, 250, 1, 43, torch.float16),
    "batch": workload.make(5, 2, 40, 33),
}


def test_every_public_function_is_in_the_workload() -> None:
    """It is there by name, unless it comes with another one or has no kernel of its own."""
    functions = {
        name for name in adapmixed_ext.__all__
        if callable(f := getattr(adapmixed_ext, name)) and not isinstance(f, type)
    }  # fmt: skip
    assert functions - {"build_info"} == {*workload.OPERATIONS, "gaussian", "sample"}


@pytest.mark.parametrize("name", CPU)
def test_threads_do_not_change_a_bit(name: str, isa: str) -> None:
    torch.set_num_threads(1)
    x = CPU[name]
    single = workload.everything(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert workload.same(workload.everything(x), single), threads


def test_calls_from_several_threads(isa: str) -> None:
    torch.set_num_threads(2)
    x = CPU["positions"]
    first = workload.everything(x)
    results: list[tuple[Tensor, ...]] = []
    callers = [
        threading.Thread(target=lambda: results.append(workload.everything(x))) for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
        assert not caller.is_alive()
    assert len(results) == 3 and all(workload.same(result, first) for result in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_the_same() -> None:
    """The parent's worker threads do not exist in the child, so waiting for them would hang."""
    torch.set_num_threads(2)
    x = CPU["one"]  # too small for torch's own threads, which a child cannot use

    def everything() -> tuple[Tensor, ...]:  # but for the pool's, whose exponential is torch's
        names = (name for name in workload.NAMES if name != "log_pool")
        return tuple(result for name in names for result in workload.run(name, x))

    expected = everything()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(workload.same(everything(), expected), pipe)
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
    assert pickle.loads(data)
    assert workload.same(everything(), expected)  # the parent's threads still work


@pytest.mark.parametrize("threads", [1, 2])
def test_flushing_denormals_does_not_change_a_bit(threads: int) -> None:
    torch.set_num_threads(threads)
    x = CPU["positions"]
    plain = workload.everything(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    flushed = workload.everything(x)
    tiny = torch.tensor([1e-310], dtype=torch.float64)
    assert (tiny * 1.0).item() == 0.0, "the caller's mode was not restored"
    torch.set_flush_denormal(False)
    assert workload.same(flushed, plain)


def test_autocast_and_inference_mode_have_no_effect() -> None:
    x = workload.make(3, vocab=40)
    plain = workload.everything(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert workload.same(workload.everything(x), plain)
    with torch.inference_mode():
        assert workload.same(workload.everything(Batch(*(t.clone() for t in x))), plain)


def test_instruction_sets_are_known_by_name(isa: str) -> None:
    """test_operators.py holds the answers of each to the bounds."""
    assert adapmixed_ext.build_info()["instruction_set"] == isa
    assert not _C.use_instruction_set("sse")


@pytest.mark.parametrize("dtype", plans.DTYPES)
@pytest.mark.parametrize("name", workload.OPERATIONS)
def test_a_position_does_not_depend_on_its_batch(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = workload.make(4, 5, 3, 1033, dtype=dtype).to(device)
    whole = workload.OPERATIONS[name](x)
    for b in range(3):
        for single, batch in zip(workload.OPERATIONS[name](x.position(b)), whole, strict=True):
            axis = single.shape.index(1)
            assert torch.equal(single, batch.narrow(axis, b, 1))


def of_each_row(private: Tensor, public: Tensor) -> list[Tensor]:
    """Return (N, B, ...) what operators say of a row alone."""
    rows, tensors = (private, public), []
    for order, radius in ((18.0, 3.6), (3.0, 0.03), (2.5, 1e-6)):
        ball = adapmixed_ext.project(*rows, order=order, radius=radius)
        tensors += [ball.weight, ball.private_lse]
    for lower, upper in ((0.6, 1.65), (0.0, 50.0), (0.9, 9e5)):
        box = adapmixed_ext.clip_project(
            *rows, lower=lower, upper=upper, orders=[1.01, 18.0], num_models=9
        )
        assert box.charge is not None
        tensors += [box.log_scale, box.residual, box.charge, box.private_lse]
    pool = adapmixed_ext.log_pool(*rows, lower=-0.25, upper=1.0, scale=2.0, num_models=9)
    pairs = adapmixed_ext.renyi_divergence(private, public.expand_as(private), [1.5, 18.0])
    return [*tensors, pool.span, pool.private_lse, *pairs]


def test_a_row_does_not_depend_on_the_other_models(path: torch.device) -> None:
    x = workload.make(4, 5, 3, 1033).to(path)
    for private, public in ((x.private, x.public), (x.private[..., :65], x.public[..., :65])):
        whole = of_each_row(private, public)
        for i in range(5):
            for single, every in zip(of_each_row(private[i : i + 1], public), whole, strict=True):
                assert torch.equal(single[0], every[i])


def inside(rows: Tensor) -> Tensor:
    """Return the same rows in memory that is NaN between them, one element off."""
    wide = rows.new_full((*rows.shape[:-1], rows.shape[-1] + 4), math.nan)
    wide[..., 1:-3] = rows
    return wide[..., 1:-3]


def inner(rows: Tensor) -> Tensor:
    """Return the same rows with another number after each."""
    return torch.stack([rows, torch.full_like(rows, math.nan)], -1)[..., 0]


def repeated(rows: Tensor) -> Tensor:
    """Return the rows of the first model or position, with stride 0."""
    return rows[:1].expand_as(rows)


@pytest.mark.parametrize("how", [inside, inner, repeated], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", workload.NAMES)
def test_strides_do_not_matter_and_no_argument_is_changed(
    name: str, how, device: torch.device
) -> None:
    x = workload.make(5, 4, 3, 133).to(device)
    strided = x._replace(private=how(x.private), public=how(x.public))
    dense = Batch(*(t.clone(memory_format=torch.contiguous_format) for t in strided))
    kept = Batch(*(t.clone() for t in dense))
    assert workload.same(workload.run(name, strided), workload.run(name, dense))
    assert workload.same(dense, kept) and workload.same(strided, kept)


@pytest.mark.parametrize("name", workload.NAMES)
def test_an_empty_batch(name: str, device: torch.device) -> None:
    inputs = workload.make(6, 3, 1, 5, top_k=2).to(device)
    none = Batch(inputs.private[:, :0], *(t[:0] for t in inputs[1:4]), inputs.active[:, :0])
    for whole, empty in zip(workload.run(name, inputs), workload.run(name, none), strict=True):
        assert empty.dtype == whole.dtype
        assert empty.shape == whole.shape or empty.numel() == 0 and empty.dim() == whole.dim()


@pytest.mark.parametrize("kind", bad_rows.BAD)
def test_rows_that_changed_since_their_sums(kind: str, path: torch.device) -> None:
    private, public = bad_rows.bad(kind)
    rows = private.to(path), public.to(path)
    if path.type == "cuda":
        bad_rows.check_bad_rows(*rows, bad_rows.raised(private, public))
    bad_rows.run_on_changed_rows(*rows)
