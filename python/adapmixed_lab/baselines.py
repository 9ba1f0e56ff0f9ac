"""The field's mechanisms, each with its sound guarantee, and all methods at the same ε.

Each computes its probabilities itself, without an operator. `methods` gives them, and ours,
settings from public numbers alone.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.evaluation.report import INTERVAL_WORDS, KEPT_WORDS, NUMBERS, TITLES, aligned, row
from adapmixed.limits import (
    check_count,
    check_number,
    check_optional_queries,
    check_sigma,
)
from adapmixed.mechanisms import (
    AdaPMixED,
    Mechanism,
    NextToken,
    PublicOnly,
    ShapedLogits,
    Unprotected,
    planned,
)
from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    Event,
    GaussianScreening,
    Guarantee,
    PublicAnswer,
)
from adapmixed.privacy.planner import CHOSEN_SCALE, CHOSEN_SHAPE, largest_within, plan
from adapmixed_ext.inputs import likeliest, prepare
from adapmixed_ext.types import RandomSource

if TYPE_CHECKING:
    from adapmixed.evaluation import Evaluation
    from adapmixed_lab.dp_sgd import AdapterGuarantee
    from adapmixed_lab.figures.style import DrawnFigure


@dataclass(frozen=True, kw_only=True)
class GivenToken(NextToken):
    """The answers of B positions by their probabilities.

    Attributes:
        projection: members as they are; nothing is drawn from it.
        given: (B, k) float64, rows that sum to 1; 0 for columns that the public model masks.
    """

    given: Tensor

    def probabilities(self) -> Tensor:
        """Return the probabilities as they are."""
        return self.given

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return log-probabilities as `NextToken.log_prob` does."""
        places, share = self.rows.places(targets)
        return self.probabilities().gather(1, places[:, None])[:, 0].log() + share


class Baseline(Mechanism):
    """A mechanism whose answer is a `GivenToken`."""

    no_budget = "its cost is not one member's own; ClippedMixing and ClippedLogPool take a budget"


def unprotected(rows: ShapedLogits) -> tuple[Tensor, ops.Projection]:
    """Return log q of the checked rows, (B, k) float64, and their projection with every weight 1.

    Raises:
        ValueError: a row has NaN, +inf or no finite logit.
    """
    inputs = prepare(rows.private, rows.public)
    projection = ops.Projection(torch.ones_like(inputs.private_lse), *inputs[2:])
    return rows.public.double() - inputs.public_lse[:, None], projection.check()


def answered(
    rows: ShapedLogits, projection: ops.Projection, weights: Tensor, events: tuple[Event, ...]
) -> GivenToken:
    """Return the answer with probabilities in proportion to these weights.

    Args:
        rows: the rows.
        projection: theirs.
        weights: (B, k) float64, not negative; those of masked columns do not count.
        events: costs of the answers.
    """
    kept = weights.masked_fill(rows.public.isneginf(), 0.0)
    return GivenToken(rows, projection, events, given=kept / kept.sum(-1, keepdim=True))


