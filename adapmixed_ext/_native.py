"""The registered operators, ``torch.ops.adapmixed``: schemas, fakes, and calls of `_C`. Internal.

The compiled module knows nothing of torch. It takes addresses, strides and dtype codes; its structs
are tuples of their fields (csrc/common/operators.h). Arguments were checked before, in operators.py
and inputs.py. What is wrong with the data is found here: the CPU raises at once, and calls that
only queue work return statuses, and +inf, NaN or token -1 as results.
"""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _C
from .types import first_of, raise_row_errors

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
F64, I32 = torch.float64, torch.int32
# torch.library is untyped: this one name keeps the rest of the file checked.
_lib: Any = torch.library.Library("adapmixed", "DEF")  # type: ignore[no-untyped-call]
implementations: dict[str, Callable[..., Any]] = {}
_Run = Callable[..., None]


@dataclass(frozen=True)
class Backend:
    """The compiled operators of one kind of device, and how they are called.

    Attributes:
        module: the operators, each taking `where` as its last argument.
        where: maps a tensor on the device and a workspace to the place where to work.
        immediate: whether the call itself raises errors in the data.
    """

    module: Any
    where: Callable[[Tensor, Tensor | None], Any]
    immediate: bool


def _queue(like: Tensor, memory: Tensor | None) -> tuple[int, int, int]:
    stream = torch.cuda.current_stream(like.device)
    return stream.device_index, stream.cuda_stream, 0 if memory is None else memory.data_ptr()


backends = {"cpu": Backend(_C.cpu, lambda like, memory: torch.get_num_threads(), True)}
if _C.with_cuda:
    backends["cuda"] = Backend(_C.cuda, _queue, False)


def backend(device: torch.device) -> Backend:
    """Return the operators of a device, or raise if there are none in this build."""
    if device.type not in backends:
        raise RuntimeError(
            f"adapmixed_ext was built without kernels for {device}: move the tensors to the CPU "
            "(build_info() says what was built)"
        )
    return backends[device.type]


def immediate(device: torch.device) -> bool:
    """Tell whether calls on a device raise errors in the data; the device may be absent."""
    return device.type == "cpu" and backends["cpu"].immediate


def call(name: str, like: Tensor, *arguments: Any, workspace: tuple[Any, ...] = ()) -> bool:
    """Call an operator of the compiled module; tell whether errors in the data are to be raised.

    Args:
        like: a tensor on the device where to work.
        arguments: tensors, numbers, None for null, and tuples of these.
        workspace: what the size of a GPU's workspace depends on; the CPU's threads have their own.
    """
    on, memory = backend(like.device), None
    if workspace and not on.immediate:
        size = getattr(on.module, f"{name}_workspace")(*workspace)
        memory = like.new_empty(size, dtype=torch.uint8)
    getattr(on.module, name)(*map(native, arguments), on.where(like, memory))
    return on.immediate


def native(value: Any) -> Any:
    """Return what the compiled module takes: logits as their struct, other tensors as addresses."""
    if isinstance(value, tuple):
        return tuple([native(item) for item in value])
    if isinstance(value, (int, float)):
        return value
    if value is None:
        return 0
    code = DTYPES.get(value.dtype)
    if code is None:
        return value.data_ptr()
    strides = value.stride()
    return value.data_ptr(), strides[0] if len(strides) == 3 else 0, strides[-2], code


def _operator(schema: str, results: Callable[..., Any]) -> Callable[[_Run], _Run]:
    """Register an operator, the same for all devices, whose function writes into its results.

    Args:
        schema: as torch.library takes it.
        results: makes the results; it is the fake, too.
    """

    def register(run: _Run) -> _Run:
        def implementation(*arguments: Any) -> Any:
            outputs = results(*arguments)
            run(outputs, *arguments)
            return outputs

        name = schema.partition("(")[0]
        implementations[name] = implementation
        _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _lib.impl(name, implementation, key)
        torch.library.register_fake(f"adapmixed::{name}", results, lib=_lib)
        return run

    return register


def _of_rows(logits: Tensor, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    """Make a result of each dtype, with one number for each row of these logits."""
    return tuple(logits.new_empty(logits.shape[:-1], dtype=dtype) for dtype in dtypes)


def _refuse_foreign(name: str, foreign: Tensor) -> None:
    """Raise if rows are not those whose log-sum-exps were given."""
    if at := first_of(foreign):
        raise ValueError(
            f"projection must belong to these logits: at {name}{at} they are not the rows that it "
            f"was made from, or hold NaN, +inf or no finite value ({int(foreign.sum())} such)"
        )


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "random numbers cannot be captured in a CUDA graph: every replay would draw the same"
        )


