"""The public operators: validate, document, allocate, call.

Notation: N models, B positions, V tokens, K Rényi orders; q and p_i the softmax of the public and
private logits; p̄_i = λ_i p_i + (1−λ_i) q. Logits are float32, bfloat16 or float16 with any row
stride (one copy is made if the last stride is not 1). Results that carry privacy are float64.
Bad arguments and bad rows raise ValueError; CPU calls raise at once. There are no gradients.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import _library  # noqa: F401  (registers the operators)
from . import _validate as check
from ._types import Projection, RandomSource, Screening
from ._validate import ensemble_logits as ensemble_logits

_ops = torch.ops.adapmixed

# Relative error bound of every divergence and loss; below 1e-12 the bound is absolute, 1e-12.
loss_error: float = 1e-5

Adjacency = Literal["add_remove", "zero_out"]


class Inputs(NamedTuple):
    """Checked logits and their log-sum-exps: what the operators share. Internal."""

    private: Tensor  # (N, B, V)
    public: Tensor  # (B, V)
    private_lse: Tensor  # (N, B) float64
    public_lse: Tensor  # (B,) float64
    status: Tensor  # (N, B) int32


def prepare(private_logits: Tensor, public_logits: Tensor) -> Inputs:
    """Checks the logits and passes over them once."""
    private, public = check.ensemble_logits(private_logits, public_logits)
    public_lse, _ = _ops.log_sum_exp(public, "public_logits")
    private_lse, status = _ops.log_sum_exp(private, "private_logits")
    return Inputs(private, public, private_lse, public_lse, status)


def _weighted(
    private_logits: Tensor, public_logits: Tensor, projection: Projection | Tensor
) -> tuple[Tensor, ...]:
    """The six tensors that operators on a weighted ensemble start with."""
    if isinstance(projection, Projection):
        private, public = check.ensemble_logits(private_logits, public_logits)
        known = (private, public, *check.row_sums(projection, private))
    else:
        known = prepare(private_logits, public_logits)[:4]
    return *known, *check.weights(projection, known[0])


def _rows(name: str, logits: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(rows (M, V), log-sum-exps (M,)) after broadcasting; errors name rows as they were given."""
    vocab = shape[-1]
    # Up to three axes are passed on as they are, so that an error has the caller's indices.
    given = logits if logits.dim() in (2, 3) else logits.reshape(-1, vocab)
    given = given if given.stride(-1) == 1 or vocab == 1 else given.contiguous()
    rows = check.logits(name, logits.expand(shape).reshape(-1, vocab), 2)
    lse, _ = _ops.log_sum_exp(given, name)
    return rows, lse.reshape(logits.shape[:-1]).expand(shape[:-1]).reshape(-1).contiguous()


