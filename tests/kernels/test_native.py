"""The operators as torch sees them: schemas, fake tensors, and compiled programs."""

from __future__ import annotations

import math

import plans
import pytest
import torch
import workload
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from workload import Batch

import adapmixed_ext
from adapmixed_ext.inputs import likeliest


def _inputs() -> dict[str, tuple[object, ...]]:
    """Return arguments of every registered operator."""
    private, public = plans.logits(20, 3, 2, 17, 2.0, 0.5)
    private_lse, _ = torch.ops.adapmixed.log_sum_exp(private, "private_logits")
    public_lse, _ = torch.ops.adapmixed.log_sum_exp(public, "public_logits")
    ensemble = (private, public, private_lse, public_lse)
    weight = torch.full((3, 2), 0.25, dtype=torch.float64)
    noise = torch.full((2, 4), 0.01, dtype=torch.float64)
    active = torch.tensor([[True, False]] * 3)
    key = torch.arange(32, dtype=torch.uint8)
    box = (-0.25, 1.0, 2.0, 5)
    weighted = (*ensemble, weight, 1 - weight, 0.0, 0.0, None)
    return {
        "log_sum_exp": (private, "private_logits"),
        "project": (private, public, 18.0, 3.6),
        "clip_project": (private, public, public_lse, 0.5, 2.0, [2.0, 18.0], 5),
        "leave_one_out": (*weighted, [2.0, 18.0], False, 5),
        "mixture": weighted,
        "log_prob": (*weighted, torch.tensor([3, 16])),
        "log_pool": (private, public, private_lse - public_lse, *box, active),
        "renyi_divergence": (private[0], public, private_lse[0], public_lse, [1.5, 2.0]),
        "screen": (*ensemble, noise, likeliest(public, 4, by_rank=True), active, 0.1, 3.0, 1.0, 3),
        "gaussian": (key, 3, [4, 5], 0.5),
        "sample": (torch.softmax(public.double(), -1), public, key, 4),
        "checked": (weight, "weight", 0.0, 1.0),
    }


def _registered() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    prefix = "adapmixed::"
    return sorted({n.removeprefix(prefix).split(".")[0] for n in names if n.startswith(prefix)})


def test_every_operator_is_checked() -> None:
    assert set(_registered()) == set(_inputs())


@pytest.mark.parametrize("name", _registered())
def test_opcheck(name: str, device: torch.device) -> None:
    """Keys stay on the CPU, which reads them."""
    inputs = [
        value.to(device) if isinstance(value, Tensor) and value.dtype != torch.uint8 else value
        for value in _inputs()[name]
    ]
    inputs += [device] if name == "gaussian" else []
    result = torch.library.opcheck(getattr(torch.ops.adapmixed, name).default, tuple(inputs))
    assert set(result.values()) == {"SUCCESS"}


def _on_cuda(value: Tensor) -> Tensor:
    """Return a fake tensor on a GPU, which need not exist."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")


@pytest.mark.parametrize("name", workload.OPERATIONS)
@pytest.mark.slow
def test_compiled_equals_eager(name: str, device: torch.device) -> None:
    """The compiled program serves other shapes and dtypes, too."""
    torch._dynamo.reset()
    operation = workload.OPERATIONS[name]
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager", dynamic=True)
    for positions, vocab, dtype in (
        (2, 17, torch.float32),
        (3, 40, torch.float32),
        (5, 9, torch.bfloat16),
    ):
        x = workload.make(21, 3, positions, vocab, dtype, top_k=4).to(device)
        assert workload.same(compiled(x), operation(x))


@pytest.mark.parametrize("name", workload.OPERATIONS)
def test_the_operators_take_fakes_of_a_gpu(name: str) -> None:
    """Shapes, dtypes and strides match the results on a CPU, and the device is the GPU."""
    x = workload.make(21, 3, 2, 17, torch.bfloat16, top_k=4)
    with FakeTensorMode():
        fakes = workload.OPERATIONS[name](Batch(*map(_on_cuda, x)))
    for fake, real in zip(fakes, workload.OPERATIONS[name](x), strict=True):
        assert isinstance(fake, FakeTensor) and fake.device == torch.device("cuda:0")
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert fake.stride() == real.stride()


def test_draws_take_fakes_of_a_gpu() -> None:
    """The key stays on the CPU, which reads it."""
    p, public, key, counter = _inputs()["sample"]
    device = torch.device("cuda:0")
    with FakeTensorMode(allow_non_fake_inputs=True):
        noise = torch.ops.adapmixed.gaussian(key, counter, [4, 5], 0.5, device=device)
        tokens = torch.ops.adapmixed.sample(_on_cuda(p), _on_cuda(public), key, counter)
    assert noise.device == tokens.device == device
    assert (noise.shape, noise.dtype) == ((4, 5), torch.float64)
    assert (tokens.shape, tokens.dtype) == ((2,), torch.int64)


@pytest.mark.parametrize("name", ["noise", "private_logits", "projection"])
@pytest.mark.slow
def test_compiled_programs_still_refuse_bad_data(name: str) -> None:
    """The checks of the data survive the compiler, although it drops calls without a result."""
    torch._dynamo.reset()
    private, public, noise, *_ = workload.make(21, 3, 2, 17, top_k=4)
    weight = torch.full((3, 2), 0.5, dtype=torch.float64)
    bad = {"noise": noise, "private_logits": private, "projection": weight}[name].clone()

    def program(data: Tensor) -> Tensor:
        if name == "noise":
            options = {"weight": 0.1, "order": 2.0, "threshold": 1.0, "top_k": 4}
            return adapmixed_ext.screen(private, public, data, **options).divergence
        if name == "projection":
            return adapmixed_ext.mixture(private, public, data)
        return adapmixed_ext.project(data, public, order=2.0, radius=1.0).weight

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(bad), program(bad))
    bad[(0,) * bad.ndim] = math.nan
    with pytest.raises(ValueError, match=name):
        compiled(bad)
