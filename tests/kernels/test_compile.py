"""The operators as torch sees them: schemas, fake tensors, and compiled programs."""

from __future__ import annotations

import cases
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import adapmixed_ext


def _inputs() -> dict[str, tuple[object, ...]]:
    """Return arguments of every registered operator."""
    private, public = cases.logits(20, 3, 2, 17, 2.0, 0.5)
    private_lse, _ = torch.ops.adapmixed.log_sum_exp(private, "private_logits")
    public_lse, _ = torch.ops.adapmixed.log_sum_exp(public, "public_logits")
    ensemble = (private, public, private_lse, public_lse)
    ball = (None, 0.0, 0.0)
    weight = torch.full((3, 2), 0.25, dtype=torch.float64)
    noise = torch.full((2, 4), 0.01, dtype=torch.float64)
    active = torch.tensor([[True, False]] * 3)
    key = torch.arange(32, dtype=torch.uint8)
    box = (-0.25, 1.0, 2.0, 5)
    pool = adapmixed_ext.log_pool(
        private, public, lower=-0.25, upper=1.0, scale=2.0, num_models=5, active=active, keep=True
    )
    return {
        "log_sum_exp": (private, "private_logits"),
        "project": (private, public, 18.0, 3.6),
        "clip_project": (private, public, public_lse, 0.5, 2.0, [2.0, 18.0], 5),
        "leave_one_out": (*ensemble, weight, 1 - weight, *ball, [2.0, 18.0], False, 5),
        "mixture": (*ensemble, weight, 1 - weight, *ball),
        "log_prob": (*ensemble, weight, 1 - weight, *ball, torch.tensor([3, 16])),
        "log_pool": (private, public, active, *box, True),
        "pool_mixture": (*ensemble, pool.log_normaliser, active, *box),
        "pool_probabilities": (pool._log_weights, pool.log_normaliser, 17),
        "pool_log_prob": (
            *ensemble,
            pool.log_normaliser,
            torch.tensor([3, 16]),
            active,
            *box,
        ),  # fmt: skip
        "renyi_divergence": (private[0], public, private_lse[0], public_lse, [1.0, 2.0]),
        "screen": (*ensemble, noise, active, 0.1, 3.0, 1.0, 4, 3),
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
def test_opcheck(name: str) -> None:
    result = torch.library.opcheck(getattr(torch.ops.adapmixed, name).default, _inputs()[name])
    assert set(result.values()) == {"SUCCESS"}


def test_operators_do_not_mutate_or_alias() -> None:
    for name in _registered():
        schema = getattr(torch.ops.adapmixed, name).default._schema
        assert not schema.is_mutable, name
        assert all(r.alias_info is None for r in schema.returns), name


def _on_cuda(value: object) -> object:
    """Replace a tensor by a fake one on a GPU, which need not exist; keys stay on the CPU."""
    if not isinstance(value, Tensor) or value.dtype == torch.uint8:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")


@pytest.mark.parametrize("name", _registered())
def test_fakes_on_a_gpu(name: str) -> None:
    """Shapes, dtypes and strides match the results on a CPU, and the device is the GPU."""
    operator, arguments = getattr(torch.ops.adapmixed, name), _inputs()[name]
    options = {"device": torch.device("cuda:0")} if name == "gaussian" else {}
    expected = operator(*arguments)
    with FakeTensorMode(allow_non_fake_inputs=True):
        got = operator(*map(_on_cuda, arguments), **options)
    both = [(got,), (expected,)] if isinstance(got, Tensor) else [got, expected]
    if name == "log_pool":  # the last result is empty on the CPU
        assert both[0][-1].shape == (arguments[1].numel() + len(arguments[1]),)
        both = [results[:-1] for results in both]
    for fake, real in zip(*both, strict=True):
        assert isinstance(fake, FakeTensor) and fake.device == torch.device("cuda:0")
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert fake.stride() == real.stride()


def everything(
    private: Tensor, public: Tensor, noise: Tensor, targets: Tensor
) -> tuple[Tensor, ...]:
    projection = adapmixed_ext.project(private, public, order=18.0, radius=3.6)
    loss = adapmixed_ext.leave_one_out(private, public, projection, orders=[2.0, 18.0])
    mixture = adapmixed_ext.mixture(private, public, projection)
    log_prob = adapmixed_ext.log_prob(private, public, projection, targets)
    screening = adapmixed_ext.screen(
        private, public, noise, weight=0.1, order=18.0, threshold=1.0, top_k=noise.shape[1]
    )
    forward, backward = adapmixed_ext.renyi_divergence(private, public, [1.0, 3.0])
    bare = adapmixed_ext.mixture(private, public, 0.5 * projection.weight)
    box = {"lower": -0.25, "upper": 1.0, "num_models": private.shape[0]}
    pool = adapmixed_ext.log_pool(private, public, scale=2.0, **box)
    pooled = adapmixed_ext.mixture(private, public, pool)
    kept = adapmixed_ext.log_pool(private, public, scale=2.0, keep=True, **box)
    pooled_again = adapmixed_ext.mixture(private, public, kept)
    pooled_log = adapmixed_ext.log_prob(private, public, pool, targets)
    clipping = adapmixed_ext.clip_project(private, public, lower=0.5, upper=2.0, orders=3.0)
    assert clipping.charge is not None
    clipped = adapmixed_ext.mixture(private, public, clipping)
    clipped_log = adapmixed_ext.log_prob(private, public, clipping, targets)
    clipped_loss = adapmixed_ext.leave_one_out(private, public, clipping, orders=3.0)
    return (
        projection.weight, projection.complement, projection.status, loss, mixture, log_prob,
        screening.divergence, screening.passed, forward, backward, bare,
        pool.log_normaliser, pool.span, pooled, pooled_log, pooled_again,
        clipping.log_scale, clipping.residual, clipping.charge, clipped, clipped_log, clipped_loss,
    )  # fmt: skip


def _arguments(dtype: torch.dtype, positions: int, vocab: int) -> tuple[Tensor, ...]:
    private, public = cases.logits(21, 3, positions, vocab, 2.0, 0.5)
    noise = 0.01 * torch.arange(4 * positions, dtype=torch.float64).reshape(positions, 4)
    return private.to(dtype), public.to(dtype), noise, torch.arange(positions) % vocab


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.slow
def test_compiled_equals_eager(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    arguments = _arguments(dtype, 2, 17)
    for got, expected in zip(compiled(*arguments), everything(*arguments), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_public_operators_take_fakes_of_a_gpu(dtype: torch.dtype) -> None:
    arguments = _arguments(dtype, 2, 17)
    with FakeTensorMode():
        results = everything(*map(_on_cuda, arguments))
    for fake, real in zip(results, everything(*arguments), strict=True):
        assert fake.device == torch.device("cuda:0")
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.slow
def test_compiled_with_dynamic_shapes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=True)
    for positions, vocab in ((2, 17), (3, 40), (5, 9)):
        arguments = _arguments(torch.float32, positions, vocab)
        for got, expected in zip(compiled(*arguments), everything(*arguments), strict=True):
            assert torch.equal(got, expected)


def test_compiled_programs_still_refuse_bad_data() -> None:
    """The checks of the data survive the compiler, although it drops calls without a result."""
    torch._dynamo.reset()
    private, public, noise, _ = _arguments(torch.float32, 2, 17)

    def mix(weight: Tensor) -> Tensor:
        return adapmixed_ext.mixture(private, public, weight)

    def test(noise: Tensor) -> Tensor:
        return adapmixed_ext.screen(
            private, public, noise, weight=0.1, order=2.0, threshold=1.0, top_k=4
        ).divergence

    def project(private: Tensor) -> Tensor:
        return adapmixed_ext.project(private, public, order=2.0, radius=1.0).weight

    def compiled(function):
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    weight = torch.full((3, 2), 0.5, dtype=torch.float64)
    assert torch.equal(compiled(mix)(weight), mix(weight))
    weight[1, 1] = 1.5
    with pytest.raises(ValueError, match="projection"):
        compiled(mix)(weight)
    noise[0, 1] = float("nan")
    with pytest.raises(ValueError, match="noise"):
        compiled(test)(noise)
    private = private.clone()
    private[2, 1, 3] = float("nan")
    with pytest.raises(ValueError, match="private_logits"):
        compiled(project)(private)


def test_autocast_has_no_effect() -> None:
    arguments = _arguments(torch.float32, 2, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = everything(*arguments)
    for got, expected in zip(inside, everything(*arguments), strict=True):
        assert torch.equal(got, expected)


def test_inference_mode_and_vmap_free_tensors() -> None:
    arguments = _arguments(torch.float32, 2, 17)
    with torch.inference_mode():
        inside = everything(*(argument.clone() for argument in arguments))
    for got, expected in zip(inside, everything(*arguments), strict=True):
        assert torch.equal(got, expected)


def test_random_operators_compile() -> None:
    """A given key and counter compile; reserving them from a source breaks the graph."""
    public = torch.randn(3, 11)
    p = torch.softmax(public.double(), -1)
    key = torch.arange(32, dtype=torch.uint8)

    def program(p: Tensor, public: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.ops.adapmixed.gaussian(key, 5, [3, 2], 0.5)
        return noise, torch.ops.adapmixed.sample(p, public, key, 6)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(p, public, key), program(p, public, key), strict=True):
        assert torch.equal(ours, eager)
