"""The results of an evaluation, their comparison, and the operator's report.

The report is report.json, and tables with a verdict for a terminal.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.files import write_file
from adapmixed.privacy import Guarantee
from adapmixed.privacy.guarantee import format_epsilon

BLOCK, MOST_BLOCKS, LEAST_BLOCKS = 64, 64, 8
"""Least queries of a block, most blocks of a text, and least blocks of an interval."""
_RESAMPLES = 4000
_ENTRIES = (
    "name perplexity change difference kept queries planned epsilon delta kind guarantee unit "
    "adjacency method order screened tokens_per_second breakdown curve perplexities utility"
)

KIND_LABELS = {"published": "published, invalid"}
"""Short names of the kinds of guarantee; "published" alone could be read as "may be published"."""

NEIGHBOUR_LABELS = {
    "zero_out": "zero-out",
    "add_remove": "leave-one-out",
    "replace_one": "replace-one",
}
"""Short names of the adjacencies; an ε for one is not comparable with an ε for another."""

MISSING = "-"
"""Shown for a missing value."""

TITLES = ("method", "perplexity", "vs public", "gain kept", "ε", "ε covers", "guarantee")
NUMBERS = (False, True, True, True, True, True, False)
"""Which columns hold numbers, which are aligned on the right."""
INTERVAL_WORDS = (
    "[…]: 95 % intervals of the change against the public model, by a block bootstrap of paired "
    "differences in log-perplexity, for the same models on other text like this."
)
KEPT_WORDS = (
    "Gain kept: the share of the log-perplexity that the best method without protection gains over "
    "the public model, ± two standard errors by a jackknife over the same blocks."
)
REPORT_VERSION = 4

UTILITY_TITLES = ("method", "gap", "mean bound", "bound")
UTILITY_WORDS = (
    "In nats per token. Gap: the method’s mean negative log-likelihood minus that of the "
    "unprotected ensemble, on the same queries. Bound: the largest (1 − λ) log(p_j/p_0) over all "
    "queries and models, which bounds the gap by the paper’s utility theorem. Mean bound: the mean "
    "over queries of each query’s largest term, which bounds the gap, too. These numbers depend on "
    "the private data and are for the operator only."
)


@dataclass(frozen=True)
class Evaluation:
    """The results of one mechanism on the text.

    Attributes:
        name: the name given in ``mechanisms``.
        perplexity: exp of the mean negative log-likelihood over all queries; inf if a target has
            probability 0.
        queries: number of scored tokens, each of which is one query.
        guarantee: the accountant's guarantee after all queries.
        screened: share of queries that screening answered with the public model; 0 for a mechanism
            that never reads the private models.
        tokens_per_second: queries divided by the time of the mechanism and the shared forward pass;
            None if it is not shown.
        curve: (queries, ε) after each call of the mechanism and at the end. Long evaluations keep
            every 2nd, 4th, ... call, so that there are at most 513 points. ε is None without a
            guarantee.
        perplexities: (queries, perplexity over the queries so far) at the same points. With a
            budget of every shard it approaches the public model's as shards spend their budgets.
        breakdown: the parts of ε in nats: "mixing", "screening", "conversion" and "total".
        utility: of `evaluate(..., diagnostics=True)` and for a mechanism with mixing weights: the
            paper's utility theorem in nats per query, "bound", "mean_bound", "loss",
            "ensemble_loss" and "gap"; else None.
        change: relative change of perplexity against the public model, the first result whose
            guarantee is of kind "public"; None without one, or if its perplexity is infinite.
        difference: of log-perplexity to the public model, from `paired_difference`; None for the
            public model and without one.
        kept: the share of the gain without protection: {"of", "share", "error"}, the name of the
            best method without protection whose gain can be told from zero, and the result of
            `gain_kept`. Share and error are None if there is none. None for the public model, and
            without something to compare.
    """

    name: str
    perplexity: float
    queries: int
    guarantee: Guarantee
    screened: float
    tokens_per_second: float | None
    curve: tuple[tuple[int, float | None], ...]
    perplexities: tuple[tuple[int, float], ...]
    breakdown: Mapping[str, float]
    utility: Mapping[str, float | None] | None = None
    change: float | None = None
    difference: Mapping[str, Any] | None = None
    kept: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of report.json; infinities are still floats."""
        values = vars(self.guarantee) | vars(self)
        values |= {"planned": self.guarantee.budget, "guarantee": str(self.guarantee)}
        return {name: values[name] for name in _ENTRIES.split()}