def renyi_divergence(
    p_logits: Tensor, q_logits: Tensor, orders: float | Sequence[float]
) -> tuple[Tensor, Tensor]:
    """D_α(P‖Q) and D_α(Q‖P) of distributions given by logits (paper, Definition 2.2).

    D_α(P‖Q) = log Σ P^α Q^{1−α} / (α−1); order 1 is the Kullback–Leibler divergence, inf the
    largest log-ratio. P > 0 = Q gives +inf, P = Q = 0 counts 0.

    Args:
        p_logits, q_logits: (..., V), broadcast against each other in their leading axes.
        orders: one order or K orders, each in [1, inf].

    Returns:
        (forward, backward), each (..., K) float64, in nats.

    Raises:
        ValueError: shapes, dtypes, devices, an order < 1 or NaN, a row with NaN, +inf or no value.
    """
    p, q = check.tensor("p_logits", p_logits), check.tensor("q_logits", q_logits)
    for name, t in (("p_logits", p), ("q_logits", q)):
        if t.dim() == 0 or t.shape[-1] == 0:
            raise ValueError(f"{name} must have shape (..., V >= 1), got {tuple(t.shape)}")
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(f"q_logits must have V = {p.shape[-1]} tokens, got {q.shape[-1]}")
    values = check.orders(orders, limits=True)
    try:
        shape = torch.broadcast_shapes(p.shape, q.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ValueError(
            f"q_logits must broadcast against p_logits {tuple(p.shape)}, got {tuple(q.shape)}"
        ) from None
    check.same("q_logits", q, "p_logits", p)
    p_rows, p_lse = _rows("p_logits", p, shape)
    q_rows, q_lse = _rows("q_logits", q, shape)
    forward, backward = _ops.renyi_divergence(p_rows, q_rows, p_lse, q_lse, values)
    result = (*shape[:-1], len(values))
    return forward.reshape(result), backward.reshape(result)


def project(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> Projection:
    """λ_i = max{λ ∈ [0,1] : D↔_α(λ p_i + (1−λ) q ‖ q) ≤ R} (Algorithm 1, line 12).

    Always the feasible side: λ is never above the exact optimum, and within 1e-5 relative of it
    where (α−1)R ≥ 1e-8 (below that rounding takes more of λ, always to the safe side).
    A token masked in the public row but not in the private one gives λ_i = 0.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        order: Rényi order α > 1.
        radius: R = βα ≥ 0, in nats.

    Raises:
        ValueError: shapes, dtypes, devices, order ≤ 1, radius < 0 or NaN, N = 0, V = 0, a tensor
            that requires grad, a row with NaN, +inf or no finite value.
    """
    return project_inputs(private_logits, public_logits, order=order, radius=radius)[1]


def project_inputs(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> tuple[Inputs, Projection]:
    """:func:`project` with the checked logits for further operators."""
    order = check.order("order", order)
    radius = check.number("radius", radius, least=0.0)
    private, public = check.ensemble_logits(private_logits, public_logits)
    public_lse, _ = _ops.log_sum_exp(public, "public_logits")
    weight, complement, private_lse, status = _ops.project(
        private, public, public_lse, order, radius
    )
    projection = Projection(weight, complement, private_lse, public_lse, status)
    return Inputs(private, public, private_lse, public_lse, status), projection


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
    """Noisy screening (Algorithm 1, lines 1–8).

    s = mean_i λ_s p_i + (1−λ_s) q on the public top-k tokens K (ties by lower index), plus noise,
    negative values set to 0, **then** both s[K] and q[K] re-scaled to sum 1;
    passed = D_α(s‖q[K]) ≤ T_s. A row with fewer than k tokens of q > 0 uses them all.

    Args:
        private_logits, public_logits: (N, B, V) and (B, V).
        noise: (B, top_k) float64, N(0, σ²) by rank of the token; zeros give the noiseless test.
        weight: λ_s in [0, 1].
        order: α > 1.
        threshold: T_s ≥ 0, in nats; inf lets everything pass.
        top_k: k ≥ 1.
        num_models: the divisor of the mean, ≥ N; absent slots answer q.
        active: (N, B) bool, slots that take part; the others answer q. None: all.
    """
    return screen_prepared(
        prepare(private_logits, public_logits),
        noise,
        weight=weight,
        order=order,
        threshold=threshold,
        top_k=top_k,
        num_models=num_models,
        active=active,
    )


def screen_prepared(
    inputs: Inputs,
    noise: Tensor,
    *,
    weight: float,
    order: float,
    threshold: float,
    top_k: int,
    num_models: int | None = None,
    active: Tensor | None = None,
) -> Screening:
    """:func:`screen` on prepared inputs."""
    private = inputs.private
    weight = check.number("weight", weight, least=0.0, most=1.0)
    order = check.order("order", order)
    threshold = check.number("threshold", threshold, least=0.0)
    top_k = check.integer("top_k", top_k, 1)
    models, positions = private.shape[:2]
    noise = check.typed("noise", noise, torch.float64, (positions, top_k), private)
    noise = _ops.checked(noise, "noise", -math.inf, math.inf)
    if active is not None:
        active = check.typed("active", active, torch.bool, (models, positions), private)
    slots = check.slots(num_models, private)
    divergence, passed = _ops.screen(
        *inputs[:4], noise, active, weight, order, threshold, top_k, slots
    )
    return Screening(divergence, passed, inputs.status)


def leave_one_out(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Tensor,
    *,
    orders: float | Sequence[float],
    adjacency: Adjacency = "add_remove",
    num_models: int | None = None,
    mean_excess: Tensor | None = None,
) -> Tensor:
    """D↔_α(p‖p') of every model, position and order (Algorithm 1, line 17; equation 2).

    p = mean_i p̄_i; p' = (N p − p̄_i)/(N−1) for add/remove (q if N = 1), p − (p̄_i − q)/N for
    zero-out. An estimate with relative error at most ``loss_error`` (absolute 1e-12 below that);
    identical models give exactly 0; a loss that cannot be bounded is +inf, never NaN.

    Args:
        private_logits, public_logits: (N, B, V) and (B, V).
        projection: a Projection of these logits, or a weight tensor (N, B) in [0, 1].
        orders: one order or up to 32 orders, each > 1.
        adjacency: "add_remove" or "zero_out".
        num_models: public number of slots ≥ N; absent slots answer q.
        mean_excess: (B, V) float64, Σ_i (p̄_i/q − 1)/num_models over all ranks, for an ensemble that
            is spread over several; then these N rows are this rank's. Exact to the rounding of
            float64, or losses are not: what :func:`mixture` makes of a Projection carries the
            error of its log-sum-exps, up to 2e-6; of a weight tensor it does not.

    Returns:
        (N, B, K) float64, in nats: private, for the operator only. +inf where one of the two
        mixtures lacks a token of the other; with ``mean_excess`` also where p'/p of a token is
        below about 1e-8 times the largest order, since the sum over the other models is then lost
        to the rounding of the whole.
    """
    values = check.orders(orders, limits=False)
    if adjacency not in ("add_remove", "zero_out"):
        raise ValueError(f"adjacency must be 'add_remove' or 'zero_out', got {adjacency!r}")
    ensemble = _weighted(private_logits, public_logits, projection)
    slots = check.slots(num_models, ensemble[0])
    if mean_excess is not None:
        shape = tuple(ensemble[1].shape)
        mean_excess = check.typed("mean_excess", mean_excess, torch.float64, shape, ensemble[0])
        mean_excess = _ops.checked(mean_excess, "mean_excess", -1.0, math.inf)
    zero_out = adjacency == "zero_out"
    loss: Tensor = _ops.leave_one_out(*ensemble, values, zero_out, slots, mean_excess)
    return loss


def mixture(
    private_logits: Tensor, public_logits: Tensor, projection: Projection | Tensor
) -> Tensor:
    """p = mean_i p̄_i, the distribution the token is drawn from (Algorithm 1, line 15).

    Args:
        private_logits, public_logits: (N, B, V) and (B, V).
        projection: a Projection of these logits, or a weight tensor (N, B) in [0, 1].

    Returns:
        (B, V) float64; rows sum to 1 up to rounding.
    """
    p: Tensor = _ops.mixture(*_weighted(private_logits, public_logits, projection))
    return p


def log_prob(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Tensor,
    targets: Tensor,
) -> Tensor:
    """log p(target) without forming (B, V): what a perplexity needs.

    Args:
        private_logits, public_logits: (N, B, V) and (B, V).
        projection: a Projection of these logits, or a weight tensor (N, B) in [0, 1].
        targets: (B,) int64, tokens in [0, V).

    Returns:
        (B,) float64, in nats; −inf where the mixture cannot produce the target. Evaluation only:
        a log-probability of the mixture is private. Only the targets' logits are read: with a
        Projection the rows are taken to be those that it was made from.
    """
    ensemble = _weighted(private_logits, public_logits, projection)
    positions = tuple(ensemble[1].shape[:1])
    wanted = check.typed("targets", targets, torch.int64, positions, ensemble[0])
    result: Tensor = _ops.log_prob(*ensemble, wanted)
    return result


def _reserve(rng: RandomSource) -> tuple[Tensor, int]:
    if not callable(getattr(rng, "reserve", None)):
        raise ValueError(f"rng must be a random source (adapmixed.rng), got {type(rng).__name__}")
    return rng.reserve()


def gaussian(shape: int | Sequence[int], *, sigma: float, rng: RandomSource) -> Tensor:
    """Independent N(0, σ²) variates from the ChaCha20 stream of ``rng``.

    Args:
        shape: of the result.
        sigma: standard deviation ≥ 0.
        rng: a random source (``adapmixed.rng``).

    Returns:
        float64 tensor on the CPU.
    """
    sigma = check.finite("sigma", sigma, least=0.0)
    if not isinstance(shape, int | Sequence):
        raise ValueError(f"shape must be an integer or a sequence of integers, got {shape!r}")
    sizes = [check.integer("shape", n, 0) for n in ([shape] if isinstance(shape, int) else shape)]
    if math.prod(sizes) >= 2**40:
        raise ValueError(f"shape must hold fewer than 2**40 numbers, got {shape!r}")
    key, counter = _reserve(rng)
    result: Tensor = _ops.gaussian(key, counter, sizes, sigma)
    return result


def sample(probabilities: Tensor, public_logits: Tensor, *, rng: RandomSource) -> Tensor:
    """One token per row, exactly proportional to integer weights of the probabilities.

    Weights are ⌊p·2^100⌋, at least 1 wherever q > 0 (no token with q > 0 is ever lost) and 0 where
    q = 0, whatever the probability there; the draw is uniform below their total, by rejection. For
    probabilities within q's support the sampled law differs from the normalised ones by less than
    V·2^-99 in total variation.

    Args:
        probabilities: (B, V) float64, rows that sum to 1 within 1e-6.
        public_logits: (B, V): q > 0 where they are > −inf.
        rng: a random source (``adapmixed.rng``).

    Returns:
        (B,) int64 tokens.

    Raises:
        ValueError: shapes, dtypes, devices, rows of probabilities that are no distribution,
            a row of public logits with NaN, +inf or no finite value.
    """
    public = check.logits("public_logits", public_logits, 2)
    _ops.log_sum_exp(public, "public_logits")
    p = check.typed("probabilities", probabilities, torch.float64, tuple(public.shape), public)
    key, counter = _reserve(rng)
    tokens: Tensor = _ops.sample(p, public, key, counter)
    return tokens