@_operator(
    "checked(Tensor values, str name, float least, float most) -> Tensor",
    lambda values, *_: torch.empty_like(values),
)
def _checked(output: Tensor, values: Tensor, name: str, least: float, most: float) -> None:
    """Copy values known to lie in [least, most].

    Callers go on with the copy, since a compiler would drop a check without a result. If nothing
    can be raised at once, values outside become NaN, and so does whatever is computed from them.
    """
    good = (values >= least) & (values <= most) & values.isfinite()
    if not immediate(values.device):
        output.copy_(torch.where(good, values, math.nan))
    elif at := first_of(~good):
        rule = "finite" if most == math.inf else f"in [{least:.9g}, {most:.9g}]"
        raise ValueError(f"{name}{at} must be {rule}, got {values[tuple(at)].item()}")
    else:
        output.copy_(values)


@_operator(
    "log_sum_exp(Tensor logits, str name) -> (Tensor, Tensor)",
    lambda logits, _: _of_rows(logits, F64, I32),
)
def _log_sum_exp(outputs: tuple[Tensor, ...], logits: Tensor, name: str) -> None:
    """Find lse and status, without the last axis, of (B, V) or (N, B, V)."""
    shape = logits.shape if logits.dim() == 3 else (1, *logits.shape)
    if call("log_sum_exp", logits, logits, *shape, *outputs, workspace=(shape,)):
        raise_row_errors(name, outputs[1])


@_operator(
    "project(Tensor private_logits, Tensor public_logits, float order, float radius)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda private, public, *_: (*_of_rows(private, F64, F64, I32), *_of_rows(public, F64, I32)),
)
def _project(
    outputs: tuple[Tensor, ...], private: Tensor, public: Tensor, order: float, radius: float
) -> None:
    """Find (weight, private_lse, status, public_lse, public_status)."""
    inputs = private.shape, private, public
    if call("project", private, inputs, order, radius, outputs, workspace=(private.shape,)):
        raise_row_errors("public_logits", outputs[4])
        raise_row_errors("private_logits", outputs[2])


def _clip_results(private: Tensor, *args: Any) -> tuple[Tensor, ...]:
    log_scale, residual, private_lse, status = _of_rows(private, F64, F64, F64, I32)
    charge = log_scale.new_empty((*log_scale.shape, len(args[4])))
    return log_scale, residual, charge, private_lse, status


@_operator(
    "clip_project(Tensor private_logits, Tensor public_logits, Tensor public_lse, float lower,"
    " float upper, float[] orders, int num_models) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _clip_results,
)
def _clip_project(outputs: tuple[Tensor, ...], *args: Any) -> None:
    """Find (log_scale, residual, charge, private_lse, status); charge is empty without orders."""
    *inputs, lower, upper, orders, num_models = args
    values, shape = array("d", orders), inputs[0].shape
    options = lower, upper, *values.buffer_info(), num_models
    if call("clip_project", outputs[0], (shape, *inputs), options, outputs, workspace=(shape,)):
        raise_row_errors("private_logits", outputs[4])


def _pool_results(private: Tensor, public: Tensor, *_: Any) -> tuple[Tensor, ...]:
    of_rows = *_of_rows(public, F64), *_of_rows(private, F64, F64, I32), *_of_rows(public, F64, I32)
    return *of_rows, public.new_empty(public.shape, dtype=F64)


@_operator(
    "log_pool(Tensor private_logits, Tensor public_logits, Tensor? differences, float lower,"
    " float upper, float scale, int num_models, Tensor? active)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _pool_results,
)
def _log_pool(outputs: tuple[Tensor, ...], *args: Any) -> None:
    """Find (log_normaliser, span, private_lse, status, public_lse, public_status, log_weights)."""
    shape = args[0].shape
    inputs, options = (shape, *args[:3]), args[3:]
    if call("log_pool", outputs[0], inputs, options, outputs, workspace=(shape,)):
        raise_row_errors("public_logits", outputs[5])
        raise_row_errors("private_logits", outputs[3])


_ENSEMBLE = "Tensor private_logits, Tensor public_logits, Tensor private_lse, Tensor public_lse"


@_operator(
    f"screen({_ENSEMBLE}, Tensor noise, Tensor tokens, Tensor? active, float weight, float order,"
    " float threshold, int num_models) -> (Tensor, Tensor)",
    lambda private, public, *_: _of_rows(public, F64, torch.bool),
)
def _screen(outputs: tuple[Tensor, ...], *args: Any) -> None:
    """Find (divergence, passed)."""
    *ensemble, noise, tokens, active, weight, order, threshold, num_models = args
    numbers = weight, order, threshold, tokens.shape[1], num_models
    options = *numbers, active, noise, tokens, torch.empty_like(noise)
    call("screen", noise, (ensemble[0].shape, *ensemble), options, *outputs)


