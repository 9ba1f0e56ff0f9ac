"""``adapmixed evaluate``: measure perplexity and privacy on a text.

Score every token of a text with the public model and with one or several mechanisms, and say which
share of the unprotected ensemble's gain each keeps. An evaluation reveals probabilities, so its
output is for the operator only.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from adapmixed.commands.options import (
    BASELINES,
    CHOOSING,
    SUCH_AS,
    MechanismOptions,
    SharedOptions,
    add_options,
    check_output,
    laboratory,
    load_ensemble,
    mechanism_of,
    option,
    progress_bar,
    random_source,
    take_plan,
)

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism
    from adapmixed.ranks import Ranks


@dataclass
class EvaluateOptions:
    """The options of this command alone."""

    text: Path = option("UTF-8 text file, or folder of *.txt files", required=True)
    json: Path | None = option("report as JSON")
    report: Path | None = option(
        "PRIVATE: the report as a page, with figures (needs the extra lab)", metavar="FOLDER"
    )
    queries: int | None = option("tokens to score (default: the whole text)")
    block: int | None = option("tokens of a block (default: 512, or the model's window)")
    stride: int | None = option("tokens between overlapping windows (default: no overlap)")
    result: Path | None = option(
        "PRIVATE: state of the evaluation, from which the same command goes on after a kill"
    )
    diagnostics: bool = option("PRIVATE: add the paper's utility theorem")
    seed: int | None = option("seed of the randomness (default: the system's)")


@dataclass
class SeveralMechanisms(MechanismOptions):
    """The options of one or several mechanisms and their guarantee."""

    mechanism: list[str] | None = option(  # type: ignore[assignment]
        f"may be repeated (default: adapmixed): {SUCH_AS}", metavar='"NAME KEY=VALUE ..."'
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, SharedOptions, "base ensemble")
    add_options(parser, EvaluateOptions)
    add_options(parser, SharedOptions, "memory active")
    add_options(parser, SeveralMechanisms, title="mechanism and guarantee")
    add_options(parser, SharedOptions, "device dtype")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print the table; among several processes only the main one writes."""
    take_plan(arguments)
    _mechanisms(arguments, queries=1)  # raises for bad options before the models are loaded
    from adapmixed.ranks import joined

    with joined(cuda=arguments.device == "cuda") as ranks:
        return _run(arguments, ranks)


def _run(arguments: argparse.Namespace, ranks: Ranks) -> int:
    if ranks.is_main:
        check_output("--result", arguments.result)
        check_output("--json", arguments.json)
        check_output("--report", arguments.report, folder=True)
    page = laboratory("figures.html") if arguments.report and ranks.is_main else None
    from adapmixed.evaluation import evaluate, plan_windows
    from adapmixed.evaluation.report import Report, environment
    from adapmixed.text import read_text, token_stream

    documents = read_text(arguments.text, name="--text")
    ensemble = load_ensemble(arguments, ranks)
    texts = [document.text for document in documents]
    tokens = token_stream(ensemble.tokenizer, texts, ensemble.vocab_size)
    cut = {name: getattr(arguments, name) for name in ("block", "queries", "stride")}
    windows = plan_windows(len(tokens), ensemble.longest_text, **cut)
    total = sum(window.queries for window in windows)
    mechanisms = _mechanisms(arguments, total)
    losses = validation_losses(Path(arguments.ensemble))  # raises before the models run
    names = "delta adjacency result diagnostics active"
    evaluations = evaluate(
        ensemble,
        tokens,
        mechanisms,
        **cut,
        **{name: getattr(arguments, name) for name in names.split()},
        rng=random_source(arguments.seed),
        epsilon={name: _epsilon(arguments, m.name) for name, m in mechanisms.items()},
        memory_bytes=arguments.memory,
        progress=progress_bar("token"),
    )
    if not ranks.is_main:
        return 0
    names = "delta adjacency epsilon block stride active device dtype"
    config: dict[str, object] = {
        "command": "evaluate",
        "base": str(arguments.base),
        "ensemble": str(arguments.ensemble),
        "num_models": ensemble.num_models,
        "ranks": ranks.world,
        "mechanisms": {name: repr(m) for name, m in mechanisms.items()},
        "randomness": "system" if arguments.seed is None else f"seeded ({arguments.seed})",
        "text": str(arguments.text),
        "queries": total,
        **{name: getattr(arguments, name) for name in names.split()},
    }
    report = Report(evaluations, config, environment(), validation=losses)
    print(f"{CHOOSING}\n\n{report.text()}")
    if arguments.seed is not None:
        # A seed repeats the evaluation, but not its speed.
        evaluations = [replace(evaluation, tokens_per_second=None) for evaluation in evaluations]
        report = replace(report, evaluations=evaluations)
    if arguments.json is not None:
        report.write(arguments.json)
    if page is not None:
        written = page.write_page(report, arguments.report, figures=True)
        print(f"wrote {written[1]}", file=sys.stderr)
    return 0


def _epsilon(arguments: argparse.Namespace, name: str) -> float | None:
    """Return the budget of every shard; None for the baselines, which take no budget."""
    return None if name in BASELINES else arguments.epsilon


def _mechanisms(arguments: argparse.Namespace, queries: int) -> dict[str, Mechanism]:
    """Return the mechanisms by label, after the public model and the unprotected ensemble.

    Args:
        arguments: the command's arguments.
        queries: tokens to score; fixed guarantees are planned for them unless --mechanism says
            otherwise.
    """
    from adapmixed.mechanisms import PublicOnly, Unprotected

    texts = arguments.mechanism or ["adapmixed"]
    texts = [texts] if isinstance(texts, str) else texts  # of a plan
    names = [text.split()[0] if text.split() else text for text in texts]
    mechanisms: dict[str, Mechanism] = {m.name: m for m in (PublicOnly(), Unprotected())}
    always = tuple(mechanisms)
    for text, name in zip(texts, names, strict=True):
        settings = {"delta": arguments.delta, "way": arguments.adjacency, "queries": queries}
        mechanism = mechanism_of(text, **settings, epsilon=_epsilon(arguments, name))
        label = name if names.count(name) == 1 else " ".join(shlex.split(text))
        if label in mechanisms and label not in always:
            raise ValueError(f"--mechanism must not be repeated, got {label!r} twice")
        mechanisms[label] = mechanism
    return mechanisms


def validation_losses(folder: Path) -> list[dict[str, object]]:
    """Return the losses on held-out text of the members that have any, for the operator.

    Each entry has "member", and in nats per held-out token "loss", the member's, and "public_loss",
    the public model's.

    Args:
        folder: the ensemble folder. Members that `adapmixed train` did not make are left out.

    Raises:
        ValueError: if a file of the ensemble or of a member has another format.
    """
    from adapmixed.ensemble.members import MEMBER_FILE, read_manifest, read_member_record

    entries: list[dict[str, object]] = []
    for member in read_manifest(folder).members:
        if member is not None and (folder / member / MEMBER_FILE).is_file():
            held_out = read_member_record(folder / member)["validation"]
            if held_out is not None:
                losses = {name: float(held_out[name]) for name in ("loss", "public_loss")}
                entries.append({"member": member, **losses})
    return entries
