"""Evaluations of every kind, reports of them, and a parser of report pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np

from adapmixed.evaluation import Evaluation, compared
from adapmixed.evaluation.report import BLOCK, Report
from adapmixed.privacy import Guarantee

HOSTILE = '<script>alert("1")</script> $\\frac$ --> & id="x"'


def evaluation(
    name: str,
    kind: str,
    *,
    epsilon: float | None = None,
    perplexity: float = 50.0,
    points: int = 12,
    **changes: Any,
) -> Evaluation:
    """Return a method that spends `epsilon` evenly, with a point after every 10 queries."""
    bound = kind not in ("public", "none")
    guarantee = Guarantee(
        epsilon=epsilon,
        delta={"public": 0.0, "none": 1.0}.get(kind, 1e-5),
        kind=kind,
        unit="shard",
        adjacency="zero_out" if bound else None,
        method="renyi" if bound else None,
        order=18.0 if bound else None,
        orders=(18.0,) if bound else (),
        queries=10 * points,
    )
    curve = tuple(
        (10 * i, None if epsilon is None else epsilon * i / points) for i in range(1, points + 1)
    )
    total = math.inf if epsilon is None else epsilon
    values: dict[str, Any] = {
        "screened": 0.0,
        "tokens_per_second": 1234.5,
        "curve": curve,
        "perplexities": tuple((queries, perplexity) for queries, _ in curve),
        "breakdown": {"mixing": total, "screening": 0.0, "conversion": 0.0, "total": total},
    }
    return Evaluation(name, perplexity, 10 * points, guarantee, **(values | changes))


def every_kind() -> list[Evaluation]:
    parts = {"mixing": 0.9, "screening": 0.002, "conversion": 0.45, "total": 1.35203}
    return [
        evaluation("unprotected", "none", perplexity=45.0),
        evaluation("public", "public", epsilon=0.0, perplexity=60.0),
        evaluation("PMixED", "fixed", epsilon=8.0, perplexity=57.0),
        evaluation("claim", "published", epsilon=8.0, perplexity=56.5),
        evaluation(
            "AdaPMixED",
            "data-dependent, ex-post",
            epsilon=1.35203,
            perplexity=51.0,
            screened=0.0042,
            breakdown=parts,
        ),
        evaluation("lost", "fixed", epsilon=math.inf, perplexity=math.inf),
    ]


SAMPLE = {
    "prompt": "The with statement",
    "text": " wraps <i>&amp;</i>",
    "guarantee": "ε = 1 & no more",
    "mechanism": "AdaPMixED",
}


def build(evaluations: list[Evaluation] | None = None, **changes: Any) -> Report:
    arguments: dict[str, Any] = {
        "config": {"order": math.inf, "seed": 0},
        "environment": {"torch": "2"},
    }
    return Report(compared(evaluations or every_kind()), **(arguments | changes))


def by_name(report: Report) -> dict[str, dict[str, Any]]:
    return {method["name"]: method for method in report.to_json()["methods"]}


PUBLIC = np.log(60.0)


def lossy(name: str, kind: str, losses: Sequence[float], **fields: Any) -> Evaluation:
    """Return a method with these mean losses of successive blocks of `BLOCK` tokens."""
    means = np.cumsum(losses) / np.arange(1, len(losses) + 1)
    method = evaluation(name, kind, perplexity=math.exp(means[-1]), **fields)
    points = tuple((BLOCK * (i + 1), math.exp(mean)) for i, mean in enumerate(means))
    guarantee = replace(method.guarantee, budget=20_000 if kind == "fixed" else None)
    return replace(method, perplexities=points, queries=points[-1][0], guarantee=guarantee)


def compared_methods(
    gain: Sequence[float], kept: Sequence[float], name: str = "pool"
) -> list[Evaluation]:
    """Return the public model, the ensemble that gains this much, and a private method."""
    return [
        lossy("public", "public", [PUBLIC] * len(gain), epsilon=0.0),
        lossy("unprotected", "none", [PUBLIC - nats for nats in gain]),
        lossy(name, "fixed", [PUBLIC - nats for nats in kept], epsilon=3.0),
    ]


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text without the style sheet."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._styled = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._styled = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._styled = False

    def handle_data(self, data: str) -> None:
        if not self._styled:
            self.text += data
