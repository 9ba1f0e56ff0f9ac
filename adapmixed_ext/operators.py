"""The public operators: what they compute, their arguments, and the errors that they raise.

The calls themselves, and what they find wrong with the data, are in _native.py.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from adapmixed import limits

from . import inputs as check
from ._native import F64, backend, immediate
from .inputs import Inputs, log_sum_exp, prepare
from .types import Clipping, LogPool, Projection, RandomSource, Screening

_ops = torch.ops.adapmixed
_ON_CPU = torch.empty(0)

Adjacency = Literal["add_remove", "zero_out"]


def project(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> Projection:
    """Find the largest mixing weight of every model that stays in the Rényi ball around q.

    λ_i = max{λ ∈ [0,1] : D↔_α(λ p_i + (1−λ) q ‖ q) ≤ R} (Algorithm 1, line 11).

    λ is never above the exact optimum. It is within 2e-4 + 1e-5/(α−1) of it, relative, if R ≥ 1e-5,
    1.01 ≤ α ≤ 64 and every token has q ≥ e^−70. Otherwise it may be smaller: still the safe side.
    Unless λ = 1 is feasible, λ ≤ 1 − 4e-6.

    A token masked in the public row but not in the private one gives λ_i = 0, and so does p/q above
    e^85. At R = 0 λ_i is 0.
    Memory: at most 32·V + 2^14 bytes for each thread. CUDA takes about (N + 1)·B·V/7 bytes during
    the call.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        order: Rényi order α in (1, 1 024].
        radius: R = βα ≥ 0, in nats, (α − 1) R ≤ 600.

    Returns:
        The weights λ, (N, B) float64.

    Raises:
        ValueError: wrong shapes, dtypes or devices; an argument outside the limits; a tensor that
            requires grad; a row with NaN, +inf or no finite value. On CUDA such a
            row has weight 0, and ``check()`` of the result raises.
    """
    order = limits.check_order(order)
    radius = limits.check_radius(radius, order)
    private, public = check.ensemble_logits(private_logits, public_logits)
    weight, private_lse, status, public_lse, public_status = _ops.project(
        private, public, order, radius
    )
    return Projection(weight, private_lse, public_lse, status, public_status)


def clip_project(
    private_logits: Tensor,
    public_logits: Tensor,
    *,
    lower: float,
    upper: float,
    orders: float | Sequence[float] | None = None,
    num_models: int | None = None,
    active: Tensor | None = None,
) -> Clipping:
    """Clip every model to the density-ratio box [c, C] around q: the KL projection onto the box.

    p̄_i = clip(s p_i, c q, C q), with s such that it sums to 1. Of all distributions x with
    c q ≤ x ≤ C q, it minimises KL(p_i‖x), KL(x‖p_i) and every other f-divergence.

    - If q of the support of p_i is at most (1−c)/(C−c), p̄_i = C q there and the same multiple of
      q elsewhere. Tokens with p_i < e^−600 count as p_i = 0.
    - The sum is 1 within 1e-12 + 2^−52·(|log s| + |lse|), lse the public log-sum-exp. Its rounding
      is the same factor for all rows of a position. So the sums of two of them differ by 1e-12 at
      most.
    - Every ratio lies in [c, C]. Ratios inside the box have a relative error of 1e-9, or that of
      the sum that defines s: 1e-14 over the mass inside the box.
    - A row equal to the public one gives q exactly, and so do c = 1 and C = 1.

    With `orders`, also the charge of each model to its shard's own budget under zero-out. It
    depends on the model's row and on public values alone. With U = p̄_i/q, W = ((N−1)c + 1)/N,
    P = ((N−1)c + U)/N and f(x) = x^α − 1 − α(x−1), it is

        max{log1p Σ q W f(P/W), log1p Σ q P f(W/P)} / (α−1),

    of p̄_i as it is returned: an upper bound, at most 2e-5 of itself and 2e-12 above it, and 0 for a
    row equal to the public one. A member that is not active is charged as if it took part.
    Memory: at most 37·V + 2^17 bytes for each thread.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        lower: c in [0, 1], a ratio.
        upper: C in [1, 1e6], a ratio; C/c ≤ 1e6 unless c is 0.
        orders: Rényi orders of the charges, each in (1, 1 024], at most 8. None: no charges.
        num_models: public number of members, ≥ N, for the charges.
        active: (N, B) bool, the members that take part; the others answer q. None: all.

    Returns:
        The rows' log s and residual ratio, each (N, B) float64, and the charges, (N, B, K) float64
        in nats, or None.

    Raises:
        ValueError: wrong shapes, dtypes or devices; lower, upper, orders or num_models out of
            range; a tensor that requires grad; a row with NaN, +inf or no finite value.
    """
    c, d = limits.check_box(lower, upper)
    c, d = (1.0, 1.0) if c == 1.0 or d == 1.0 else (c, d)  # p̄ = q
    values = [] if orders is None else limits.check_orders(orders)
    private, public = check.ensemble_logits(private_logits, public_logits)
    slots, taking_part = check.slots(num_models, private), check.members(active, private)
    public_lse, public_status = log_sum_exp(public, "public_logits")
    scale, residual, charge, private_lse, status = _ops.clip_project(
        private, public, public_lse, c, d, values, slots
    )
    return Clipping(
        scale, residual, None if orders is None else charge, taking_part, private_lse, public_lse,
        status, c, d, public_status,
    )  # fmt: skip


def leave_one_out(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | Tensor,
    *,
    orders: float | Sequence[float],
    adjacency: Adjacency = "add_remove",
    num_models: int | None = None,
) -> Tensor:
    """Compute the privacy loss of every model: D↔_α between the answers with and without it.

    The loss is D↔_α(p‖p') (Algorithm 1, line 16; equation 3) with p = mean_i p̄_i. For zero-out
    p' = p − (p̄_i − q)/N. For add/remove p' = (N p − p̄_i)/(N−1), which is q if N = 1.

    Every loss is an upper bound, at most 1e-4 of the exact loss and 1e-9 above it. A row equal to
    the public one has a zero-out loss of exactly 0. A loss that cannot be bounded is +inf, never
    NaN: one of more than 600/(α−1), or at a token with q < e⁻⁷⁰ about which a model speaks (it may
    be too large instead), or to which every model (for add/remove: every other one) gives less than
    e⁻⁸⁰ q.

    On CUDA nothing is raised for bad data, here or later. All losses of a position are +inf if its
    rows are bad or do not belong to the projection, or if a weight is outside [0, 1].

    Memory in bytes: at most 2048·N + 2^19 for each thread, and 64·N·B + 2^16. The sums over chunks
    of the vocabulary add min(B·S, S + 2^25), S = 1536·N·(K+4).

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        projection: a Projection or Clipping of these logits, or a weight tensor (N, B) in [0, 1].
        orders: one order or up to 8 orders, each in (1, 1 024].
        adjacency: "add_remove" or "zero_out".
        num_models: public number of members, ≥ N; an absent member answers q.

    Returns:
        (N, B, K) float64, in nats. Losses are private, for the operator only. They are +inf if one
        of the two mixtures lacks a token of the other.

    Raises:
        ValueError: wrong shapes, dtypes or devices; an argument outside the limits; num_models < N;
            bad rows, or rows that do not belong to the projection.
    """
    values = limits.check_orders(orders)
    limits.check_option("adjacency", adjacency, limits.NEIGHBOURS)
    weighted = check.weighted(private_logits, public_logits, projection)
    slots = check.slots(num_models, weighted[0])
    loss: Tensor = _ops.leave_one_out(*weighted, values, adjacency == "zero_out", slots)
    return loss


def mixture(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | LogPool | Tensor,
) -> Tensor:
    """Compute the mixture p that the token is drawn from (Algorithm 1, line 14).

    p = mean_i p̄_i for a Projection, a Clipping or weights; the pool's p for a LogPool. On CUDA
    nothing is raised for bad data, here or later. A whole row of the result is NaN if its logits
    are bad or do not belong to the projection, or if a weight is outside [0, 1]. A LogPool gives
    its p whatever the logits are by now.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        projection: a Projection, Clipping or LogPool of these logits, or a weight tensor (N, B) in
            [0, 1].

    Returns:
        (B, V) float64; rows sum to 1 up to rounding. It is private.

    Raises:
        ValueError: wrong shapes, dtypes or devices; a tensor of weights outside [0, 1]; bad rows,
            or rows that do not belong to the projection.
    """
    if isinstance(projection, LogPool):
        log_weights, log_normaliser = _pool(private_logits, public_logits, projection)
        return (log_weights - log_normaliser.unsqueeze(-1)).exp()
    p: Tensor = _ops.mixture(*check.weighted(private_logits, public_logits, projection))
    return p


def log_prob(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | LogPool | Tensor,
    targets: Tensor,
) -> Tensor:
    """Compute log p(target) for a perplexity, without forming p.

    For evaluation only: a log-probability of the mixture is private. Only the targets' logits are
    read, and none for a LogPool, so the rows must be those that the projection was made from. On
    CUDA nothing is raised for bad data, here or later. The result is NaN for a target outside
    [0, V), for bad rows, and for weights outside [0, 1].

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        projection: a Projection, Clipping or LogPool of these logits, or a weight tensor (N, B) in
            [0, 1].
        targets: (B,) int64, tokens in [0, V).

    Returns:
        (B,) float64, in nats; −inf if the mixture cannot produce the target.

    Raises:
        ValueError: wrong shapes, dtypes or devices; a target outside [0, V); a tensor of weights
            outside [0, 1]; log p > 0, which shows that the rows do not belong to the projection.
    """
    if isinstance(projection, LogPool):
        log_weights, log_normaliser = _pool(private_logits, public_logits, projection)
        wanted = check.tokens(targets, log_weights)
        inside = wanted.clamp(0, log_weights.shape[-1] - 1)
        log_probs = log_weights.gather(-1, inside.unsqueeze(-1)).squeeze(-1) - log_normaliser
        return torch.where(wanted == inside, log_probs, math.nan)
    weighted = check.weighted(private_logits, public_logits, projection)
    result: Tensor = _ops.log_prob(*weighted, check.tokens(targets, weighted[1]))
    return result


def _pool(private_logits: Tensor, public_logits: Tensor, pool: LogPool) -> tuple[Tensor, Tensor]:
    """Return the log-weights (B, V) and log-normaliser (B,) of a pool of such logits."""
    _, public = check.ensemble_logits(private_logits, public_logits)
    shape = public.shape
    return (
        check.typed("projection.log_weights", pool.log_weights, F64, shape, public),
        check.typed("projection.log_normaliser", pool.log_normaliser, F64, shape[:1], public),
    )


def log_pool(
    private_logits: Tensor,
    public_logits: Tensor,
    *,
    lower: float,
    upper: float,
    scale: float,
    num_models: int | None = None,
    active: Tensor | None = None,
    lse_differences: Tensor | None = None,
) -> LogPool:
    """Compute the pool's log-normaliser, and the span of each model's clipped log-ratios.

    u_i(v) = clip(log p_i(v) − log q(v), a, b), and p(v) ∝ q(v) exp((κ/N) Σ_i u_i(v)). q = 0 gives
    p = 0. N is ``num_models``; a member that is absent or not active has u_i = 0.

    Without model i log p changes by (κ/N) u_i and a constant. The range of that change over v is at
    most κ·span_i/N ≤ κ(b − a)/N. The u_i are multiples of 2^−k in [a, b], so that their sums are
    exact; k follows from N, a and b alone and is 40 at most. Over the tokens with p ≥ 2^−1022
    rounding adds at most 2^−49 (1 + κ·max(−a, b) + L) to the range, L the largest −log q among
    them. The derivation is in csrc/log_pool/formula.h.

    u_i is within 2^−k + 5e-14 + 5e-16 (|lse_i| + |lse_0| + max(−a, b)) of the clipped z_i − lse_i −
    log q, lse_i the ``private_lse`` of the result. That is within 7e-7 of the row's log-sum-exp on
    the CPU, which takes it in single precision, and within 5e-14 on CUDA. It is one number for a
    row: it may move the row's log-ratios inside the clip bounds and never out of them.

    The span is exactly that of the u_i that enter the pool. p_i = 0 < q clips to a.
    Memory: at most 16·V + 2^14 bytes for each thread, and 8·B·V that the result keeps. CUDA takes
    about N·B·V/64 during the call.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        lower: a ≤ 0, a log-ratio.
        upper: b ≥ 0, a log-ratio; b − a ≤ 64.
        scale: κ ≥ 0; above 1 it sharpens what the models agree on. κ (b − a) ≤ 330.
        num_models: public number of members, ≥ N, by which the sum is divided.
        active: (N, B) bool, the members that take part. None: all. Spans are those of all.
        lse_differences: (N, B) float64, each private row's log-sum-exp minus the public row's, if
            they are known: the CPU then reads the rows once. An error of theirs counts as one of
            ``private_lse`` does. CUDA takes its own.

    Returns:
        The log-normaliser, (B,), and the spans, (N, B), both float64 and in nats.

    Raises:
        ValueError: wrong shapes, dtypes or devices; a number outside its range; N = 0 or V = 0; a
            tensor that requires grad; a row with NaN, +inf or no finite value.
    """
    private, public = check.ensemble_logits(private_logits, public_logits)
    lower, upper = limits.check_clip(lower, upper)
    scale, slots = limits.check_scale(scale, lower, upper), check.slots(num_models, private)
    taking_part, differences = check.members(active, private), lse_differences
    if differences is not None:
        differences = check.typed("lse_differences", differences, F64, private.shape[:2], private)
    log_normaliser, span, private_lse, status, public_lse, public_status, log_weights = (
        _ops.log_pool(private, public, differences, lower, upper, scale, slots, taking_part)
    )
    return LogPool(
        log_normaliser, span, private_lse, public_lse, lower, upper, scale, slots, taking_part,
        status, log_weights, public_status,
    )  # fmt: skip


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
) -> Screening:
    """Run the noisy screening of every position (Algorithm 1, lines 1–7).

    s = mean_i λ_s p_i + (1−λ_s) q on the public top-k tokens K (ties by lower index). The noise is
    added to s, and negative values are set to 0. **Then** s[K] and q[K] are re-scaled to sum 1. A
    position passes if D_α(s‖q[K]) ≤ T_s. A row with fewer than k tokens of q > 0 uses them all.

    The relative error of the divergence is at most 1e-5, or 1e-12 absolute if that is more, at
    every weight. If negative noise cancels s, the rest is known to 1e-15 of what there was. Values
    of s below 1e-290 count as 0. The divergence is +inf if nothing is left, and it may be +inf if
    (α−1) D_α is above 600. It is exactly 0 for a single token, and if s equals q.

    On CUDA nothing is raised for bad rows or for noise that is not finite. Their divergence is
    +inf, and they pass only under a threshold of inf. ``check()`` raises for bad rows, but not for
    bad noise.

    Memory in bytes: 16 for each public logit while the likeliest tokens are found, then 16 for each
    of top_k tokens of a position.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        noise: (B, top_k) float64, N(0, σ²) by rank of the token; zeros give the noiseless test.
        weight: λ_s in [0, 1].
        order: Rényi order α in (1, 1 024].
        threshold: T_s ≥ 0, in nats; inf lets everything pass.
        top_k: k ≥ 1.
        num_models: public number of members, ≥ N, the divisor of the mean; an absent member
            answers q.
        active: (N, B) bool, the members that take part; the others answer q. None: all.

    Returns:
        The divergence, (B,) float64 in nats, and whether it passed, (B,) bool.

    Raises:
        ValueError: wrong shapes, dtypes or devices; a number outside its range; noise that is not
            finite; a row with NaN, +inf or no finite value.
    """
    return screen_prepared(
        prepare(private_logits, public_logits), noise, weight, order, threshold, top_k, num_models,
        active,
    )  # fmt: skip


def screen_prepared(
    inputs: Inputs,
    noise: Tensor,
    weight: float,
    order: float,
    threshold: float,
    top_k: int,
    num_models: int | None = None,
    active: Tensor | None = None,
) -> Screening:
    """Run :func:`screen` on prepared inputs."""
    private, public = inputs[:2]
    weight = limits.check_number("weight", weight, least=0.0, most=1.0)
    order = limits.check_order(order)
    threshold = limits.check_number("threshold", threshold, least=0.0, infinite=True)
    top_k = limits.check_count("top_k", top_k)
    noise = check.typed("noise", noise, F64, (len(public), top_k), private)
    noise = _ops.checked(noise, "noise", -math.inf, math.inf)
    tokens = check.likeliest(public, min(top_k, public.shape[1]), by_rank=True)
    noise = noise.narrow(1, 0, tokens.shape[1]).contiguous()
    taking_part, slots = check.members(active, private), check.slots(num_models, private)
    divergence, passed = _ops.screen(
        *inputs[:4], noise, tokens, taking_part, weight, order, threshold, slots
    )
    return Screening(divergence, passed, inputs.status, inputs.public_status)


def _flat_rows(name: str, logits: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return rows (M, V) and log-sum-exps (M,) after broadcasting; errors keep given indices."""
    vocab = shape[-1]
    # Up to three axes are passed on as they are, so that an error has the caller's indices.
    rows = logits if logits.dim() in (2, 3) else logits.reshape(-1, vocab)
    rows = rows if rows.stride(-1) == 1 or vocab == 1 else rows.contiguous()
    flat = check.logits(name, logits.expand(shape).reshape(-1, vocab), 2)
    lse, _ = log_sum_exp(rows, name)
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
    values = limits.check_orders(orders)
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


def _reserved(rng: RandomSource) -> tuple[Tensor, int]:
    """Return a key of 32 bytes, which are read from its address, and a counter."""
    limits.check_rng(rng)
    key, counter = rng.reserve()
    key = check.typed("the key of rng", key, torch.uint8, (32,), _ON_CPU)
    return key, limits.check_count("the counter of rng", counter, 0, 2**63 - 1)


def _device(device: torch.device | str) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        parsed = torch.device("meta")
    if parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or CUDA device, got {device!r}")
    backend(parsed)  # before torch makes a tensor there
    return parsed


def gaussian(
    shape: int | Sequence[int],
    *,
    sigma: float,
    rng: RandomSource,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw independent N(0, σ²) variates from the ChaCha20 stream of ``rng``.

    Args:
        shape: shape of the result, fewer than 2^40 numbers.
        sigma: standard deviation, ≥ 0.
        rng: a random source (``adapmixed.rng``).
        device: device of the result; the numbers do not depend on it.

    Returns:
        float64 tensor of that shape.

    Raises:
        ValueError: sigma, shape, rng or device out of range or of another type.
    """
    sigma = limits.check_number("sigma", sigma, least=0.0)
    on = _device(device)
    if not isinstance(shape, int | Sequence) or isinstance(shape, str | bytes):
        raise ValueError(f"shape must be an integer or a sequence of integers, got {shape!r}")
    sizes = [shape] if isinstance(shape, int) else shape
    sizes = [limits.check_count("shape", size, 0) for size in sizes]
    if math.prod(sizes) >= 2**40:
        raise ValueError(f"shape must hold fewer than 2**40 numbers, got {shape!r}")
    key, counter = _reserved(rng)
    result: Tensor = _ops.gaussian(key, counter, sizes, sigma, on)
    return result


def sample(probabilities: Tensor, public_logits: Tensor, *, rng: RandomSource) -> Tensor:
    """Draw one token per row, exactly in proportion to its float64 probability.

    The distribution is p/Σp over the tokens with q > 0. Rounding adds nothing to it. No token with
    q > 0 is lost: one whose p is 0 counts as 2^-1074. No token with q = 0 is drawn, whatever its p.

    Args:
        probabilities: (B, V) float64, rows that sum to 1 within 1e-6.
        public_logits: (B, V); q > 0 for the tokens above −inf.
        rng: a random source (``adapmixed.rng``).

    Returns:
        (B,) int64 tokens. On CUDA nothing is raised for a bad row, here or later: its token is -1.

    Raises:
        ValueError: wrong shapes, dtypes or devices; a row of probabilities that is no distribution,
            or has less than V·2^-99 in all on the tokens with q > 0; a row of public logits with
            NaN, +inf or no finite value.
    """
    public = check.logits("public_logits", public_logits, 2)
    if immediate(public.device):
        log_sum_exp(public, "public_logits")  # for its errors
    p = check.typed("probabilities", probabilities, F64, public.shape, public)
    key, counter = _reserved(rng)
    tokens: Tensor = _ops.sample(p, public, key, counter)
    return tokens
