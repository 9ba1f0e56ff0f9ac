"""renyi_divergence: the Rényi divergence of distributions given by logits."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from adapmixed.limits import check_orders

from . import _tensors as check
from ._registry import backend, register, rows
from .inputs import log_sum_exp

_ops = torch.ops.adapmixed


# renyi_divergence: P and Q as (M, V)
def _renyi_divergence(
    p_logits: Tensor, q_logits: Tensor, p_lse: Tensor, q_lse: Tensor, orders: Sequence[float]
) -> tuple[Tensor, Tensor]:
    count, vocab = p_logits.shape
    forward = p_lse.new_empty((count, len(orders)))
    backward = torch.empty_like(forward)
    values = array("d", orders)
    backend(p_logits.device).call(
        "renyi_divergence",
        p_logits,
        ((1, count, vocab), rows(p_logits), rows(q_logits), p_lse.data_ptr(), q_lse.data_ptr()),
        *values.buffer_info(),
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


def _flat_rows(name: str, logits: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return rows (M, V) and log-sum-exps (M,) after broadcasting; errors keep given indices."""
    vocab = shape[-1]
    # Up to three axes are passed on as they are, so that an error has the caller's indices.
    given = logits if logits.dim() in (2, 3) else logits.reshape(-1, vocab)
    given = given if given.stride(-1) == 1 or vocab == 1 else given.contiguous()
    flat = check.logits(name, logits.expand(shape).reshape(-1, vocab), 2)
    lse, _ = log_sum_exp(given, name)
    return flat, lse.reshape(logits.shape[:-1]).expand(shape[:-1]).reshape(-1).contiguous()


def renyi_divergence(
    p_logits: Tensor, q_logits: Tensor, orders: float | Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Compute D_α(P‖Q) and D_α(Q‖P) of distributions given by logits (paper, Definition 3.2).

    D_α(P‖Q) = log Σ P^α Q^{1−α} / (α−1). P > 0 = Q gives +inf, and P = Q = 0 counts 0. A token with
    a log-probability below −10⁴ counts as absent. Results are upper bounds: never below the
    divergence, and at most 1e-4 of it plus 1e-9 above. Rows that are equal bit for bit give
    exactly 0. A divergence above 600/(α−1) may be +inf.

    Args:
        p_logits: (..., V).
        q_logits: (..., V), broadcast against `p_logits` in the leading axes.
        orders: one order or K orders α, 1 < α ≤ 1 024.

    Returns:
        (forward, backward), each (..., K) float64, in nats. On CUDA nothing is raised for a bad
        row, here or later: both are +inf.

    Raises:
        ValueError: wrong shapes, dtypes or devices; an order outside the limits; a row with NaN,
            +inf or no finite value.
    """
    p, q = check.tensor("p_logits", p_logits), check.tensor("q_logits", q_logits)
    for name, t in (("p_logits", p), ("q_logits", q)):
        if t.dim() == 0 or t.shape[-1] == 0:
            raise ValueError(f"{name} must have shape (..., V >= 1), got {tuple(t.shape)}")
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(f"q_logits must have V = {p.shape[-1]} tokens, got {q.shape[-1]}")
    values = check_orders(orders)
    try:
        shape = torch.broadcast_shapes(p.shape, q.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ValueError(
            f"q_logits must broadcast against p_logits {tuple(p.shape)}, got {tuple(q.shape)}"
        ) from None
    check.same("q_logits", q, "p_logits", p)
    p_rows, p_lse = _flat_rows("p_logits", p, shape)
    q_rows, q_lse = _flat_rows("q_logits", q, shape)
    forward, backward = _ops.renyi_divergence(p_rows, q_rows, p_lse, q_lse, values)
    result = (*shape[:-1], len(values))
    return forward.reshape(result), backward.reshape(result)
