"""Every operator in plain float64 torch: slow, and readable as the paper's equations.

The functions take the arguments of the public operators and return plain tensors or tuples. They
state what the kernels must compute; they do not validate their arguments.

Rényi divergences are one quantity, D_a(P || Q), with L = log P/Q at hand. As sum Q (P/Q - 1) = 0,

    (a - 1) D_a(P || Q) = log1p( sum Q ((1 + x)^a - 1 - a x) ),    1 + x = e^L,

whose terms are all >= 0, so that nothing cancels when P and Q are close. The terms are kept as
logarithms: a token with q = 1e-300 and ratio 1e290 overflows neither way.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SERIES_TERMS = 16
_HALVINGS = 72  # 708 nats (the smallest normal float64) to 2^-72 * 708 < 2e-19
_TINY = torch.finfo(torch.float64).tiny
_CLIP_ABSENT = -600.0  # log p, below which p counts as 0 under a box
_UNITS = 2**1074  # in 1: every double is a multiple of 2^-1074


def renyi_divergence(
    p_logits: Tensor, q_logits: Tensor, orders: float | Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return D_a(P || Q) and D_a(Q || P) of rows of logits (..., V), each (..., K), in nats."""
    log_p, log_q = log_softmax(p_logits), log_softmax(q_logits)
    ratio = torch.where(torch.isneginf(log_p) & torch.isneginf(log_q), 0.0, log_p - log_q)
    log_p, log_q = log_p.expand_as(ratio), log_q.expand_as(ratio)
    forward = [divergence_of_logs(log_p, log_q, ratio, a) for a in order_list(orders)]
    backward = [divergence_of_logs(log_q, log_p, -ratio, a) for a in order_list(orders)]
    return torch.stack(forward, -1), torch.stack(backward, -1)


def divergence_of_logs(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, order: float) -> Tensor:
    """Return D_a(P || Q) over the last axis.

    ``log_ratio`` is L, given apart: it is known better than the difference of two logarithms.
    P = Q = 0 counts 0, P > 0 = Q gives +inf.
    """
    absent = torch.isneginf(log_p) & torch.isneginf(log_q)
    unsupported = torch.isneginf(log_q) & ~absent
    ratio = torch.where(torch.isneginf(log_q), torch.zeros_like(log_ratio), log_ratio)
    log_sum = torch.logsumexp(log_q + log_excess(order, ratio), dim=-1)
    value = torch.logaddexp(torch.zeros_like(log_sum), log_sum) / (order - 1)
    return torch.where(unsupported.any(-1), torch.full_like(value, math.inf), value)


def both_ways(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, order: float) -> Tensor:
    """Return D<->_a, the larger of D_a(P || Q) and D_a(Q || P)."""
    forward = divergence_of_logs(log_p, log_q, log_ratio, order)
    return torch.maximum(forward, divergence_of_logs(log_q, log_p, -log_ratio, order))


def log_excess(order: float, log_ratio: Tensor) -> Tensor:
    """Return log((1 + x)^a - 1 - a x) for e^L = 1 + x, L in [-inf, inf], a > 1."""
    eta = order - 1
    x = torch.expm1(log_ratio)
    series = 2 * x.abs().log() + _binomial_tail(order, x).log()
    # Differences of terms of size eta, not of size 1, with the power itself factored out above 1.
    decay = torch.exp(-eta * log_ratio)
    above = -torch.expm1(-eta * log_ratio) + eta * torch.expm1(-log_ratio) * decay
    below = torch.exp(log_ratio) * torch.expm1(eta * log_ratio) - eta * x
    exact = torch.where(log_ratio >= 0, order * log_ratio + above.log(), below.log())
    return torch.where(x.abs() * order < 0.05, series, exact)


