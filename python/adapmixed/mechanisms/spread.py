"""The mixture, or pool, of an ensemble whose members are spread over ranks.

Where one rank has all of them these are the operators themselves. Else every rank projects its own
rows, and the mixture is linear in them: p = (1/N) Σ_r Σ_{i on r} p̄_i, or, in the logarithmic pool,
a function of Σ_r Σ_{i on r} u_i. All ranks must call these together.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.ranks import Ranks
from adapmixed_ext import Clipping, LogPool, Projection
from adapmixed_ext.ops import Inputs


def mixture(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | LogPool,
    ranks: Ranks,
    slots: int | None,
) -> Tensor:
    """The distribution of the whole ensemble, (B, V) float64, the same bits on every rank.

    Args:
        private_logits: (n, B, V) of this rank; n = 0 is a rank that adds nothing.
        public_logits: (B, V).
        projection: of these rows.
        ranks: that have the other rows.
        slots: what the sum over all ranks is divided by; None: these rows are all there are.
    """
    if isinstance(projection, LogPool):
        pool = _pooled(private_logits, public_logits, projection, ranks, slots)
        return ops.mixture(private_logits, public_logits, pool)
    if slots is None:
        return ops.mixture(private_logits, public_logits, projection)
    own = torch.zeros_like(public_logits, dtype=torch.float64)
    if len(private_logits):
        own = len(private_logits) * ops.mixture(private_logits, public_logits, projection)
    return ranks.sum(own) / slots


def log_prob(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | LogPool,
    targets: Tensor,
    ranks: Ranks,
    slots: int | None,
) -> Tensor:
    """log p(target) of the whole ensemble, (B,) float64; arguments as for :func:`mixture`."""
    if isinstance(projection, LogPool):
        pool = _pooled(private_logits, public_logits, projection, ranks, slots)
        return ops.log_prob(private_logits, public_logits, pool, targets)
    if slots is None:
        return ops.log_prob(private_logits, public_logits, projection, targets)
    own = torch.full_like(targets, -torch.inf, dtype=torch.float64)
    if len(private_logits):
        own = ops.log_prob(private_logits, public_logits, projection, targets)
        own = own + math.log(len(private_logits) / slots)
    return torch.logsumexp(ranks.each(own), 0)


def _pooled(
    private_logits: Tensor, public_logits: Tensor, pool: LogPool, ranks: Ranks, slots: int | None
) -> LogPool:
    """The pool with what all ranks add to it; the sum is exact, so that no order matters."""
    if slots is None:
        return pool
    own = ops.log_pool_sum(
        private_logits, public_logits, lower=pool.lower, upper=pool.upper, num_models=slots,
        active=pool.active,
    )  # fmt: skip
    total = ranks.sum(own)
    whole = ops.log_pool(
        private_logits, public_logits, lower=pool.lower, upper=pool.upper, scale=pool.scale,
        num_models=slots, active=pool.active, sum_log_ratio=total,
    )  # fmt: skip
    return replace(pool, log_normaliser=whole.log_normaliser, sum_log_ratio=total)


def mean_ratio(inputs: Inputs, projection: Projection, ranks: Ranks, slots: int) -> Tensor:
    """p/q of the whole ensemble, (B, V) float64; :func:`adapmixed_ext.density_ratio_sum`."""
    own = ops.density_ratio_sum(inputs.private, inputs.public, projection)
    return ranks.sum(own) / slots


def screened_elsewhere(
    inputs: Inputs, top_k: int, weight: float, slots: int, ranks: Ranks
) -> Tensor | None:
    """What the other ranks' models add to the screened mixture, for the rank that leads.

    (λ_s/N) Σ_i (p_i − q)[K] over the models of all ranks but the leading one, (B, k) float64 by
    rank of the token, as the screening's noise is: s is a sum, and the operator adds what it is
    given there before anything is set to 0 or re-scaled. None where nothing is to be added.
    """
    if ranks.alone or weight == 0.0:
        return None
    own = torch.zeros(len(inputs.public), top_k, dtype=torch.float64, device=inputs.public.device)
    if not ranks.leads:
        tokens = likeliest(inputs.public, top_k)
        log_q = inputs.public.gather(1, tokens).double() - inputs.public_lse.unsqueeze(-1)
        q, absent = log_q.exp(), torch.isneginf(log_q)
        for rows, lse in zip(inputs.private, inputs.private_lse, strict=True):
            own += (rows.gather(1, tokens).double() - lse.unsqueeze(-1)).exp() - q
        own = own.masked_fill_(absent, 0.0) * (weight / slots)
    return ranks.sum(own)


def likeliest(public_logits: Tensor, top_k: int) -> Tensor:
    """The top_k tokens of each row as the screening takes them, (B, k): ties by lower index."""
    least = public_logits.topk(top_k, dim=-1).values[:, -1:]
    above, level = public_logits > least, public_logits == least
    wanted = top_k - above.sum(-1, keepdim=True)
    chosen = above | (level & (level.cumsum(-1) <= wanted))
    tokens = chosen.nonzero()[:, 1].reshape(len(public_logits), top_k)  # ascending in each row
    order = public_logits.gather(1, tokens).argsort(dim=-1, descending=True, stable=True)
    return tokens.gather(1, order)
