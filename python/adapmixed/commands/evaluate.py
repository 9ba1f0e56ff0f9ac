"""``adapmixed evaluate``: measure perplexity and privacy of mechanisms on a text."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from adapmixed.commands.mechanisms import (
    CHOOSING,
    add_mechanism_options,
    check_charged,
    label_of,
    mechanism_of,
)
from adapmixed.commands.options import (
    add_active_option,
    check_output,
    memory_bytes,
    page_writer,
    progress_bar,
    quiet_libraries,
    random_source,
    write_private,
)
from adapmixed.commands.placing import add_placing_options, joined_ranks, load_ensemble
from adapmixed.commands.plan_file import take_plan

if TYPE_CHECKING:
    from adapmixed.evaluation import Runs
    from adapmixed.mechanisms import Mechanism
    from adapmixed.ranks import Ranks


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "evaluate",
        help="measure perplexity and privacy on a text",
        description="Score every token of a text with the public model and with one or several "
        "mechanisms, and say which share of the unprotected ensemble's gain each keeps. An "
        "evaluation reveals probabilities, so its output is for the operator only.",
    )
    parser.add_argument("--base", required=True, help="public model: folder or hub name")
    parser.add_argument("--ensemble", required=True, help="ensemble folder (ensemble.json)")
    parser.add_argument(
        "--text", required=True, type=Path, help="UTF-8 text file, or folder of *.txt files"
    )
    parser.add_argument("--json", type=Path, help="file to write the report to, as JSON")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="PRIVATE: folder for the report as a page, report.html, with report.json and figures "
        "(needs the extra lab)",
    )
    parser.add_argument(
        "--queries", type=int, help="tokens to score in every run (default: the whole text)"
    )
    parser.add_argument(
        "--block",
        type=int,
        help="tokens per block (default: 512, or the model's window if that is shorter)",
    )
    parser.add_argument(
        "--stride",
        type=int,
        help="tokens by which overlapping windows advance (default: blocks do not overlap)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="number of runs on disjoint parts of the text, shown as means (default: 1)",
    )
    parser.add_argument(
        "--result",
        type=Path,
        help="PRIVATE: file for the state of the evaluation, from which --resume continues",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the --result file, if it exists"
    )
    parser.add_argument(
        "--diagnostics",
        action="store_true",
        help="PRIVATE: add the utility theorem, and weights and privacy losses of single models "
        "over time",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="seed for repeatable randomness (default: the system's randomness)",
    )
    parser.add_argument(
        "--memory",
        type=memory_bytes,
        default=1 << 30,
        help="memory for logits, activations, keys and values, such as 512M or 5G (default: 1G)",
    )
    add_active_option(parser)
    add_mechanism_options(parser, several=True)
    add_placing_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print the table; among several processes only the main one writes."""
    take_plan(arguments, several=True)
    _check_accounts(arguments)
    with joined_ranks(arguments) as ranks:
        return _run(arguments, ranks)


def _run(arguments: argparse.Namespace, ranks: "Ranks") -> int:
    from adapmixed.evaluation.result_file import check_result

    if ranks.is_main or arguments.result is None:
        check_result(arguments.result, resume=arguments.resume)
    if ranks.is_main:
        check_output(arguments.json)
        check_output(arguments.report, folder=True, name="--report")
    write_page = page_writer() if arguments.report is not None and ranks.is_main else None
    quiet_libraries()
    from adapmixed.data.text import read_text
    from adapmixed.evaluation import plan_runs
    from adapmixed.report import build_report, environment, plain, report_json, report_text
    from adapmixed.report.runs import runs_entry
    from adapmixed.report.training import training_losses
    from adapmixed.training.blocks import token_stream

    documents = read_text(arguments.text, name="--text")
    ensemble = load_ensemble(arguments, ranks)
    if ensemble.tokenizer is None:
        raise ValueError(f"--base must have a tokenizer, {arguments.base} has none")
    texts = [document.text for document in documents]
    tokens = token_stream(ensemble.tokenizer, texts, ensemble.vocab_size)
    total = plan_runs(
        tokens,
        ensemble.longest_text,
        arguments.block,
        arguments.queries,
        runs=arguments.runs,
        stride=arguments.stride,
    )[1]
    asked = _mechanisms(arguments, total)
    about: Any = {
        "config": _config(arguments, asked, total, ensemble),
        "environment": environment(),
        "training": training_losses(Path(arguments.ensemble)),
    }
    about = plain(about, "about")  # raise before the models run if a file could not hold it
    update, close = progress_bar(total * arguments.runs, "token", shown=ranks.is_main)
    runs = _evaluated(arguments, ensemble, tokens, asked, about, update)
    close()
    if not ranks.is_main:
        return 0
    evaluations = [one.evaluations[0] for one in runs]
    report = build_report(evaluations, **about)
    if arguments.runs > 1:
        report["runs"] = runs_entry(runs)
    print(f"{CHOOSING}\n\n{report_text(report)}")
    if arguments.seed is not None:
        # A seed repeats the evaluation, but not its speed.
        methods = cast("list[dict[str, Any]]", report["methods"])
        report["methods"] = [one | {"tokens_per_second": None} for one in methods]
    if arguments.json is not None:
        write_private(arguments.json, report_json(report))
    if write_page is not None:
        print(f"wrote {write_page(report, arguments.report, figures=True)[1]}", file=sys.stderr)
    return 0