def _binomial_tail(order: float, x: Tensor) -> Tensor:
    """Return ((1 + x)^a - 1 - a x) / x^2 = sum_{k >= 2} binom(a, k) x^{k-2}, a |x| small."""
    coefficient = order * (order - 1) / 2
    total, power = torch.zeros_like(x), torch.ones_like(x)
    for k in range(2, 2 + _SERIES_TERMS):
        total = total + coefficient * power
        coefficient *= (order - k) / (k + 1)
        power = power * x
    return total


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities in float64; the maximum is subtracted first, to keep gaps."""
    logits = logits.double()
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def order_list(orders: float | Sequence[float]) -> list[float]:
    return [float(a) for a in orders] if isinstance(orders, Sequence) else [float(orders)]


def project(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> Tensor:
    """Return max{w in [0, 1] : D<->_a(w p_i + (1 - w) q || q) <= R} (Algorithm 1, line 11).

    The weights (N, B), found by geometric bisection, are on the feasible side up to the rounding
    of the float64 constraint (some 1e-13 of it). A token with q = 0 < p_i admits only weight 0.
    """
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    masked = (torch.isneginf(log_q) & ~torch.isneginf(log_p)).any(-1)
    ratio = torch.where(torch.isneginf(log_q), 0.0, log_p - log_q)
    log_q = log_q.expand_as(ratio)

    def feasible(weight: Tensor) -> Tensor:
        mixed = _log_mix_ratio(ratio, weight.unsqueeze(-1))
        return both_ways(log_q + mixed, log_q, mixed, order) <= radius

    large = torch.ones_like(ratio[..., 0])
    small = _TINY * large
    none, whole = masked | ~feasible(small), feasible(large)
    for _ in range(_HALVINGS):
        middle = small.sqrt() * large.sqrt()
        fits = feasible(middle)
        small, large = torch.where(fits, middle, small), torch.where(fits, large, middle)
    return torch.where(none, 0.0, torch.where(whole, 1.0, small))


def _log_mix_ratio(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """Return log(w r + 1 - w) for r = p_i/q: by w (r - 1) near 1, by two logarithms elsewhere."""
    x = weight * torch.expm1(log_ratio)
    far = log_mix(log_ratio, torch.zeros_like(log_ratio), weight)
    return torch.where(x.abs() < 0.5, torch.log1p(x), far)


def log_mix(log_p: Tensor, log_q: Tensor, weight: Tensor) -> Tensor:
    """Return log(w p + (1 - w) q)."""
    weighted = torch.where(weight > 0, weight.log() + log_p, -math.inf)
    return torch.logaddexp(weighted, (1 - weight).log() + log_q)


def weight_of(projection: Any) -> Tensor:
    """Return the weight (N, B, 1) of a weight or a Projection."""
    weight = projection if isinstance(projection, Tensor) else projection.weight
    return weight.double().unsqueeze(-1)


def clip_project(
    private_logits: Tensor, public_logits: Tensor, *, lower: float, upper: float
) -> Tensor:
    """Return p_bar_i = clip(s p_i, c q, C q), (N, B, V), with the s that makes it sum to 1.

    Found by bisection of log s. Where C q on the support of p_i is less than 1, the rest is spread
    over the other tokens as q is.
    """
    return log_clip(private_logits, public_logits, lower, upper).exp()


def log_clip(private_logits: Tensor, public_logits: Tensor, lower: float, upper: float) -> Tensor:
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    log_q = log_q.expand_as(log_p)
    if lower == 1 or upper == 1:
        return log_q
    q = log_q.exp()
    held = ~torch.isneginf(log_q) & (log_p >= _CLIP_ABSENT)
    ratio = torch.where(held, log_p - log_q, -math.inf)
    covered = torch.where(held, q, 0.0).sum(-1, keepdim=True)
    rest = ((1 - upper * covered) / (1 - covered)).clamp(lower, 1.0)
    least = -math.inf if lower == 0 else math.log(lower)

    def log_ratio(log_scale: Tensor) -> Tensor:
        return (ratio + log_scale).clamp(least, math.log(upper))

    low, high = torch.full_like(covered, math.log1p(-lower)), torch.full_like(covered, 620.0)
    for _ in range(90):
        middle = (low + high) / 2
        reached = (q * log_ratio(middle).exp()).sum(-1, keepdim=True) >= 1
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    degenerate = torch.where(held, math.log(upper), rest.log())
    small = upper * covered + lower * (1 - covered) <= 1
    return log_q + torch.where(small, degenerate, log_ratio(high))


def log_pool(
    private_logits: Tensor,
    public_logits: Tensor,
    *,
    lower: float,
    upper: float,
    scale: float,
    num_models: int | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p, its log-normaliser and the spans: p ~ q exp((scale/N) sum_i u_i).

    Returns (log p (B, V), the log-normaliser (B,), span = max u_i - min u_i (N, B) where q > 0).
    """
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    absent = torch.isneginf(log_q)
    u = torch.where(absent, 0.0, log_p - log_q).clamp(lower, upper)
    most = torch.where(absent, -math.inf, u).amax(-1)
    span = most - torch.where(absent, math.inf, u).amin(-1)
    total = u.sum(0) if active is None else (u * active.unsqueeze(-1)).sum(0)
    log_weight = log_q + scale / (num_models or private_logits.shape[0]) * total
    log_normaliser = torch.logsumexp(log_weight, -1)
    return log_weight - log_normaliser.unsqueeze(-1), log_normaliser, span


