"""The field's mechanisms, each with its sound guarantee or none, and all methods at the same ε.

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
    MOST_BOX,
    check_count,
    check_epsilon,
    check_number,
    check_optional_queries,
    check_queries,
    check_scale,
    check_sigma,
)
from adapmixed.mechanisms import (
    AdaPMixED,
    Mechanism,
    NextToken,
    PublicOnly,
    Rows,
    Unprotected,
    planned,
)
from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    ClippedAnswer,
    Event,
    GaussianScreening,
    Guarantee,
    PublicAnswer,
    UnprotectedAnswer,
)
from adapmixed.privacy.composition import PLANNED_POINTS, clipped_mixing_epsilon
from adapmixed.privacy.conversions import up
from adapmixed.privacy.planner import CHOSEN_SCALE, CHOSEN_SHAPE, largest_within, plan
from adapmixed_ext.inputs import likeliest, prepare
from adapmixed_ext.types import RandomSource

if TYPE_CHECKING:
    from adapmixed.evaluation import Evaluation
    from adapmixed_lab.dp_sgd import AdapterGuarantee
    from adapmixed_lab.figures.style import DrawnFigure


@dataclass(frozen=True)
class GivenToken(NextToken):
    """The answers of B positions by their probabilities.

    Attributes:
        projection: members as they are; nothing is drawn from it.
        given: (B, k) float64, rows that sum to 1; 0 for columns that the public model masks.
    """

    given: Tensor | None = None

    def probabilities(self) -> Tensor:
        """Return the probabilities as they are."""
        assert self.given is not None
        return self.given

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return log-probabilities as `NextToken.log_prob` does."""
        places, share = self.rows.places(targets)
        return self.probabilities().gather(1, places[:, None])[:, 0].log() + share


class Baseline(Mechanism):
    """A mechanism whose answer is a `GivenToken`."""

    no_budget = "its cost is not one member's own; ClippedMixing and ClippedLogPool take a budget"

    def answer_bytes(self, width: int) -> int:
        """Return the bytes of `Mechanism.answer_bytes` and those of three more float64 rows."""
        return super().answer_bytes(width) + 3 * 8 * width


def unprotected(rows: Rows) -> tuple[Tensor, ops.Projection]:
    """Return log q of the checked rows, (B, k) float64, and their projection with every weight 1.

    Raises:
        ValueError: a row has NaN, +inf or no finite logit.
    """
    inputs = prepare(rows.private, rows.public)
    projection = ops.Projection(torch.ones_like(inputs.private_lse), *inputs[2:])
    return rows.public.double() - inputs.public_lse[:, None], projection.check()


