"""The operator's report of an evaluation: report.json, and tables with a verdict for a terminal."""

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
from functools import cached_property
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from adapmixed.ensemble.members import MEMBER_FILE, read_manifest, read_member_record
from adapmixed.ensemble.public_model import FILE_NAME
from adapmixed.evaluation import Evaluation, compared
from adapmixed.evaluation.result import BLOCK, LEAST_BLOCKS
from adapmixed.files import write_file
from adapmixed.privacy.guarantee import format_epsilon

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
FORMAT_VERSION = 3

UTILITY_TITLES = ("method", "gap", "mean bound", "bound")
UTILITY_WORDS = (
    "In nats per token. Gap: the method’s mean negative log-likelihood minus that of the "
    "unprotected ensemble, on the same queries. Bound: the largest (1 − λ) log(p_j/p_0) over all "
    "queries and models, which bounds the gap by the paper’s utility theorem. Mean bound: the mean "
    "over queries of each query’s largest term, which bounds the gap, too. These numbers depend on "
    "the private data and are for the operator only."
)


def row(one: Evaluation) -> list[str]:
    """Return the cells of a result, in the order of `TITLES`; means if there are several runs."""
    epsilon, deviation = show_epsilon(one.epsilon_mean), one.epsilon_deviation
    return [
        one.name,
        format_perplexity(one.perplexity_mean),
        format_against(one.change, one.difference),
        format_kept(one.kept),
        epsilon if deviation is None else f"{epsilon} ± {deviation:.2g}",
        covered(one),
        format_promise(one),
    ]


def show_epsilon(epsilon: float | None) -> str:
    """Return ε as the guarantee writes it, or `MISSING`."""
    return MISSING if epsilon is None else format_epsilon(epsilon)


def format_neighbours(adjacency: str | None) -> str:
    """Return the adjacency of ε, or `MISSING` if nothing private was used or protected."""
    return MISSING if adjacency is None else NEIGHBOUR_LABELS.get(adjacency, adjacency)


def format_promise(one: Evaluation) -> str:
    """Return the kind and the adjacency of an ε."""
    kind, adjacency = one.guarantee.kind, one.guarantee.adjacency
    words = KIND_LABELS.get(kind, kind)
    return words if adjacency is None else f"{words}, {format_neighbours(adjacency)}"