def _check_accounts(arguments: argparse.Namespace) -> None:
    """Raise for bad options before the models are loaded."""
    delta, way = arguments.delta, arguments.adjacency
    for one in _mechanisms(arguments, queries=1).values():
        check_charged(one, delta=delta, epsilon=_epsilon(arguments, one), way=way)


def _epsilon(arguments: argparse.Namespace, mechanism: "Mechanism") -> float | None:
    """Return the budget of every shard; None for the baselines, which take no budget."""
    from adapmixed.mechanisms import PublicOnly, Unprotected, UnprotectedPool

    baseline = isinstance(mechanism, PublicOnly | Unprotected | UnprotectedPool)
    return None if baseline else arguments.epsilon


def _mechanisms(arguments: argparse.Namespace, queries: int) -> "dict[str, Mechanism]":
    """Return the mechanisms by label, after the public model and the unprotected ensemble.

    Args:
        arguments: the command's arguments.
        queries: tokens of a run; fixed guarantees are planned for them unless --mechanism says
            otherwise.
    """
    from adapmixed.mechanisms import PublicOnly, Unprotected

    texts = arguments.mechanism or ["adapmixed"]
    names = [text.split()[0] if text.split() else text for text in texts]
    found: dict[str, Mechanism] = {one.name: one for one in (PublicOnly(), Unprotected())}
    always = tuple(found)
    for text, name in zip(texts, names, strict=True):
        one = mechanism_of(
            text,
            delta=arguments.delta,
            epsilon=arguments.epsilon,
            queries=queries,
            way=arguments.adjacency,
        )
        label = name if names.count(name) == 1 else label_of(text)
        if label in found and label not in always:
            raise ValueError(f"--mechanism must not be repeated, got {label!r} twice")
        found[label] = one
    return found


def _evaluated(
    arguments: argparse.Namespace,
    ensemble: Any,
    tokens: list[int],
    asked: "dict[str, Mechanism]",
    about: dict[str, object],
    progress: Any,
) -> "list[Runs]":
    from adapmixed.evaluation import evaluate_runs

    return evaluate_runs(
        ensemble,
        tokens,
        asked,
        runs=arguments.runs,
        delta=arguments.delta,
        rng=random_source(arguments.seed),
        block=arguments.block,
        stride=arguments.stride,
        queries=arguments.queries,
        epsilon={name: _epsilon(arguments, one) for name, one in asked.items()},
        adjacency=arguments.adjacency,
        memory_bytes=arguments.memory,
        progress=progress,
        result=arguments.result,
        resume=arguments.resume,
        about=about,
        diagnostics=arguments.diagnostics,
        active=arguments.active,
    )


def _config(
    arguments: argparse.Namespace, asked: "dict[str, Mechanism]", queries: int, ensemble: Any
) -> dict[str, object]:
    names = (
        "delta",
        "adjacency",
        "epsilon",
        "block",
        "stride",
        "runs",
        "active",
        "device",
        "dtype",
    )
    return {
        "command": "evaluate",
        "base": str(arguments.base),
        "ensemble": str(arguments.ensemble),
        "num_models": ensemble.num_models,
        "ranks": ensemble.ranks.world,
        "mechanisms": {name: repr(one) for name, one in asked.items()},
        "randomness": "system" if arguments.seed is None else f"seeded ({arguments.seed})",
        "text": str(arguments.text),
        "queries": queries,
        **{name: getattr(arguments, name) for name in names},
    }