def compared(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the results with `change`, `difference` and `kept`, from these results alone."""
    public = next((result for result in evaluations if result.guarantee.kind == "public"), None)
    if public is None:
        return [replace(result, change=None, difference=None, kept=None) for result in evaluations]
    free = [result for result in evaluations if result.guarantee.kind == "none"]
    certain = [result for result in free if gain_kept(result, public, result) is not None] or free
    best = min(certain, key=lambda result: result.perplexity, default=None)
    results = []
    for result in evaluations:
        change, difference, kept = None, None, None
        if math.isfinite(public.perplexity):
            change = result.perplexity / public.perplexity - 1.0
        if result.guarantee.kind != "public":
            difference = paired_difference([result], [public])
        if best is not None and result is not public:
            share, error = gain_kept(result, public, best) or (None, None)
            kept = {"of": best.name, "share": share, "error": error}
        results.append(replace(result, change=change, difference=difference, kept=kept))
    return results


def paired_difference(
    method: Sequence[Evaluation], public: Sequence[Evaluation]
) -> dict[str, float | int | None] | None:
    """Return how far a method's log-perplexity lies above the public model's on the same tokens.

    Each text is cut into at most `MOST_BLOCKS` stretches of at least `BLOCK` queries. The interval
    is a seeded block bootstrap's: the 2.5 % and 97.5 % quantiles of the mean over blocks that are
    drawn with replacement. It is about other text like this, for the same models.

    Args:
        method: its results on one text, or on several.
        public: the public model's on the same texts.

    Returns:
        "mean", "low" and "high" in nats per token, and "blocks". "low" and "high" are None with
        fewer than `LEAST_BLOCKS` blocks. None if a perplexity is infinite.
    """
    blocks = _gaps(method, public)
    if blocks is None:
        return None
    counts, gaps = blocks
    result: dict[str, float | int | None] = {"mean": float(gaps.sum() / counts.sum())}
    result |= {"low": None, "high": None, "blocks": len(gaps)}
    if len(gaps) >= LEAST_BLOCKS:
        drawn = np.random.default_rng(0).integers(len(gaps), size=(_RESAMPLES, len(gaps)))
        means = gaps[drawn].sum(1) / counts[drawn].sum(1)
        result["low"], result["high"] = map(float, np.quantile(means, (0.025, 0.975)))
    return result


def gain_kept(
    method: Evaluation, public: Evaluation, reference: Evaluation
) -> tuple[float, float] | None:
    """Return which share of a reference's gain over the public model a method keeps.

    Gains are in log-perplexity, on the same tokens and in the blocks of :func:`paired_difference`.

    Returns:
        (share, its standard error by a jackknife over the blocks). None unless the interval of the
        reference's gain lies above zero, or if a perplexity is infinite.
    """
    gain = paired_difference([reference], [public])
    part, whole = _gaps([method], [public]), _gaps([reference], [public])
    if gain is None or part is None or whole is None or gain["high"] is None or gain["high"] >= 0:
        return None
    mine, theirs = part[1], whole[1]
    without = (mine.sum() - mine) / (theirs.sum() - theirs)
    squares = ((without - without.mean()) ** 2).sum() * (len(mine) - 1) / len(mine)
    return float(mine.sum() / theirs.sum()), math.sqrt(squares)


def _gaps(method: Sequence[Evaluation], public: Sequence[Evaluation]) -> NDArray[np.float64] | None:
    """Return (2, blocks): the queries of each, and the method's loss above the public model's."""
    values = [value for result in (*method, *public) for _, value in result.perplexities]
    if not all(map(math.isfinite, values)):
        return None
    mine, other = (np.concatenate([_losses(r) for r in each]) for each in (method, public))
    return np.stack([mine[:, 0], mine[:, 1] - other[:, 1]])


def _losses(result: Evaluation) -> NDArray[np.float64]:
    """Return (queries, loss in nats) of every block, from the perplexities so far."""
    points = np.array([(0, 0.0), *((n, n * math.log(value)) for n, value in result.perplexities)])
    count = min(MOST_BLOCKS, max(1, result.queries // BLOCK))
    wanted = np.arange(count + 1) * result.queries / count
    return np.diff(points[np.unique(np.searchsorted(points[:, 0], wanted))], axis=0)


def row(result: Evaluation) -> list[str]:
    """Return the cells of a result, in the order of `TITLES`."""
    return [
        result.name,
        format_perplexity(result.perplexity),
        format_against(result.change, result.difference),
        format_kept(result.kept),
        show_epsilon(result.guarantee.epsilon),
        covered(result),
        format_promise(result),
    ]


def show_epsilon(epsilon: float | None) -> str:
    """Return ε as the guarantee writes it, or `MISSING`."""
    return MISSING if epsilon is None else format_epsilon(epsilon)


def format_neighbours(adjacency: str | None) -> str:
    """Return the adjacency of ε, or `MISSING` if nothing private was used or protected."""
    return MISSING if adjacency is None else NEIGHBOUR_LABELS.get(adjacency, adjacency)


def format_promise(result: Evaluation) -> str:
    """Return the kind and the adjacency of an ε."""
    kind, adjacency = result.guarantee.kind, result.guarantee.adjacency
    words = KIND_LABELS.get(kind, kind)
    return words if adjacency is None else f"{words}, {format_neighbours(adjacency)}"


def covered(result: Evaluation) -> str:
    """Return the tokens that ε covers, or `MISSING` without an ε."""
    if result.guarantee.kind in ("public", "none"):
        return MISSING
    if result.guarantee.method == "per-shard budget":
        return "any number of tokens"
    return f"{result.guarantee.budget or result.queries:,} tokens"


def format_kept(kept: Mapping[str, Any] | None) -> str:
    """Return the share of the gain that is kept, with twice its standard error, in percent."""
    if kept is None or kept["share"] is None:
        return MISSING
    band = math.ceil(200 * kept["error"])
    return f"{100 * kept['share']:.0f} %" + (f" ± {band}" if band else "")


def format_perplexity(perplexity: float) -> str:
    """Return a perplexity with two decimals, or with four significant digits if it is large."""
    return f"{perplexity:.2f}" if perplexity < 1e4 else f"{perplexity:.4g}"


def format_against(change: float | None, difference: Mapping[str, Any] | None) -> str:
    """Return a relative change of perplexity in percent, with its interval if there is one.

    Args:
        change: None: that of the difference.
        difference: of log-perplexity, from `paired_difference`; or None.
    """
    if change is None:
        if difference is None:
            return MISSING
        change = math.expm1(difference["mean"])
    words = "inf" if math.isinf(change) else f"{100 * change:+.1f}%"
    words = "0.0%" if words in ("+0.0%", "-0.0%") else words
    if difference is None or difference["low"] is None:
        return words
    low, high = (100 * math.expm1(difference[end]) for end in ("low", "high"))
    return f"{words} [{low:+.1f}, {high:+.1f}]"


def aligned(rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> list[str]:
    """Return the lines of a table, with a rule below the first row.

    Args:
        rows: the cells; the first row holds the titles.
        numbers: for each column, whether it holds numbers, which are aligned on the right.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(_width(row[i]) for row in rows) for i in range(len(numbers))]
    lines = []
    for row in rows:
        cells = []
        for text, width, number in zip(row, widths, numbers, strict=True):
            space = " " * (width - _width(text))
            cells.append(space + text if number else text + space)
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("─" * width for width in widths))
    return lines


