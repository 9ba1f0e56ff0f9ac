"""Results of the operators, and the protocol of a random source."""

from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

_ERRORS = {
    1: "contains NaN",
    2: "contains +inf",
    3: "has no finite value (all -inf)",
    4: "has its largest logit beyond ±1e6: subtract a constant from the row",
}


class RandomSource(Protocol):
    """A source of (key, counter) pairs of a ChaCha20 stream, each of which is given out once."""

    def reserve(self) -> tuple[Tensor, int]:
        """Return the key, (32,) uint8 on the CPU, and a counter never used with it before."""
        ...


def first_of(bad: Tensor) -> list[int]:
    """Return the index of the first value that is not 0; empty if there is none."""
    indices = bad.nonzero()
    return list(indices[0].tolist()) if indices.numel() else []


def raise_row_errors(name: str, status: Tensor) -> None:
    """Raise a ValueError that names the first bad row of ``name``; status: int32, 0 = good."""
    if at := first_of(status):
        raise ValueError(
            f"{name}{at} {_ERRORS[int(status[tuple(at)])]}; logits must be finite or -inf, with at "
            f"least one finite value a row ({int((status != 0).sum())} of {status.numel()} rows "
            "are bad)"
        )


class _OfRows:
    """A result with the statuses of the rows that it was computed from."""

    status: Tensor
    public_status: Tensor

    def check(self) -> Self:
        """Return self, or raise ValueError if a row of logits was bad. The CPU raises at once.

        Public rows come first. A GPU is read once if all is well.
        """
        if bool(self.status.any()):
            raise_row_errors("public_logits", self.public_status)
            raise_row_errors("private_logits", self.status)
        return self


@dataclass(frozen=True)
class Projection(_OfRows):
    """Weights of the projected distributions p̄_i = λ_i p_i + (1 − λ_i) q.

    Attributes:
        weight: (N, B) float64, λ_i, rounded down.
        private_lse: (N, B) float64, log-sum-exp of each private row.
        public_lse: (B,) float64, log-sum-exp of each public row.
        status: (N, B) int32, 0 if the row and its public row are good.
        public_status: (B,) int32, 0 if the public row is good.
    """

    weight: Tensor
    private_lse: Tensor
    public_lse: Tensor
    status: Tensor
    public_status: Tensor


@dataclass(frozen=True)
class Clipping(_OfRows):
    """Distributions clipped to a box around q: p̄_i = clip(s p_i, lower q, upper q).

    Attributes:
        log_scale: (N, B) float64, log s; +inf if p̄_i = upper q on all tokens with p_i > 0.
        residual: (N, B) float64, p̄_i/q of the tokens with p_i = 0 < q (or p_i < e^−600).
        charge: (N, B, K) float64 in nats, or None if no orders were given; private.
        active: (N, B) bool, the members that take part; the others answer q. None: all.
        private_lse: (N, B) float64, log-sum-exp of each private row.
        public_lse: (B,) float64, log-sum-exp of each public row.
        status: (N, B) int32, 0 if the row and its public row are good.
        lower: c, a ratio.
        upper: C; both are 1 if one of them is, since p̄_i = q then.
        public_status: (B,) int32, 0 if the public row is good.
    """

    log_scale: Tensor
    residual: Tensor
    charge: Tensor | None
    active: Tensor | None
    private_lse: Tensor
    public_lse: Tensor
    status: Tensor
    lower: float
    upper: float
    public_status: Tensor


@dataclass(frozen=True)
class Screening(_OfRows):
    """Outcome of the screening test at each position.

    Attributes:
        divergence: (B,) float64, D_α(s‖q[K]); private, for the operator only.
        passed: (B,) bool, divergence ≤ threshold.
        status: (N, B) int32, 0 if the row and its public row are good.
        public_status: (B,) int32, 0 if the public row is good.
    """

    divergence: Tensor
    passed: Tensor
    status: Tensor
    public_status: Tensor


@dataclass(frozen=True)
class LogPool(_OfRows):
    """p(v) = q(v) exp((scale/num_models) Σ_i u_i(v) − log_normaliser), u_i clipped log-ratios.

    Attributes:
        log_normaliser: (B,) float64; private, as are the log-sum-exps.
        span: (N, B) float64, max u_i − min u_i over the tokens with q > 0, of every member.
        private_lse: (N, B) float64, log-sum-exp of each private row; on the CPU within 7e-7.
        public_lse: (B,) float64, log-sum-exp of each public row.
        lower: lower clip bound of the log-ratios, a ≤ 0.
        upper: upper clip bound, b ≥ 0.
        scale: κ, the factor of the mean of the u_i.
        num_models: public number of members, by which the sum is divided.
        active: (N, B) bool, the members that take part; None: all.
        status: (N, B) int32, 0 if the row and its public row are good.
        log_weights: (B, V) float64, log p + log_normaliser; private.
        public_status: (B,) int32, 0 if the public row is good.
    """

    log_normaliser: Tensor
    span: Tensor
    private_lse: Tensor
    public_lse: Tensor
    lower: float
    upper: float
    scale: float
    num_models: int
    active: Tensor | None
    status: Tensor
    log_weights: Tensor
    public_status: Tensor
