"""The logarithmic pool in extended precision, and checks of its stated bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from checks import Report
from extended import Array, array, log_softmax, log_sum_exp
from torch import Tensor

import adapmixed_ext

NORMAL = math.log(2.0**-1022)  # the bounds hold for log p above this
LSE_ERROR = 7e-7  # documented error of a private row's log-sum-exp


@dataclass(frozen=True)
class Setting:
    """The settings of one pool, with ``extra`` absent members."""

    lower: float
    upper: float
    scale: float
    extra: int = 0

    @property
    def reach(self) -> float:
        return max(-self.lower, self.upper)

    def options(self, models: int) -> dict[str, float]:
        return {
            "lower": self.lower, "upper": self.upper, "scale": self.scale,
            "num_models": models + self.extra,
        }  # fmt: skip

    def unit(self, models: int) -> float:
        """Return 2^-k, the unit of the grid on which the log-ratios are counted."""
        exponent = math.frexp((models + self.extra) * self.reach)[1]
        return 2.0 ** -min(40, 51 - exponent)


SETTINGS = (
    Setting(-0.25, 1.0, 2.0),
    Setting(-0.25, 0.5, 1.0, 3),
    Setting(-2.0, 0.0, 0.7),
    Setting(0.0, 3.0, 1.5, 1),
    Setting(-32.0, 32.0, 330 / 64),  # the widest clip range, and the most κ (b − a)
    Setting(-1e-9, 1e-9, 1e5),
)


class Truth:
    """The exact pool up to the rounding of extended precision, as logarithms (B, V) and (N, B).

    It is computed from ``private_lse`` (N, B), the log-sum-exps that the pool used. Their own error
    is checked separately, against ``lse``.
    """

    def __init__(
        self,
        private: Tensor,
        public: Tensor,
        setting: Setting,
        private_lse: Tensor,
        active: Tensor | None = None,
    ) -> None:
        models = private.shape[0]
        self.log_q = log_softmax(public)
        held = ~np.isneginf(self.log_q)
        self.lse = log_sum_exp(array(private))
        log_p = array(private) - array(private_lse)[..., None]
        ratio = np.where(held, log_p - np.where(held, self.log_q, 0), 0)
        u = np.clip(ratio, setting.lower, setting.upper)
        on = np.ones(u.shape[:2], bool) if active is None else active.cpu().numpy()
        share = np.longdouble(setting.scale) / (models + setting.extra)
        weight = self.log_q + share * (u * on[..., None]).sum(0)
        self.log_normaliser = log_sum_exp(weight)
        self.log_p = weight - self.log_normaliser[:, None]
        most = np.where(held, u, -np.inf).max(-1)
        self.span = most - np.where(held, u, np.inf).min(-1)
        # The documented bounds of u (N, B), and the bounds of log p (B, V) that follow from them.
        lse = log_sum_exp(array(public))
        sizes = abs(self.lse) + abs(lse) + setting.reach
        self.ratio_error = (setting.unit(models) + 5e-14 + 5e-16 * sizes).astype(float)
        depth = np.where(held, abs(self.log_q), 0)
        own = 2.0**-49 * (1 + setting.scale * setting.reach + depth)
        both = 2 * setting.scale * self.ratio_error.max(0) + 1e-13 + 5e-16 * abs(lse)
        self.log_error = (own + both[:, None]).astype(float)


def check_pool(
    private: Tensor, public: Tensor, setting: Setting, active: Tensor | None = None
) -> Report:
    """Check log_pool, and mixture and log_prob of all tokens, against the stated bounds."""
    report = Report()
    options = setting.options(private.shape[0])
    pool = adapmixed_ext.log_pool(private, public, active=active, **options)
    truth = Truth(private, public, setting, pool.private_lse, active)
    mixture, log_prob = probabilities(private, public, pool)
    tokens = torch.arange(public.shape[1]).expand(public.shape)
    check_answers(truth, pool, mixture, tokens, log_prob, report)
    return report


def probabilities(
    private: Tensor, public: Tensor, pool: adapmixed_ext.LogPool
) -> tuple[Tensor, Tensor]:
    """Return the mixture and the log-probabilities of all tokens, both (B, V)."""
    positions, vocab = public.shape
    columns = [
        adapmixed_ext.log_prob(
            private, public, pool, torch.full((positions,), v, device=public.device)
        )
        for v in range(vocab)
    ]
    return adapmixed_ext.mixture(private, public, pool), torch.stack(columns, -1)


def check_answers(
    truth: Truth, pool: adapmixed_ext.LogPool, mixture: Tensor, tokens: Tensor, log_prob: Tensor,
    report: Report,
) -> None:  # fmt: skip
    """Check the answers of a pool; ``log_prob`` belongs to ``tokens``, both (B, any)."""
    spans, logs = array(pool.span), array(log_prob)
    report.values += spans.size + logs.size
    with np.errstate(divide="ignore"):
        _compare("log-sum-exp", array(pool.private_lse), truth.lse, LSE_ERROR, report)
        _compare("span", spans, truth.span, 2 * truth.ratio_error, report)
        bound = truth.log_error.max(-1)
        _compare("normaliser", array(pool.log_normaliser), truth.log_normaliser, bound, report)
        exact, error = (
            np.take_along_axis(x, tokens.numpy(), -1) for x in (truth.log_p, truth.log_error)
        )
        _compare("log_prob", logs, exact, error, report)
        # p below the range of a double is 0 or denormal.
        p = array(mixture)
        held = truth.log_p > NORMAL
        _compare("mixture", np.log(p[held]), truth.log_p[held], truth.log_error[held], report)
        if not (p[~held] <= 2.0**-1021).all() or not (p[np.isneginf(truth.log_p)] == 0).all():
            report.failures.append("mixture: a token without probability got some")
    if not (abs(p.sum(-1) - 1) < 1e-9).all():
        report.failures.append(f"mixture: sums {p.sum(-1)}")


def _compare(name: str, got: Array, truth: Array, bound: Array, report: Report) -> None:
    same = (got == truth) | (np.isneginf(got) & np.isneginf(truth))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, abs(got - truth))
    report.note(f"pool {name} (share of its bound)", error / bound)
    if not (error <= bound).all():
        at = np.unravel_index(np.nanargmax(error - bound), error.shape)
        report.failures.append(f"{name}: {got[at]} at {at}, exact {truth[at]}, off {error[at]}")


def rounding(setting: Setting, depth: float) -> float:
    """Return how much rounding adds to the range of log p - log p', for -log q up to ``depth``."""
    return 2.0**-49 * (1.0 + setting.scale * setting.reach + depth)
