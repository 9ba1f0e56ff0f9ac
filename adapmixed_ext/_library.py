"""torch.library schemas, implementations and fakes: one block per operator.

Everything here is internal: ``ops.py`` validates, documents and calls.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._registry import ENSEMBLE, F64, WEIGHTED, backend, ensemble, register, rows, weighted
from ._types import raise_row_errors


# log_sum_exp: (B, V) or (N, B, V) -> float64 lse and int32 status, without the last axis; `name` is
# the argument that an error speaks of.
def _log_sum_exp(logits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    lse = logits.new_empty(logits.shape[:-1], dtype=F64)
    status = logits.new_empty(logits.shape[:-1], dtype=torch.int32)
    shape = tuple(logits.shape) if logits.dim() == 3 else (1, *logits.shape)
    on = backend(logits.device)
    on.call("log_sum_exp", logits, shape, rows(logits), lse.data_ptr(), status.data_ptr())
    if on.immediate:
        raise_row_errors(name, status)
    return lse, status


def _log_sum_exp_fake(logits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    shape = logits.shape[:-1]
    return logits.new_empty(shape, dtype=F64), logits.new_empty(shape, dtype=torch.int32)


register(
    "log_sum_exp(Tensor logits, str name) -> (Tensor, Tensor)", _log_sum_exp, _log_sum_exp_fake
)


def refuse_foreign(name: str, foreign: Tensor) -> None:
    """Raises where rows turn out not to be those whose log-sum-exps were given."""
    bad = foreign.nonzero()
    if bad.numel():
        where = ", ".join(str(i) for i in bad[0].tolist())
        raise ValueError(
            f"projection must belong to these logits: at {name}[{where}] they are not the rows "
            f"that it was made from, or hold NaN, +inf or no finite value ({bad.shape[0]} such)"
        )


# project: (weight, complement, private_lse, status)
def _project(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, public_lse, order, radius = args
    results = _project_fake(*args)
    on = backend(private_logits.device)
    on.call(
        "project",
        private_logits,
        tuple(private_logits.shape),
        rows(private_logits),
        rows(public_logits),
        public_lse.data_ptr(),
        order,
        radius,
        *(result.data_ptr() for result in results),
        workspace=on.workspace("project", tuple(private_logits.shape)),
    )
    if on.immediate:
        raise_row_errors("private_logits", results[3])
    return results


def _project_fake(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_lse = args[0], args[2]
    weight = public_lse.new_empty(private_logits.shape[:2])
    status = torch.empty_like(weight, dtype=torch.int32)
    return weight, torch.empty_like(weight), torch.empty_like(weight), status


register(
    "project(Tensor private_logits, Tensor public_logits, Tensor public_lse, float order,"
    " float radius) -> (Tensor, Tensor, Tensor, Tensor)",
    _project,
    _project_fake,
)


# leave_one_out: (N, B, K)
def _leave_one_out(*args: Any) -> Tensor:
    *inputs, orders, zero_out, num_models = args
    loss = _leave_one_out_fake(*args)
    options = list(orders), zero_out, num_models
    balance = torch.empty_like(inputs[2])
    pointers = loss.data_ptr(), balance.data_ptr()
    on = backend(loss.device)
    size = on.workspace("leave_one_out", tuple(inputs[0].shape), len(orders))
    arguments = *weighted(*inputs), *options, *pointers
    on.call("leave_one_out", inputs[0], *arguments, workspace=size)
    if on.immediate:
        refuse_foreign("private_logits", ~(balance.abs() <= 1e-5))
    return loss


def _leave_one_out_fake(*args: Any) -> Tensor:
    private_lse, orders = args[2], args[-3]
    loss: Tensor = private_lse.new_empty((*private_lse.shape, len(orders)))
    return loss


register(
    f"leave_one_out({WEIGHTED}, float[] orders, bool zero_out, int num_models) -> Tensor",
    _leave_one_out,
    _leave_one_out_fake,
)


# step: project, then leave_one_out of all rows; (weight, complement, private_lse, public_lse,
# status, public_status, loss)
def _step(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, *options = args
    *found, public_status, loss = results = _step_fake(*args)
    balance = torch.empty_like(results[0])
    on = backend(private_logits.device)
    shape = tuple(private_logits.shape)
    on.call(
        "step",
        private_logits,
        shape,
        rows(private_logits),
        rows(public_logits),
        *options,
        *(result.data_ptr() for result in (*found, loss, public_status, balance)),
        workspace=on.workspace("step", shape, loss.shape[-1]),
    )
    if on.immediate:
        # In this order: each is defined where those before it found nothing.
        raise_row_errors("public_logits", public_status)
        raise_row_errors("private_logits", found[4])
        refuse_foreign("private_logits", ~(balance.abs() <= 1e-5))
    return results


def _step_fake(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, orders = args[0], args[1], args[4]
    public_lse = public_logits.new_empty(public_logits.shape[:1], dtype=F64)
    *weights, status = _project_fake(private_logits, public_logits, public_lse)
    loss = public_lse.new_empty((*status.shape, len(orders)))
    return *weights, public_lse, status, torch.empty_like(public_lse, dtype=torch.int32), loss


register(
    "step(Tensor private_logits, Tensor public_logits, float order, float radius, float[] orders,"
    " bool zero_out, int num_models)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _step,
    _step_fake,
)


# mixture: (B, V)
def _mixture(*args: Any) -> Tensor:
    result = _mixture_fake(*args)
    on = backend(result.device)
    on.call("mixture", args[0], *weighted(*args), result.data_ptr())
    if on.immediate:
        refuse_foreign("position ", ~((result.sum(-1) - 1.0).abs() <= 1e-6))
    return result


def _mixture_fake(*args: Any) -> Tensor:
    public_logits: Tensor = args[1]
    return public_logits.new_empty(public_logits.shape, dtype=F64)


register(f"mixture({WEIGHTED}) -> Tensor", _mixture, _mixture_fake)


def refuse_targets(targets: Tensor, vocab: int) -> None:
    """Raises for a target outside the vocabulary, which would be read outside the rows."""
    outside = ((targets < 0) | (targets >= vocab)).nonzero()
    if outside.numel():
        at, got = int(outside[0]), int(targets[outside[0]])
        raise ValueError(f"targets[{at}] must be a token in [0, {vocab}), got {got}")


# log_prob: (B,)
def _log_prob(*args: Any) -> Tensor:
    *inputs, targets = args
    on = backend(targets.device)
    if on.immediate:
        refuse_targets(targets, args[1].shape[-1])
    result = _log_prob_fake(*args)
    on.call("log_prob", args[0], *weighted(*inputs), targets.data_ptr(), result.data_ptr())
    if on.immediate:
        refuse_foreign("position ", ~(result <= 1e-6))
    return result


def _log_prob_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[3])


register(f"log_prob({WEIGHTED}, Tensor targets) -> Tensor", _log_prob, _log_prob_fake)


# renyi_divergence: P and Q as (M, V)
def _renyi_divergence(
    p_logits: Tensor, q_logits: Tensor, p_lse: Tensor, q_lse: Tensor, orders: Sequence[float]
) -> tuple[Tensor, Tensor]:
    count, vocab = p_logits.shape
    forward = p_lse.new_empty((count, len(orders)))
    backward = torch.empty_like(forward)
    backend(p_logits.device).call(
        "renyi_divergence",
        p_logits,
        (1, count, vocab),
        rows(p_logits),
        rows(q_logits),
        p_lse.data_ptr(),
        q_lse.data_ptr(),
        list(orders),
        forward.data_ptr(),
        backward.data_ptr(),
    )
    return forward, backward


def _renyi_divergence_fake(
    p_logits: Tensor, q_logits: Tensor, p_lse: Tensor, q_lse: Tensor, orders: Sequence[float]
) -> tuple[Tensor, Tensor]:
    shape = (p_logits.shape[0], len(orders))
    return p_lse.new_empty(shape), p_lse.new_empty(shape)


register(
    "renyi_divergence(Tensor p_logits, Tensor q_logits, Tensor p_lse, Tensor q_lse,"
    " float[] orders) -> (Tensor, Tensor)",
    _renyi_divergence,
    _renyi_divergence_fake,
)


# screen: (divergence, passed)
def _screen(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, noise, active, weight, order, threshold, top_k, num_models = args
    divergence, passed = _screen_fake(*args)
    inputs = noise.data_ptr(), 0 if active is None else active.data_ptr()
    options = weight, order, threshold, top_k, num_models
    pointers = divergence.data_ptr(), passed.data_ptr()
    on = backend(noise.device)
    size = on.workspace("screen", tuple(tensors[0].shape), top_k)
    arguments = *ensemble(*tensors), *inputs, *options, *pointers
    on.call("screen", tensors[0], *arguments, workspace=size)
    return divergence, passed


def _screen_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args[3]), torch.empty_like(args[3], dtype=torch.bool)


register(
    f"screen({ENSEMBLE}, Tensor noise, Tensor? active, float weight, float order,"
    " float threshold, int top_k, int num_models) -> (Tensor, Tensor)",
    _screen,
    _screen_fake,
)


# checked: a copy of values known to lie in [least, most]. The result is what the caller goes on
# with: a check without one would be dropped by a compiler. Where nothing can be raised at once,
# what does not lie there is NaN, and so is what is made of it.
def _checked(values: Tensor, name: str, least: float, most: float) -> Tensor:
    if not backend(values.device).immediate:
        good = (values >= least) & (values <= most) & values.isfinite()
        return torch.where(good, values, math.nan)
    if values.numel():
        low, high = (float(extreme) for extreme in torch.aminmax(values))
        if least <= low and high <= most and math.isfinite(low) and math.isfinite(high):
            return values.clone()
    good = (values >= least) & (values <= most) & values.isfinite()
    bad = (~good).nonzero()
    if bad.numel():
        at = tuple(bad[0].tolist())
        where = ", ".join(str(i) for i in at)
        rule = "finite" if most == math.inf and least == -math.inf else f"in [{least:g}, {most:g}]"
        raise ValueError(f"{name}[{where}] must be {rule}, got {float(values[at])}")
    return values.clone()


def _checked_fake(values: Tensor, name: str, least: float, most: float) -> Tensor:
    return torch.empty_like(values)


register(
    "checked(Tensor values, str name, float least, float most) -> Tensor",
    _checked,
    _checked_fake,
)