def _width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    wide = sum(unicodedata.east_asian_width(character) in "FW" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def printable(text: str) -> str:
    """Return the text with control characters replaced, since they could steer the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


@dataclass(frozen=True)
class Report:
    """The results of an evaluation, one per method, with what they were measured on.

    Attributes:
        evaluations: with distinct names, compared with each other by :func:`compared`.
        config: settings of the run, as nested JSON values.
        environment: the result of :func:`environment`.
        sample: a generated text, or None: "text" and "guarantee", the sentence that covers it, and
            perhaps "prompt" (public text) and further strings.
        validation: the result of :func:`validation_losses`.
    """

    evaluations: Sequence[Evaluation]
    config: Mapping[str, Any]
    environment: Mapping[str, object]
    sample: Mapping[str, str] | None = None
    validation: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the content of report.json, in strict JSON values with infinities as "inf".

        Raises:
            ValueError: if a value is NaN or none that JSON can hold.
        """
        content = {
            "format_version": REPORT_VERSION,
            "methods": [result.to_json() for result in self.evaluations],
            "sample": self.sample,
            "environment": self.environment,
            "config": self.config,
        }
        content |= {"validation": self.validation} if self.validation else {}
        strict: dict[str, Any] = plain(content, "report")
        return strict

    def write(self, path: Path) -> Path:
        """Write report.json to a path in one step, and return it."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, f"{text}\n".encode())
        return path

    def words(self) -> str:
        """Return what the numbers are of: base, text, models and tokens, as far as known."""
        names = [self.config.get(name) for name in ("base", "text")]
        where = " on ".join(PurePath(name).name for name in names if isinstance(name, str))
        count = self.config.get("num_models")
        facts = [f"{count} models"] if count else []
        facts.append(f"{self.evaluations[0].queries:,} scored tokens")
        return f"{where}: {', '.join(facts)}".removeprefix(": ")

    def utility_rows(self) -> list[list[str]]:
        """Return the cells under `UTILITY_TITLES` of the methods that have such numbers."""
        rows = []
        for result in self.evaluations:
            if result.utility is not None:
                values = (result.utility[key] for key in ("gap", "mean_bound", "bound"))
                cells = [MISSING if value is None else f"{value:.4g}" for value in values]
                rows.append([result.name, *cells])
        return rows

    def text(self) -> str:
        """Return what was run, the tables and, at the end, the verdict on every mechanism."""
        table = aligned([TITLES, *map(row, self.evaluations)], NUMBERS)
        lines = [printable(self.words()), "", *table]
        if any(e.difference and e.difference["low"] is not None for e in self.evaluations):
            lines += ["", *textwrap.wrap(f"{INTERVAL_WORDS} {KEPT_WORDS}", 100)]
        for result in self.evaluations:
            text = printable(f"{result.name}: {result.guarantee}")
            lines += ["", textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)]
        if rows := self.utility_rows():
            lines += ["", "PRIVATE, for the operator: the utility theorem (nats per token)."]
            lines += aligned([UTILITY_TITLES, *rows], (False, True, True, True))
            lines += ["", *textwrap.wrap(UTILITY_WORDS, 100)]
        sentences = [printable(sentence) for sentence in self.verdict()]
        return "\n".join([*lines, *([""] if sentences else []), *sentences])

    def verdict(self) -> list[str]:
        """Return which share of the gain without protection each mechanism keeps, at which ε."""
        kinds = ("fixed", "data-dependent, ex-post")
        methods = self.evaluations
        rated = [(m, m.kept) for m in methods if m.guarantee.kind in kinds and m.kept]
        if not rated:
            return []
        (best,) = (m for m in methods if m.name == rated[0][1]["of"])
        called = "the unprotected ensemble" if best.name == "unprotected" else f"'{best.name}'"
        if best.kept is None or best.kept["share"] is None:
            change = format_against(None, best.difference)
            why = f"on this text no gain of {called} over the public model is certain ({change})"
            if best.difference is not None and best.difference["low"] is None:
                why = f"that takes {BLOCK * LEAST_BLOCKS} scored tokens"
            return [f"No share of the gain is stated: {why}."]
        sentences = []
        for result, kept in rated:
            words = format_kept(kept)
            if (kept["share"] or 0.0) <= 0:  # no share: its perplexity is infinite
                words = f"nothing ({words})"
            private = "" if result.guarantee.kind == "fixed" else " (a private number)"
            sentences.append(
                f"{result.name} keeps {words} of what {called} gains, at ε = "
                f"{show_epsilon(result.guarantee.epsilon)}{private} for {covered(result)}."
            )
        return sentences


def environment() -> dict[str, object]:
    """Return the versions and hardware that the numbers depend on, without host names or paths."""
    import torch

    import adapmixed
    import adapmixed_ext

    return {
        "adapmixed": adapmixed.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: metadata.version(name) for name in ("transformers", "peft", "numpy")},
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "build": adapmixed_ext.build_info(),
    }


def _processor() -> str | None:
    """Return the processor's name if the system tells it, else None."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    match = re.search(r"^model name\s*:\s*(.*)$", facts, re.MULTILINE)
    return match[1] if match else None


def plain(value: object, where: str) -> Any:
    """Return the value in JSON's own types, with infinities as strings.

    Args:
        value: the value, possibly nested.
        where: its name in errors.

    Raises:
        ValueError: if JSON cannot hold the value, for instance NaN.
    """

    def read(constant: str) -> str:
        if constant == "NaN":
            raise ValueError(f"{where} must not hold NaN")
        return constant.replace("Infinity", "inf")

    def other(entry: Any) -> Any:  # what json does not write: mappings, numbers of numpy
        return entry.item() if isinstance(entry, np.generic) else dict(entry.items())

    try:
        text = json.dumps(value, ensure_ascii=False, default=other)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where} must hold JSON values alone: {error}") from error
    # Halves of surrogate pairs, as in undecodable file names, have no UTF-8 form.
    text = re.sub("[\ud800-\udfff]", lambda half: f"\\\\u{ord(half[0]):04x}", text)
    return json.loads(text, parse_constant=read)