# The arguments of operators on projected rows: an ensemble, and the fields of struct Weights.
_WEIGHTED = (
    f"{_ENSEMBLE}, Tensor weight, Tensor? residual, float lower, float upper, Tensor? active"
)


def _weighted(args: tuple[Any, ...]) -> tuple[Any, Any]:
    return (args[0].shape, *args[:4]), args[4:9]


@_operator(
    f"leave_one_out({_WEIGHTED}, float[] orders, bool zero_out, int num_models) -> Tensor",
    lambda *args: args[2].new_empty((*args[2].shape, len(args[9]))),
)
def _leave_one_out(loss: Tensor, *args: Any) -> None:
    """Find the losses, (N, B, K)."""
    orders, zero_out, num_models = args[9:]
    values, balance = array("d", orders), torch.empty_like(args[2])
    arguments = *_weighted(args), (*values.buffer_info(), zero_out, num_models), loss, balance
    if call("leave_one_out", loss, *arguments, workspace=(args[0].shape, len(orders))):
        _refuse_foreign("private_logits", ~(balance.abs() <= 1e-5))
        # The balance tells of p̄_i − q alone. CUDA's kernels add up q themselves.
        sums, _ = torch.ops.adapmixed.log_sum_exp(args[1], "public_logits")
        _refuse_foreign("public_logits", ~((sums - args[3]).abs() <= 1e-5))


@_operator(
    f"mixture({_WEIGHTED}) -> Tensor",
    lambda private, public, *_: public.new_empty(public.shape, dtype=F64),
)
def _mixture(p: Tensor, *args: Any) -> None:
    """Find p, (B, V)."""
    if call("mixture", p, *_weighted(args), p, workspace=(args[0].shape,)):
        _refuse_foreign("position ", ~((p.sum(-1) - 1.0).abs() <= 1e-6))


@_operator(
    f"log_prob({_WEIGHTED}, Tensor targets) -> Tensor", lambda *args: torch.empty_like(args[3])
)
def _log_prob(output: Tensor, *args: Any) -> None:
    """Find log p, (B,), of targets in [0, V); a GPU gives NaN for others."""
    if call("log_prob", output, *_weighted(args), args[9], output):
        _refuse_foreign("position ", ~(output <= 1e-6))


@_operator(
    "renyi_divergence(Tensor p_logits, Tensor q_logits, Tensor p_lse, Tensor q_lse,"
    " float[] orders) -> (Tensor, Tensor)",
    lambda p, q, lse, _, orders: tuple(lse.new_empty((p.shape[0], len(orders))) for _ in range(2)),
)
def _renyi_divergence(outputs: tuple[Tensor, ...], *args: Any) -> None:
    """Find the divergences of P and Q, (M, V), in both directions, (M, K)."""
    *ensemble, orders = args
    values, shape = array("d", orders), (1, *args[0].shape)
    call("renyi_divergence", outputs[0], (shape, *ensemble), *values.buffer_info(), *outputs)


# The operators that draw read 32 bytes from the key's address, on the CPU. A call number is never
# used twice with the same key.
@_operator(
    "gaussian(Tensor key, int counter, SymInt[] shape, float sigma, Device? device=None) -> Tensor",
    lambda key, _, shape, __, device=None: key.new_empty(
        tuple(shape), dtype=F64, device=device or key.device
    ),
)
def _gaussian(output: Tensor, key: Tensor, counter: int, _: Any, sigma: float, *__: Any) -> None:
    _refuse_capture(output.device)
    call("gaussian", output, key, counter, sigma, output.numel(), output)


@_operator(
    "sample(Tensor probabilities, Tensor public_logits, Tensor key, int counter) -> Tensor",
    lambda p, *_: p.new_empty(p.shape[:1], dtype=torch.int64),
)
def _sample(tokens: Tensor, p: Tensor, public: Tensor, key: Tensor, counter: int) -> None:
    _refuse_capture(p.device)
    status = torch.empty_like(tokens, dtype=I32)
    inputs = p, public, *p.shape, key, counter
    if not call("sample", p, *inputs, tokens, status, workspace=tuple(p.shape)):
        return
    if at := first_of(status):
        row, held = p[at[0]], ~public[at[0]].isneginf()
        if int(status[at[0]]) == 3:
            rule, got = "sum to V 2^-99 or more where q > 0", f"{float(row[held].sum())}"
        else:
            rule = "be >= 0 and sum to 1 within 1e-6"
            got = f"a row with minimum {float(row.min())} and sum {float(row.sum())}"
        raise ValueError(f"probabilities{at} must {rule}, got {got}")