@dataclass(frozen=True)
class InvisibleInk(Baseline):
    """Clipped differences of logits, averaged, then a softmax at a temperature: a fixed (ε, δ).

    With raw logits z_i of the N members and z_0 of the public model, the token is drawn from
    softmax((z_0 + (1/N) Σ_i clip(z_i − z_0, −C, C))/τ) (Vinod, Pillutla and Thakurta 2025,
    arXiv 2507.02974, DClip). `top_k` of the rows takes the place of their expanded top-k set, which
    is public, too.

    **Guarantee.** Emptying member i makes its difference 0, so log p changes by u_i/(Nτ) and a
    constant, |u_i| ≤ C. The range of the change is at most η = 2C/(Nτ). For replace-one it is at
    most 2η. This is the `BoundedRangeAnswer` of scale 1/τ and clips ±C. The paper and its package
    charge one token ρ = (C/(Nτ))²/2 of zCDP, which is η²/8. The accountant composes the ranges,
    which gives no larger ε than T times that.

    **Rounding.** Each difference is rounded to a grid that follows from N and C, and clipped to
    grid points within ±C. So their sums are exact, as in the operator `log_pool`. The rounding of
    what follows is below the bound of that operator, which the event counts twice.

    Attributes:
        clip: C in [0, 32], in units of a logit.
        temperature: τ in [0.25, 100]. Below that, rare tokens would leave the range of float64.
        queries: T in [1, 2^40] that the guarantee is planned for; None charges each as it comes.
    """

    name: ClassVar[str] = "invisible-ink"

    clip: float
    temperature: float = 1.0
    queries: int | None = None

    def __post_init__(self) -> None:
        check_number("clip", self.clip, least=0.0, most=32.0)
        check_number("temperature", self.temperature, least=0.25, most=100.0)
        check_optional_queries(self.queries)

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> GivenToken:
        models, positions = rows.private.shape[:2]
        log_q, projection = unprotected(rows)
        masked, public = rows.public.isneginf(), rows.public.double()
        exponent = math.frexp(models * self.clip)[1]  # a sum is below 2^exponent
        unit = 2.0 ** -min(40, 51 - exponent)
        most = math.floor(self.clip / unit)
        total = torch.zeros_like(public)  # in units, below 2^51
        for member in rows.private:
            difference = (member.double() - public).masked_fill(masked, 0.0)
            total += (difference / unit).round().clamp(-most, most)
        scale = 1 / self.temperature
        logs = log_q * scale + scale / models * unit * total
        event = BoundedRangeAnswer(scale, -self.clip, self.clip, models, positions, self.queries)
        return answered(rows, projection, logs.softmax(-1), (event,))


ROUNDING = 1e-6
"""Relative widening of the accounted sensitivity. Each mean is within 1e-11 of the exact one in L2,
and the sensitivity √2/N is at least 2e-5."""


@dataclass(frozen=True)
class NoisyAggregation(Baseline):
    """Gaussian noise on the mean of the members' probabilities, with a fixed (ε, δ).

    This is the core of SeqPATE (Tian et al. 2022) and of few-shot generation (Tang et al. 2024).
    The k likeliest tokens K come from the public row. The members' mean m on K gets independent
    noise N(0, σ²). Negative values become 0, and the rest is scaled to the sum 1. If nothing is
    left, the public probabilities on K are taken. The token is drawn from `weight` times that, plus
    1 − `weight` times the public distribution.

    **Sensitivity.** K follows from public values, so it is the same for neighbours. Let x and y be
    the rows of one member on K, before and after it changed. Neither is scaled after the
    restriction. Their entries are not negative and sum to at most 1. So ‖x‖₂ ≤ ‖x‖₁ ≤ 1 and
    x·y ≥ 0. Hence ‖x − y‖² ≤ ‖x‖² + ‖y‖² ≤ 2, and m moves by at most √2/N in L2. This holds for
    zero-out, in which y is the public row on K, and for replace-one, in which y is any row.

    **Guarantee.** A query is a Gaussian mechanism with sensitivity √2/N, the `GaussianScreening` of
    weight 1. All that follows is post-processing. T queries are μ-Gaussian DP with
    μ = √(2T)/(Nσ), exactly, also if contexts depend on earlier answers (Dong, Roth and Su 2022).
    T must be fixed in advance.

    **Not covered.** The theorem is about real Gaussian noise. The float64 noise is Box-Muller's
    from 53-bit words: it ends at 8.57 σ, and low digits of a noisy vector could reveal the mean
    (Mironov 2012). Only the token leaves, but that this closes the gap is not proved.

    Attributes:
        sigma: σ ≥ 1e-6.
        top_k: k ≥ 1.
        weight: in [0, 1], share of the noisy vector in the answer; 1 as published. Below 1 no token
            that the public model allows has probability 0.
    """

    name: ClassVar[str] = "noisy-aggregation"

    sigma: float
    top_k: int = 100
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_sigma(self.sigma)
        check_count("top_k", self.top_k)
        check_number("weight", self.weight, least=0.0, most=1.0)

    @staticmethod
    def planned(
        epsilon: float, delta: float, num_models: int, queries: int, top_k: int = 100
    ) -> NoisyAggregation:
        """Return the mechanism with the least noise for (ε, δ), from public numbers alone.

        Its weight is 1/(1 + kσ²): it minimises the expected squared error if the mean lies at
        distance 1 from the public vector, which is the size of the noise kσ² before it is clamped.
        """

        def spent(precision: float) -> float:
            event = GaussianScreening(num_models, queries, 1.0, (1 - ROUNDING) / precision)
            return Accountant(delta).add(event).get_epsilon(delta)

        sigma = 1 / largest_within(spent, epsilon, 1e6)
        return NoisyAggregation(sigma, top_k, 1 / (1 + top_k * sigma**2))

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> GivenToken:
        models, positions = rows.private.shape[:2]
        log_q, projection = unprotected(rows)
        q, masked = log_q.exp(), rows.public.isneginf()
        # The tail's column is no token that could be in K.
        top = likeliest(rows.public[:, : rows.width], min(self.top_k, rows.width))
        # One draw for each position, so that the noise does not depend on the grouping into calls.
        noise = torch.empty(top.shape, dtype=torch.float64)
        for position in range(positions):
            noise[position] = ops.gaussian(top.shape[1], sigma=self.sigma, rng=rng)
        noisy = (_mean_on(rows, projection, top) + noise.to(q.device)).clamp(min=0.0)
        noisy = noisy.masked_fill(masked.gather(1, top), 0.0)
        nothing = noisy.sum(-1, keepdim=True) == 0
        noisy = torch.where(nothing, q.gather(1, top), noisy)
        share = self.weight / noisy.sum(-1, keepdim=True)
        weights = ((1 - self.weight) * q).scatter_add(1, top, share * noisy)
        cost = GaussianScreening(models, positions, 1.0, self.sigma * (1 - ROUNDING))
        # The noisy vector is paid for, and the answer is computed from it and public values.
        return answered(rows, projection, weights, (cost, PublicAnswer(positions)))