def answered(
    rows: Rows, projection: ops.Projection, weights: Tensor, events: tuple[Event, ...]
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
        check_scale(1 / self.temperature, -self.clip, self.clip)
        check_optional_queries(self.queries)

    def _prepare(self, rows: Rows, rng: RandomSource) -> GivenToken:
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

    def _prepare(self, rows: Rows, rng: RandomSource) -> GivenToken:
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


def _mean_on(rows: Rows, projection: ops.Projection, top: Tensor) -> Tensor:
    """Return the members' mean probabilities of these (B, k) columns."""
    return ops.mixture(rows.private, rows.public, projection).gather(1, top)


REACH, STEP, STEPS = 5.0, 0.93, 512
"""γ/2, the factor of the search for λ, and the number of its steps, after which λ counts as 0."""


@dataclass(frozen=True)
class SubMix(Baseline):
    """The mean of pairs of members that are mixed with the public model: as published, not sound.

    Ginart et al. 2022, program at commit 6540f5d. Members 0 and 1 are a pair, as are 2 and 3 and so
    on; the program pairs them at random, and both leave out an odd last one. Rows are clipped to
    within e^±5 of q and scaled to the sum 1, until they are so close. Rows p, p' of a pair become
    λ (p + p')/2 + (1 − λ) q. Here λ is the largest power of 0.93 such that the divergences of order
    α of that from λ p + (1 − λ) q and from λ p' + (1 − λ) q are at most ε/T. The answer is drawn
    from the mean over the pairs.

    **No guarantee.** What the program charges a pair can be far below the pair's loss, and it
    compares the budget with earlier charges alone (item 12 of docs/theory/errata.md). So the
    accountant counts these answers as unprotected. They go on after the budget is spent, at which
    the program takes the public model.

    Attributes:
        epsilon: ε that the program would claim, > 0.
        queries: T in [1, 2^40].
        order: α > 1, finite; 2 in the program's example.
    """

    name: ClassVar[str] = "submix"

    epsilon: float
    queries: int
    order: float = 2.0

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_queries(self.queries)
        check_number("order", self.order, above=1.0)

    @property
    def planned_queries(self) -> None:
        """None: no guarantee is planned."""

    def mixes(self, private: Tensor, q: Tensor) -> Tensor:
        """Return the mixed distributions of all pairs, (P, B, k) float64.

        Args:
            private: (N, B, k) logits, N ≥ 2.
            q: (B, k) float64, the public distribution.
        """
        if len(private) < 2:
            raise ValueError(f"num_models must be at least 2 for SubMix, got {len(private)}")
        pairs = []
        for i in range(0, len(private) - 1, 2):
            p, other = (_near(row.double().softmax(-1), q) for row in private[i : i + 2])
            pairs.append(self._mixed(p, other, q))
        return torch.stack(pairs)

    def _mixed(self, p: Tensor, other: Tensor, q: Tensor) -> Tensor:
        """Find λ by bisection of its power, since the divergences grow with λ."""
        middle, target = (p + other) / 2, self.epsilon / self.queries
        low = torch.zeros_like(q[:, :1])  # a power that is too small, or 0.93^0
        high = torch.full_like(low, float(STEPS))
        while bool((high - low > 1).any()):
            power = ((low + high) / 2).floor()
            whole, *rows = (q + STEP**power * (one - q) for one in (middle, p, other))
            cost = torch.maximum(*(divergence(whole, row, self.order) for row in rows))
            fits = cost[:, None] <= target
            low, high = torch.where(fits, low, power), torch.where(fits, power, high)
        return q + torch.where(high < STEPS, STEP**high, 0.0) * (middle - q)

    def _prepare(self, rows: Rows, rng: RandomSource) -> GivenToken:
        log_q, projection = unprotected(rows)
        mean = self.mixes(rows.private, log_q.exp()).mean(0)
        return answered(rows, projection, mean, (UnprotectedAnswer(len(log_q)),))


def divergence(p: Tensor, q: Tensor, order: float) -> Tensor:
    """Return D_order(p ‖ q) over the last axis; 0/0 counts 0."""
    terms = (p**order * q ** (1 - order)).nan_to_num(0.0, posinf=torch.inf)
    return terms.sum(-1).log() / (order - 1)


def _near(p: Tensor, q: Tensor) -> Tensor:
    """Return rows within e^±5 of q, by clipping and scaling until they are."""
    least, most = (q * torch.tensor(end).double().exp() for end in (-REACH, REACH))
    while bool(((p / q).log().abs() > REACH + 1e-4).any()):
        p = p.clamp(least, most)
        p = p / p.sum(-1, keepdim=True)
    return p


LARGEST = math.log(MOST_BOX) / 2
"""Largest pure ε of one answer that is accounted."""


@dataclass(frozen=True)
class UniformMixing(Baseline):
    """λ p + (1 − λ)/V with p the mean of the members: pure ε for each token.

    Published with one model of all private text (Majmudar et al. 2022); N members divide the cost.

    **Guarantee.** If one member changes in any way, p changes by at most 1/N at each token, and the
    answer is at least (1 − λ)/V there. So the ratio of both answers is at most
    1 + λV/(N(1 − λ)) = e^ε₀ at each token, in both orders, for zero-out and for replace-one. Two
    distributions whose ratio lies in [e^−ε₀, e^ε₀] are P and Q of a box of one member around Q:
    the `ClippedAnswer` with this box and N = 1. Its dominating pair is randomised response, the
    worst of all ε₀-DP answers (Kairouz, Oh and Viswanath 2015). For replace-one the accountant's
    pair of that event is wider than needed. The event's widening of the box covers rounding.

    Tokens that the public model masks have no share. The tail of rare tokens gets the uniform mass
    of all its tokens, which keep their public proportions.

    Attributes:
        weight: λ in [0, 1), such that ε₀ ≤ log(1000).
        queries: T in [1, 2^40], number of queries that the guarantee is planned for.
    """

    name: ClassVar[str] = "uniform-mixing"

    weight: float
    queries: int

    def __post_init__(self) -> None:
        if check_number("weight", self.weight, least=0.0) >= 1:
            raise ValueError(f"weight must be in [0, 1), got {self.weight!r}")
        check_queries(self.queries)

    @staticmethod
    def planned(
        epsilon: float, delta: float, num_models: int, queries: int, vocab_size: int
    ) -> UniformMixing:
        """Return the mechanism with the largest weight for (ε, δ), from public numbers alone."""

        def cost(pure: float) -> float:
            of = math.exp(-pure), math.exp(pure), 1, queries, delta, "zero_out"
            return clipped_mixing_epsilon(*of, points=PLANNED_POINTS)

        pure = largest_within(cost, epsilon, LARGEST * (1 - 1e-9))
        odds = math.expm1(pure) * num_models / vocab_size * (1 - 1e-9)
        return UniformMixing(odds / (1 + odds), queries)

    def pure_epsilon(self, num_models: int, vocab_size: int) -> float:
        """Return ε₀ of one answer of N members over V tokens, rounded up.

        Raises:
            ValueError: it is above log(1000).
        """
        odds = up(up(self.weight * vocab_size) / ((1 - self.weight) * (1 - 2.0**-50) * num_models))
        found = up(math.log1p(up(odds))) if self.weight else 0.0
        if found > LARGEST:
            raise ValueError(
                f"weight must cost at most ε₀ = {LARGEST:.4g} an answer, got {self.weight!r}, "
                f"which costs {found:.4g} with {num_models} members and {vocab_size} tokens"
            )
        return found

    def _prepare(self, rows: Rows, rng: RandomSource) -> GivenToken:
        models, positions = rows.private.shape[:2]
        pure = self.pure_epsilon(models, rows.vocab_size)
        _, projection = unprotected(rows)
        count = torch.ones_like(rows.public, dtype=torch.float64)
        if rows.tail is not None:
            count[:, -1] = (~rows.tail.isneginf()).sum(-1)
        count = count.masked_fill(rows.public.isneginf(), 0.0)
        uniform = count / count.sum(-1, keepdim=True)
        mean = ops.mixture(rows.private, rows.public, projection)
        weights = self.weight * mean + (1 - self.weight) * uniform
        event = ClippedAnswer(math.exp(-pure), math.exp(pure), 1, positions, self.queries)
        return answered(rows, projection, weights, (event,))


ADD_REMOVE = "add/remove"  # a record or a name, of the text that DP-SGD reads
WORDS = (
    "Every setting follows from ε, δ, the number of members, of tokens and of the vocabulary. "
    "'≤' is the ε that a setting was made for, and the column ε is what the accountant states.",
    "The ε of adapmixed is ex post and depends on the private data: it is for the operator, and no "
    "(ε, δ) with a constant ε. It is not comparable with a fixed ε. Its ball is that of pmixed, so "
    "that it stays at or below the same ε. adapmixed-paper has the paper's ball and screening for "
    "wikitext-103. Neither stops at a budget: the moment of stopping would tell about the members.",
    "submix is as published and claims an ε that does not hold, so none is stated.",
    "dp-sgd is one adapter on all text. Its ε is for the unit in brackets, added or removed.",
    INTERVAL_WORDS,
    KEPT_WORDS,
)


def methods(
    epsilons: Sequence[float], delta: float, num_models: int, queries: int, vocab_size: int
) -> dict[str, Mechanism]:
    """Return the methods by their label, with settings from these public numbers alone.

    Args:
        epsilons: the targets, each > 0.
        delta: δ of all of them.
        num_models: N.
        queries: T, tokens that every method answers.
        vocab_size: V.
    """
    lines: dict[str, dict[float, Mechanism]] = {}
    for epsilon in sorted(set(epsilons)):
        of = epsilon, delta, num_models, queries
        box, plain, pool, *pmixed = plan(*of, shapes=(CHOSEN_SHAPE,), scales=(1.0, CHOSEN_SCALE))
        made: dict[str, Mechanism] = {one.mechanism: planned(one) for one in (box, pool, *pmixed)}
        for one in pmixed:
            leakage = one.settings["target_leakage"]
            made["adapmixed"] = AdaPMixED(one.settings["order"], leakage, screen=None)
        # A clip to ±C has the range of one to [0, 2C].
        made["invisible-ink"] = InvisibleInk(plain.settings["upper"] / 2, queries=queries)
        made["noisy-aggregation"] = NoisyAggregation.planned(*of)
        if epsilon == max(epsilons):
            made["uniform-mixing"] = UniformMixing.planned(*of, vocab_size)
        for name, mechanism in made.items():
            lines.setdefault(name, {})[epsilon] = mechanism
    found: dict[str, Mechanism] = {"public": PublicOnly(), "unprotected": Unprotected()}
    for name, several in lines.items():
        found |= {f"{name}, ≤ {epsilon:g}": one for epsilon, one in several.items()}
    found["adapmixed-paper"] = AdaPMixED.preset("wikitext-103")
    if num_models > 1:
        found[f"submix, claims {max(epsilons):g}"] = SubMix(max(epsilons), queries)
    return found


def trained(one: Evaluation, stated: AdapterGuarantee) -> Evaluation:
    """Return the result of an unprotected adapter under the guarantee of its training."""
    guarantee = Guarantee(
        stated.epsilon, stated.delta, "fixed", ADD_REMOVE, queries=one.queries,
        unit=stated.protected,
    )  # fmt: skip
    return replace(one, name=f"dp-sgd ({stated.protected})", guarantee=guarantee, kept=None)


def text(found: Sequence[Evaluation]) -> str:
    """Return the table of all results, and what to know about it."""
    cells = [row(one) for one in found]
    for line, one in zip(cells, found, strict=True):
        if one.guarantee.adjacency == ADD_REMOVE:
            line[TITLES.index("ε covers")] = "any number of tokens"
    lines = [*aligned([TITLES, *cells], NUMBERS), ""]
    for words in WORDS:
        lines += textwrap.wrap(words, 100, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def draw(found: Sequence[Evaluation]) -> DrawnFigure:
    """Draw perplexity against ε, a line for each method, with lines across for the references."""
    from adapmixed_lab.figures import html, style

    most = 2 * min(one.perplexity for one in found if one.guarantee.kind == "public")
    shown = [one for one in found if one.perplexity <= most]
    lines: dict[str, list[Evaluation]] = {}
    for one in shown:
        if one.guarantee.epsilon not in (None, 0.0, math.inf):
            lines.setdefault(one.name.partition(",")[0], []).append(one)
    with style.canvas(5.4) as (figure, axes):
        for (name, several), colour in zip(lines.items(), cycle(style.COLOURS), strict=False):
            kind, paid = several[0].guarantee.kind, [one.guarantee.epsilon for one in several]
            middle = np.array([one.perplexity for one in several])
            ends = abs(np.array([html.bar(one) for one in several]).T - middle)
            marks = {"marker": style.MARKERS.get(kind, "o"), "linestyle": style.LINE_STYLES[kind]}
            if several[0].guarantee.adjacency == ADD_REMOVE:
                marks["marker"] = "s"
            axes.errorbar(
                paid, middle, ends, label=name, color=colour, markersize=6, elinewidth=1.0,
                capsize=2.5, **marks,
            )  # fmt: skip
        levels = [one for one in shown if one.guarantee.kind in ("public", "none")]
        for one, dash in zip(levels, cycle(style.DASHES), strict=False):
            look = {"color": style.GREY, "linewidth": 1.2, "linestyle": dash, "zorder": 1}
            axes.axhline(one.perplexity, label=one.name, **look)
        axes.set(xlabel="ε (nats)", ylabel="perplexity (lower is better)", xscale="log")
        style.number_axis(axes.xaxis)
        style.number_axis(axes.yaxis)
        figure.legend(loc="outside lower left", ncols=3, handlelength=2)
    caption = (
        "Circles are fixed guarantees, squares those of DP-SGD. Diamonds, with dashed lines, are "
        "data-dependent ε. "
        "Lines across have no ε. Bars are 95 % intervals of the difference to the public model."
    )
    if missing := [one.name for one in found if one not in shown]:
        caption += f" Above twice the public model's perplexity: {', '.join(missing)}."
    return style.DrawnFigure("compare", "Perplexity against privacy", caption, figure)