def mixture(private_logits: Tensor, public_logits: Tensor, projection: Any) -> Tensor:
    """Return p = mean_i (w_i p_i + (1 - w_i) q), (B, V) (Algorithm 1, line 14)."""
    return _log_mixture(private_logits, public_logits, projection).exp()


def log_prob(
    private_logits: Tensor, public_logits: Tensor, projection: Any, targets: Tensor
) -> Tensor:
    """Return log p(target), (B,), of the same mixture."""
    log_p = _log_mixture(private_logits, public_logits, projection)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _log_mixture(private_logits: Tensor, public_logits: Tensor, projection: Any) -> Tensor:
    log_bar = log_projected(private_logits, public_logits, projection)
    return torch.logsumexp(log_bar, dim=0) - math.log(private_logits.shape[0])


def log_projected(private_logits: Tensor, public_logits: Tensor, projection: Any) -> Tensor:
    """Return log p_bar_i, (N, B, V), of a weight, a Projection or a Clipping."""
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    if not hasattr(projection, "log_scale"):
        return log_mix(log_p, log_q, weight_of(projection))
    bar = log_clip(private_logits, public_logits, projection.lower, projection.upper)
    if projection.active is None:
        return bar
    return torch.where(projection.active.unsqueeze(-1), bar, log_q)


def leave_one_out(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Any,
    *,
    orders: float | Sequence[float],
    adjacency: str = "add_remove",
    num_models: int | None = None,
) -> Tensor:
    """Return D<->_a(p || p') of every model, (N, B, K); p is the mixture, p' that without model i.

    ``"add_remove"``: p' is the mean of the others, q if there is none. ``"zero_out"``: slot i
    answers q. ``num_models`` counts all slots; those without a row answer q.
    """
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    models = num_models or private_logits.shape[0]
    log_bar = log_projected(private_logits, public_logits, projection)
    missing = models - private_logits.shape[0]
    log_missing = log_q + (math.log(missing) if missing else -math.inf)
    log_sum = torch.logaddexp(torch.logsumexp(log_bar, 0), log_missing)
    log_rest = torch.logaddexp(_log_sum_of_others(log_bar), log_missing)
    log_total = log_sum.expand_as(log_bar) - math.log(models)
    if models == 1:
        log_kept = log_q.expand_as(log_bar)
    elif adjacency == "zero_out":
        log_kept = torch.logaddexp(log_rest, log_q) - math.log(models)
    else:
        log_kept = log_rest - math.log(models - 1)
    both_absent = torch.isneginf(log_kept) & torch.isneginf(log_total)
    log_ratio = torch.where(both_absent, 0.0, log_kept - log_total)
    # p'/p = 1 + x from excesses over q where these are neither huge nor all close to -1: exact
    # where the models agree.
    gap = log_bar.amax(0) - log_q
    near = (gap > -0.7) & (gap < 30)
    if hasattr(projection, "log_scale"):
        excess = torch.expm1(torch.where(near, log_bar - log_q, 0.0))
    else:
        weight = weight_of(projection)
        excess = weight * torch.expm1(torch.where(near & (weight > 0), log_p - log_q, 0.0))
    mean = excess.sum(0) / models
    if adjacency == "zero_out" or models == 1:
        x = -excess / (models * (1 + mean))
    else:
        x = (mean - excess) / ((models - 1) * (1 + mean))
    log_ratio = torch.where(near & (x.abs() < 0.5), torch.log1p(x), log_ratio)
    losses = [both_ways(log_kept, log_total, log_ratio, a) for a in order_list(orders)]
    return torch.stack(losses, -1)


