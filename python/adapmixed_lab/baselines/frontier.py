"""All methods at the same ε, δ and number of queries: their settings, their table, their figure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from adapmixed.evaluation.report import INTERVAL_WORDS, KEPT_WORDS, NUMBERS, TITLES, aligned, row
from adapmixed.mechanisms import AdaPMixED, Mechanism, PublicOnly, Unprotected, planned
from adapmixed.privacy import Guarantee
from adapmixed.privacy.planner import CHOSEN_SCALE, CHOSEN_SHAPE, plan
from adapmixed_lab.baselines.invisible_ink import InvisibleInk
from adapmixed_lab.baselines.noisy_aggregation import NoisyAggregation
from adapmixed_lab.baselines.submix import SubMix
from adapmixed_lab.baselines.uniform_mixing import UniformMixing

if TYPE_CHECKING:
    from adapmixed.evaluation import Evaluation
    from adapmixed_lab.dp_sgd import AdapterGuarantee
    from adapmixed_lab.figures.style import DrawnFigure

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
    from adapmixed_lab.figures import figures, style

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
            ends = abs(np.array([figures.bar(one) for one in several]).T - middle)
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
