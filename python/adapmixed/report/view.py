"""Read a report into typed rows, and format its numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any

from adapmixed.privacy.guarantee import format_epsilon

FORMAT_VERSION = 2

KIND_LABELS = {
    "public": "public",
    "fixed": "fixed",
    "data-dependent, ex-post": "data-dependent, ex-post",
    # "published" alone could be read as "may be published".
    "published": "published, invalid",
    "none": "none",
}
"""Short names of the kinds of guarantee."""

NEIGHBOUR_LABELS = {
    "zero_out": "zero-out",
    "add_remove": "leave-one-out",
    "replace_one": "replace-one",
}
"""Short names of the adjacencies; an ε for one is not comparable with an ε for another."""

MISSING = "-"
"""Shown for a missing value."""


@dataclass(frozen=True)
class Method:
    """One entry of a report's "methods"; see :func:`adapmixed.report.build_report`."""

    name: str
    perplexity: float
    change: float | None
    difference: Mapping[str, Any] | None
    kept: Mapping[str, Any] | None
    queries: int
    planned: int | None
    epsilon: float | None
    delta: float
    kind: str
    guarantee: str
    unit: str
    adjacency: str | None
    method: str | None
    order: float | None
    screened: float
    tokens_per_second: float | None
    breakdown: Mapping[str, float]
    curve: tuple[tuple[int, float | None], ...]
    perplexities: tuple[tuple[int, float], ...]
    diagnostics: Mapping[str, Any] | None


def read_methods(report: Mapping[str, object]) -> tuple[Method, ...]:
    """Return the methods of a report.

    Raises:
        ValueError: if the report has another format version.
    """
    version = report.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"format_version must be {FORMAT_VERSION}, got {version!r}")
    entries: Any = report["methods"]
    return tuple(_method(entry) for entry in entries)


def _method(entry: Mapping[str, Any]) -> Method:
    optional = dict.fromkeys(("difference", "kept", "planned", "diagnostics"))
    known: dict[str, Any] = {f.name: {**optional, **entry}[f.name] for f in fields(Method)}
    for name in ("perplexity", "delta", "screened"):
        known[name] = float(known[name])
    for name in ("epsilon", "change", "order", "tokens_per_second"):
        known[name] = _optional(known[name])
    for name in ("perplexity", "epsilon", "delta"):
        if not (known[name] or 0.0) >= 0:
            raise ValueError(f"{name} must be >= 0, got {known[name]!r}")
    known["breakdown"] = {part: float(value) for part, value in entry["breakdown"].items()}
    for name in ("curve", "perplexities"):
        known[name] = tuple((queries, _optional(value)) for queries, value in entry[name])
    return Method(**known)


def _optional(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def show_epsilon(epsilon: float | None) -> str:
    """Return ε as the guarantee writes it, or `MISSING`."""
    return MISSING if epsilon is None else format_epsilon(epsilon)


def format_neighbours(adjacency: str | None) -> str:
    """Return the adjacency of ε, or `MISSING` if nothing private was used or protected."""
    return MISSING if adjacency is None else NEIGHBOUR_LABELS.get(adjacency, adjacency)


def format_promise(kind: str, adjacency: str | None) -> str:
    """Return the kind and the adjacency of an ε."""
    words = KIND_LABELS.get(kind, kind)
    return words if adjacency is None else f"{words}, {format_neighbours(adjacency)}"


def covered(entry: Mapping[str, Any]) -> str:
    """Return the tokens that the ε of a method or of its runs covers, or `MISSING` without one."""
    if entry["kind"] in ("public", "none"):
        return MISSING
    if entry["method"] == "per-shard budget":
        return "any number of tokens"
    return f"{entry['planned'] or entry['queries']:,} tokens"


def format_kept(kept: Mapping[str, Any] | None) -> str:
    """Return the share of the gain that is kept, with twice its standard error, in percent."""
    if kept is None or kept["share"] is None:
        return MISSING
    band = math.ceil(200 * kept["error"])
    return f"{100 * kept['share']:.0f} %" + (f" ± {band}" if band else "")


def format_perplexity(perplexity: float) -> str:
    """Return a perplexity with two decimals, or with four significant digits if it is large."""
    return f"{perplexity:.2f}" if perplexity < 1e4 else f"{perplexity:.4g}"


def format_change(change: float | None) -> str:
    """Return a relative change in percent with its sign."""
    if change is None:
        return MISSING
    if math.isinf(change):
        return "inf"
    text = f"{100 * change:+.1f}%"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def format_against(change: float | None, difference: Mapping[str, Any] | None) -> str:
    """Return a relative change of perplexity in percent, with its interval if there is one.

    Args:
        change: None: that of the difference.
        difference: of log-perplexity, from `paired_difference`; or None.
    """
    if difference is None:
        return format_change(change)
    words = format_change(math.expm1(difference["mean"]) if change is None else change)
    if difference["low"] is None:
        return words
    low, high = (100 * math.expm1(difference[end]) for end in ("low", "high"))
    return f"{words} [{low:+.1f}, {high:+.1f}]"


INTERVAL_WORDS = (
    "[…]: 95 % intervals of the change against the public model, by a block bootstrap of paired "
    "differences in log-perplexity, for the same models on other text like this."
)
KEPT_WORDS = (
    "Gain kept: the share of the log-perplexity that the best method without protection gains over "
    "the public model, ± two standard errors by a jackknife over the same blocks."
)


def run_words(config: Mapping[str, Any], methods: Sequence[Method]) -> str:
    """Return what a report's numbers are of: base, text, models and tokens, as far as known."""
    names = [config.get(name) for name in ("base", "text")]
    where = " on ".join(PurePath(name).name for name in names if isinstance(name, str))
    count, runs = config.get("num_models"), config.get("runs", 1)
    facts = [f"{count} models"] if count else []
    facts.append(f"{runs} runs of " * (runs != 1) + f"{methods[0].queries:,} scored tokens")
    return f"{where}: {', '.join(facts)}".removeprefix(": ")