def covered(one: Evaluation) -> str:
    """Return the tokens that ε covers in each run, or `MISSING` without an ε."""
    if one.guarantee.kind in ("public", "none"):
        return MISSING
    if one.guarantee.method == "per-shard budget":
        return "any number of tokens"
    return f"{one.guarantee.budget or one.queries:,} tokens"


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
        evaluations: with distinct names.
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

    @cached_property
    def methods(self) -> list[Evaluation]:
        """The results of the first run, compared with each other."""
        return compared([replace(one, further=()) for one in self.evaluations])

    @cached_property
    def runs(self) -> list[Evaluation]:
        """The results of several runs, compared with each other; empty if there is one run."""
        return compared(self.evaluations) if self.evaluations[0].further else []

    def to_json(self) -> dict[str, Any]:
        """Return the content of report.json, in strict JSON values with infinities as "inf".

        Raises:
            ValueError: if a value is NaN or none that JSON can hold.
        """
        content = {
            "format_version": FORMAT_VERSION,
            "methods": [one.to_json() for one in self.methods],
            "sample": self.sample,
            "environment": self.environment,
            "config": self.config,
        }
        content |= {"validation": self.validation} if self.validation else {}
        content |= {"runs": [one.runs_to_json() for one in self.runs]} if self.runs else {}
        strict: dict[str, Any] = plain(content, "report")
        return strict

    def json_text(self) -> str:
        """Return the text of report.json."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, folder: Path | str) -> Path:
        """Write report.json in one step into a folder, which is made if needed; return its path."""
        path, text = Path(folder) / "report.json", self.json_text()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode("utf-8"))
        return path

    def words(self) -> str:
        """Return what the numbers are of: base, text, models and tokens, as far as known."""
        names = [self.config.get(name) for name in ("base", "text")]
        where = " on ".join(PurePath(name).name for name in names if isinstance(name, str))
        count, runs = self.config.get("num_models"), len(self.evaluations[0].runs)
        facts = [f"{count} models"] if count else []
        tokens = f"{self.methods[0].queries:,} scored tokens"
        facts.append(f"{runs} runs of " * (runs != 1) + tokens)
        return f"{where}: {', '.join(facts)}".removeprefix(": ")

    def runs_words(self) -> str:
        """Return the sentences that explain the table of several runs."""
        count, queries = len(self.runs[0].runs), self.runs[0].queries
        return (
            f"Means of {count} runs of {queries} queries, and ε ± its standard deviation (n − 1). "
            "Every ε covers one run alone; it does not cover all runs together, whose costs add "
            f"up. {INTERVAL_WORDS} {KEPT_WORDS}"
        )

    def utility_rows(self) -> list[list[str]]:
        """Return the cells under `UTILITY_TITLES` of the methods that have such numbers."""
        found = []
        for one in self.methods:
            if one.diagnosis is not None and (utility := one.diagnosis.utility) is not None:
                values = (utility[key] for key in ("gap", "mean_bound", "bound"))
                cells = [MISSING if value is None else f"{value:.4g}" for value in values]
                found.append([one.name, *cells])
        return found

    def text(self) -> str:
        """Return what was run, the tables and, at the end, the verdict on every mechanism."""
        shown, words, which = self.methods, f"{INTERVAL_WORDS} {KEPT_WORDS}", ""
        if self.runs:
            shown, words, which = self.runs, self.runs_words(), ", run 1"
        lines = [printable(self.words()), "", *aligned([TITLES, *map(row, shown)], NUMBERS)]
        if which or any(one.difference and one.difference["low"] is not None for one in shown):
            lines += ["", *textwrap.wrap(words, 100)]
        for one in shown:
            said = printable(f"{one.name}{which}: {one.guarantee}")
            lines += ["", textwrap.fill(said, 100, subsequent_indent="  ", break_on_hyphens=False)]
        if rows := self.utility_rows():
            lines += ["", "PRIVATE, for the operator: the utility theorem (nats per token)."]
            lines += aligned([UTILITY_TITLES, *rows], (False, True, True, True))
            lines += ["", *textwrap.wrap(UTILITY_WORDS, 100)]
        sentences = [printable(one) for one in self.verdict()]
        return "\n".join([*lines, *([""] if sentences else []), *sentences])

    def verdict(self) -> list[str]:
        """Return which share of the gain without protection each mechanism keeps, at which ε."""
        methods, kinds = self.runs or self.methods, ("fixed", "data-dependent, ex-post")
        rated = [(one, one.kept) for one in methods if one.guarantee.kind in kinds and one.kept]
        if not rated:
            return []
        (best,) = (one for one in methods if one.name == rated[0][1]["of"])
        called = "the unprotected ensemble" if best.name == "unprotected" else f"'{best.name}'"
        if best.kept is None or best.kept["share"] is None:
            change = format_against(None, best.difference)
            why = f"on this text no gain of {called} over the public model is certain ({change})"
            if best.difference is not None and best.difference["low"] is None:
                why = f"that takes {BLOCK * LEAST_BLOCKS} scored tokens"
            return [f"No share of the gain is stated: {why}."]
        sentences = []
        for one, kept in rated:
            words = format_kept(kept)
            if (kept["share"] or 0.0) <= 0:  # no share: its perplexity is infinite
                words = f"nothing ({words})"
            private = "" if one.guarantee.kind == "fixed" else " (a private number)"
            sentences.append(
                f"{one.name} keeps {words} of what {called} gains, at ε = "
                f"{show_epsilon(one.epsilon_mean)}{private} for {covered(one)}."
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
    found = re.search(r"^model name\s*:\s*(.*)$", facts, re.MULTILINE)
    return found[1] if found else None


def validation_losses(folder: Path) -> list[dict[str, object]]:
    """Return the losses on held-out text of the members that have any, for the operator.

    Each entry has "member", and in nats per held-out token "loss", the member's, and "public_loss",
    the public model's.

    Args:
        folder: the ensemble folder. The result is empty if `adapmixed train` did not make it.

    Raises:
        ValueError: if a file of the ensemble or of a member has another format.
    """
    found: list[dict[str, object]] = []
    if (folder / FILE_NAME).is_file():
        for member in read_manifest(folder).members:
            if member is not None and (folder / member / MEMBER_FILE).is_file():
                held_out = read_member_record(folder / member)["validation"]
                if held_out is not None:
                    losses = {name: float(held_out[name]) for name in ("loss", "public_loss")}
                    found.append({"member": member, **losses})
    return found


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

    def other(one: Any) -> Any:  # what json does not write: mappings, numbers of numpy
        return one.item() if isinstance(one, np.generic) else dict(one.items())

    try:
        text = json.dumps(value, ensure_ascii=False, default=other)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where} must hold JSON values alone: {error}") from error
    # Halves of surrogate pairs, as in undecodable file names, have no UTF-8 form.
    text = re.sub("[\ud800-\udfff]", lambda half: f"\\\\u{ord(half[0]):04x}", text)
    return json.loads(text, parse_constant=read)