def _mean_on(rows: ShapedLogits, projection: ops.Projection, top: Tensor) -> Tensor:
    """Return the members' mean probabilities of these (B, k) columns."""
    return ops.mixture(rows.private, rows.public, projection).gather(1, top)


ADD_REMOVE = "add/remove"  # a record or a name, of the text that DP-SGD reads
WORDS = (
    "Every setting follows from ε, δ, the number of members and of tokens. '≤' is the ε that a "
    "setting was made for, and the column ε is what the accountant states.",
    "The ε of adapmixed is ex post and depends on the private data: it is for the operator, and no "
    "(ε, δ) with a constant ε. It is not comparable with a fixed ε. Its ball is that of pmixed, so "
    "that it stays at or below the same ε. adapmixed-paper has the paper's ball and screening for "
    "wikitext-103. Neither stops at a budget: the moment of stopping would tell about the members.",
    "dp-sgd is one adapter on all text. Its ε is for the unit in brackets, added or removed.",
    INTERVAL_WORDS,
    KEPT_WORDS,
)


def methods(
    epsilons: Sequence[float], delta: float, num_models: int, queries: int
) -> dict[str, Mechanism]:
    """Return the methods by their label, with settings from these public numbers alone.

    Args:
        epsilons: the targets, each > 0.
        delta: δ of all of them.
        num_models: N.
        queries: T, tokens that every method answers.
    """
    lines: dict[str, dict[float, Mechanism]] = {}
    for epsilon in sorted(set(epsilons)):
        facts = epsilon, delta, num_models, queries
        box, plain, pool, *pmixed = plan(*facts, shapes=(CHOSEN_SHAPE,), scales=(1.0, CHOSEN_SCALE))
        mechanisms: dict[str, Mechanism] = {p.mechanism: planned(p) for p in (box, pool, *pmixed)}
        for pick in pmixed:
            leakage = pick.settings["target_leakage"]
            mechanisms["adapmixed"] = AdaPMixED(pick.settings["order"], leakage, screen=None)
        # A clip to ±C has the range of one to [0, 2C].
        mechanisms["invisible-ink"] = InvisibleInk(plain.settings["upper"] / 2, queries=queries)
        mechanisms["noisy-aggregation"] = NoisyAggregation.planned(*facts)
        for name, mechanism in mechanisms.items():
            lines.setdefault(name, {})[epsilon] = mechanism
    by_label: dict[str, Mechanism] = {"public": PublicOnly(), "unprotected": Unprotected()}
    for name, several in lines.items():
        by_label |= {f"{name}, ≤ {epsilon:g}": method for epsilon, method in several.items()}
    by_label["adapmixed-paper"] = AdaPMixED.preset("wikitext-103")
    return by_label