def _log_sum_of_others(log_values: Tensor) -> Tensor:
    """Return log sum_{j != i} e^{values[j]} along the first axis, without subtracting."""
    none = torch.full_like(log_values[:1], -math.inf)
    before, after = [none], [none]
    for j in range(log_values.shape[0] - 1):
        before.append(torch.logaddexp(before[-1], log_values[j : j + 1]))
        after.append(torch.logaddexp(after[-1], log_values[-1 - j].unsqueeze(0)))
    return torch.logaddexp(torch.cat(before), torch.cat(after[::-1]))


def screen(
    private_logits: Tensor,
    public_logits: Tensor,
    noise: Tensor,
    *,
    weight: float,
    order: float,
    threshold: float,
    top_k: int,
    num_models: int | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the divergence and whether it passes, each (B,) (Algorithm 1, lines 1–7).

    Column j of ``noise`` (B, top_k) goes to the j-th most likely public token, ties by lower
    index, before re-scaling. A noisy score that is zero everywhere counts +inf.
    """
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    slots = num_models or private_logits.shape[0]
    on = torch.ones_like(log_p[..., :1]) if active is None else active.unsqueeze(-1).double()
    # s as a sum of nonnegative numbers, (slots - A + (1 - w) A)/slots q + w/slots sum p_i over the
    # A active rows, in logarithms; where it is near q, by its difference from q.
    count = on.sum(0)
    log_rest = torch.log(((slots - count) + (1 - weight) * count) / slots) + log_q
    log_sum = torch.logsumexp(log_p + on.log(), 0)
    log_share = math.log(weight / slots) if weight > 0 else -math.inf
    log_s = torch.logaddexp(log_rest, log_share + log_sum)
    shift = weight / slots * ((log_p.exp() - log_q.exp()) * on).sum(0)
    divergence = torch.full_like(log_q[:, 0], math.inf)
    for b, logits in enumerate(public_logits):
        keep = min(top_k, int((logits > -math.inf).sum()))
        top = torch.sort(logits.double(), descending=True, stable=True).indices[:keep]
        added, base = noise[b, :keep], log_q[b, top]
        x = (shift[b, top] + added) / base.exp()
        noisy = (log_s[b, top].exp() + added).clamp(min=0.0).log()
        log_ratio = torch.where(added == 0, log_s[b, top], noisy) - base
        log_ratio = torch.where(x.abs() < 0.5, torch.log1p(x), log_ratio)
        log_kept = torch.log_softmax(base, -1)
        scale = torch.logsumexp(log_kept + log_ratio, -1)
        if bool(scale > -math.inf):
            log_ratio = log_ratio - scale
            divergence[b] = divergence_of_logs(log_kept + log_ratio, log_kept, log_ratio, order)
    return divergence, divergence <= threshold


def sampling_weights(probabilities: Tensor, public_logits: Tensor) -> list[list[int]]:
    """Return the sampler's weights: p in units of 2^-1074, at least 1 if q > 0, and 0 if q = 0.

    Token v is drawn with probability w_v / sum(w). Python integers, exact.
    """
    rows = zip(probabilities.tolist(), (public_logits > -math.inf).tolist(), strict=True)
    return [
        [max(_units(p), 1) if held else 0 for p, held in zip(*row, strict=True)] for row in rows
    ]


def _units(p: float) -> int:
    numerator, denominator = p.as_integer_ratio()
    return numerator * (_UNITS // denominator)


def add_low_rank(
    start: Tensor, coefficients: Tensor, factors: Tensor, models: int, tokens: Tensor | None = None
) -> Tensor:
    """Return z + Σ_k c_k u_k of N members, (N, B, K)."""
    rows = factors.double()
    chosen = rows[tokens] if tokens is not None else rows.expand(len(coefficients), *rows.shape)
    added = torch.einsum("bgkm,bvgkm->gmbv", coefficients.double(), chosen).flatten(0, 1)
    return start.double() + added[:models]


def cross_entropy(
    public_logits: Tensor, coefficients: Tensor, factors: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, (n,), and the derivatives of their sum by c, (n, r), and by u, (r, V).

    Args:
        public_logits: (n, V).
        coefficients: c, (n, r).
        factors: u, (r, V), not in packs.
        targets: (n,) int64.
    """
    c, u = coefficients.double(), factors.double()
    log_p = (public_logits.double() + c @ u).log_softmax(-1)
    slope = log_p.exp()
    slope[torch.arange(len(targets)), targets] -= 1.0
    return -log_p.gather(1, targets[:, None])[:, 0], slope @ u.T, c.T @ slope