def trained(evaluation: Evaluation, stated: AdapterGuarantee) -> Evaluation:
    """Return the result of an unprotected adapter under the guarantee of its training."""
    guarantee = Guarantee(
        stated.epsilon, stated.delta, "fixed", ADD_REMOVE, queries=evaluation.queries,
        unit=stated.protected,
    )  # fmt: skip
    return replace(evaluation, name=f"dp-sgd ({stated.protected})", guarantee=guarantee, kept=None)


def text(evaluations: Sequence[Evaluation]) -> str:
    """Return the table of all results, and what to know about it."""
    cells = [row(m) for m in evaluations]
    for line, method in zip(cells, evaluations, strict=True):
        if method.guarantee.adjacency == ADD_REMOVE:
            line[TITLES.index("ε covers")] = "any number of tokens"
    lines = [*aligned([TITLES, *cells], NUMBERS), ""]
    for words in WORDS:
        lines += textwrap.wrap(words, 100, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def draw(evaluations: Sequence[Evaluation]) -> DrawnFigure:
    """Draw perplexity against ε, a line for each method, with lines across for the references."""
    from adapmixed_lab.figures import html, style

    most = 2 * min(m.perplexity for m in evaluations if m.guarantee.kind == "public")
    shown = [m for m in evaluations if m.perplexity <= most]
    lines: dict[str, list[Evaluation]] = {}
    for method in shown:
        if method.guarantee.epsilon not in (None, 0.0, math.inf):
            lines.setdefault(method.name.partition(",")[0], []).append(method)
    with style.canvas(5.4) as (figure, axes):
        for (name, several), colour in zip(lines.items(), cycle(style.COLOURS), strict=False):
            kind, paid = several[0].guarantee.kind, [m.guarantee.epsilon for m in several]
            middle = np.array([m.perplexity for m in several])
            ends = abs(np.array([html.bar(m) for m in several]).T - middle)
            marks = {"marker": style.MARKERS.get(kind, "o"), "linestyle": style.LINE_STYLES[kind]}
            if several[0].guarantee.adjacency == ADD_REMOVE:
                marks["marker"] = "s"
            axes.errorbar(
                paid, middle, ends, label=name, color=colour, markersize=6, elinewidth=1.0,
                capsize=2.5, **marks,
            )  # fmt: skip
        levels = [m for m in shown if m.guarantee.kind in ("public", "none")]
        for method, dash in zip(levels, cycle(style.DASHES), strict=False):
            look = {"color": style.GREY, "linewidth": 1.2, "linestyle": dash, "zorder": 1}
            axes.axhline(method.perplexity, label=method.name, **look)
        axes.set(xlabel="ε (nats)", ylabel="perplexity (lower is better)", xscale="log")
        style.number_axis(axes.xaxis)
        style.number_axis(axes.yaxis)
        figure.legend(loc="outside lower left", ncols=3, handlelength=2)
    caption = (
        "Circles are fixed guarantees, squares those of DP-SGD. Diamonds, with dashed lines, are "
        "data-dependent ε. "
        "Lines across have no ε. Bars are 95 % intervals of the difference to the public model."
    )
    if missing := [m.name for m in evaluations if m not in shown]:
        caption += f" Above twice the public model's perplexity: {', '.join(missing)}."
    return style.DrawnFigure("compare", "Perplexity against privacy", caption, figure)
