"""``adapmixed evaluate``: perplexity and privacy of one or several mechanisms over a text."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from adapmixed.commands.filters import (
    add_filter_options,
    count_lines,
    model_filter_of,
    release_counts,
    show_spent,
)
from adapmixed.commands.methods import Choice, add_method_option, choices_of
from adapmixed.commands.options import (
    add_mechanism_options,
    check_output,
    mechanism_of,
    memory_bytes,
    progress_bar,
    quiet_libraries,
    random_source,
)
from adapmixed.commands.placing import add_placing_options, joined_ranks, load_ensemble

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapmixed.evaluation import Runs
    from adapmixed.mechanisms import Mechanism
    from adapmixed.privacy import PerModelFilter
    from adapmixed.ranks import Ranks


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "evaluate",
        help="perplexity and privacy over a text",
        description="Scores every token of a text with the public model and with one mechanism, or "
        "several side by side (docs/evaluation.md). "
        "Evaluation reveals probabilities: its output is for the operator.",
    )
    parser.add_argument("--base", required=True, help="public model: folder or hub name")
    parser.add_argument("--ensemble", required=True, help="ensemble folder (ensemble.json)")
    parser.add_argument("--text", required=True, type=Path, help="UTF-8 text file or folder")
    parser.add_argument("--json", type=Path, help="write the report there as JSON")
    parser.add_argument("--out", type=Path, help="write report.json and report.html there")
    parser.add_argument("--queries", type=int, help="stop after this many tokens, in every run")
    parser.add_argument("--block", type=int, help="tokens per block (512, or the model's window)")
    parser.add_argument(
        "--stride", type=int, help="windows slide by this many tokens (blocks do not overlap)"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="over disjoint stretches of the text: mean ± deviation",
    )
    parser.add_argument(
        "--result", type=Path, help="PRIVATE: keep the state there, to go on from after a kill"
    )
    parser.add_argument("--resume", action="store_true", help="go on from --result, if it is there")
    parser.add_argument(
        "--diagnostics",
        action="store_true",
        help="PRIVATE: the utility theorem, weights, losses of single models over time",
    )
    parser.add_argument("--seed", type=int, help="repeatable randomness (evaluation only)")
    parser.add_argument(
        "--memory",
        type=memory_bytes,
        default=1 << 30,
        help="of logits, activations, keys and values, e.g. 512M or 5G (1G)",
    )
    add_mechanism_options(parser)
    add_method_option(parser)
    add_filter_options(parser)
    add_placing_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluates and prints the table; of several ranks one prints and writes."""
    choices = choices_of(arguments)  # refuses bad options before the models are loaded
    _check_combination(arguments)
    with joined_ranks(arguments) as ranks:
        return _run(arguments, choices, ranks)


def _run(arguments: argparse.Namespace, choices: "Sequence[Choice]", ranks: "Ranks") -> int:
    if ranks.leads:
        _check_result(arguments)
        check_output(arguments.json)
        check_output(arguments.out, folder=True)
    quiet_libraries()
    from adapmixed.data.text import read_text
    from adapmixed.evaluation import plan_runs
    from adapmixed.report import build_report, environment, plain, report_text, write_report
    from adapmixed.report.runs import runs_entry
    from adapmixed.report.training import training_losses
    from adapmixed.training.blocks import token_stream

    documents = read_text(arguments.text)
    ensemble = load_ensemble(arguments, ranks)
    if ensemble.tokenizer is None:
        raise ValueError(f"--base must have a tokenizer, {arguments.base} has none")
    tokens = token_stream(ensemble.tokenizer, [document.text for document in documents])
    total = plan_runs(
        tokens,
        ensemble.max_positions,
        arguments.block,
        arguments.queries,
        runs=arguments.runs,
        stride=arguments.stride,
    )[1]
    asked = Asked.of(choices, total, ensemble.num_models)
    about: Any = {
        "config": _config(arguments, asked, total, ensemble),
        "environment": environment(),
        "training": training_losses(Path(arguments.ensemble)),
    }
    about = plain(about, "about")  # what no file could hold is refused before the models run
    update, close = progress_bar(total * arguments.runs, "token", shown=ranks.leads)
    runs = _evaluated(arguments, ensemble, tokens, asked, about, update)
    close()
    if not ranks.leads:
        return 0
    evaluations = [one.evaluations[0] for one in runs]
    report = build_report(evaluations, **about)
    if arguments.runs > 1:
        report["runs"] = runs_entry(runs)
    print(report_text(report))
    if arguments.runs == 1:
        for name, model_filter in asked.filters.items():
            _release(name, model_filter, arguments, report)
    if arguments.out is not None:
        for path in write_report(report, arguments.out):
            print(f"wrote {path}")
    if arguments.json is not None:
        if arguments.seed is not None:
            # What a seed repeats is the evaluation, not its speed.
            methods = cast("list[dict[str, Any]]", report["methods"])
            report["methods"] = [one | {"tokens_per_second": None} for one in methods]
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _check_combination(arguments: argparse.Namespace) -> None:
    """Refuses what does not go together."""
    path = arguments.result
    if path is None and arguments.resume:
        raise ValueError("--resume needs --result, the file to go on from")
    if arguments.release_counts is not None and (path is not None or arguments.runs != 1):
        raise ValueError(
            f"--release-counts cannot be used with --result or --runs, got "
            f"{arguments.release_counts}: counts that were released once could be released again"
        )
    if arguments.operator and arguments.runs != 1:
        raise ValueError("--operator cannot be used with --runs: every run has filters of its own")


def _check_result(arguments: argparse.Namespace) -> None:
    path = arguments.result
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--result must name a file in an existing folder, got {path}")
    if path.exists() and not arguments.resume:
        raise ValueError(f"--result must name a new file without --resume, got {path}")


@dataclass(frozen=True)
class Asked:
    """The methods of an evaluation by label, the public model first."""

    mechanisms: "dict[str, Mechanism]"
    rules: dict[str, str]
    adjacencies: dict[str, str | None]
    filters: "dict[str, PerModelFilter]"

    @classmethod
    def of(cls, choices: "Sequence[Choice]", queries: int, num_models: int) -> "Asked":
        """For that many queries of a run, which budgets are for unless they are given."""
        from adapmixed.mechanisms import PublicOnly

        asked = cls({"public": PublicOnly()}, {}, {}, {})
        for one in choices:
            asked.mechanisms[one.label] = mechanism_of(one.arguments, queries)
            asked.rules[one.label] = one.arguments.rule
            asked.adjacencies[one.label] = one.arguments.adjacency
            model_filter = model_filter_of(one.budget, num_models)
            if model_filter is not None:
                asked.filters[one.label] = model_filter
        return asked


def _evaluated(
    arguments: argparse.Namespace,
    ensemble: Any,
    tokens: list[int],
    asked: Asked,
    about: dict[str, object],
    progress: Any,
) -> "list[Runs]":
    from adapmixed.evaluation import Runs, evaluate, evaluate_runs

    settings = dict(
        delta=arguments.delta,
        rng=random_source(arguments.seed),
        block=arguments.block,
        stride=arguments.stride,
        queries=arguments.queries,
        rule=asked.rules,
        adjacency=asked.adjacencies,
        model_filters=asked.filters,
        memory_bytes=arguments.memory,
        progress=progress,
        result=arguments.result,
        resume=arguments.resume,
        about=about,
        diagnostics=arguments.diagnostics,
    )
    if arguments.runs > 1:
        return evaluate_runs(ensemble, tokens, asked.mechanisms, runs=arguments.runs, **settings)
    # One run uses the filters themselves, which then say what was spent.
    found = evaluate(ensemble, tokens, asked.mechanisms, **settings)
    return [Runs(one.name, (one,)) for one in found]


def _config(
    arguments: argparse.Namespace, asked: Asked, queries: int, ensemble: Any
) -> dict[str, object]:
    names = (
        "preset",
        "delta",
        "rule",
        "adjacency",
        "filter_epsilon",
        "block",
        "stride",
        "runs",
        "device",
        "dtype",
    )
    return {
        "command": "evaluate",
        "base": str(arguments.base),
        "ensemble": str(arguments.ensemble),
        "num_models": ensemble.num_models,
        "ranks": ensemble.ranks.world,
        "mechanisms": {name: repr(one) for name, one in asked.mechanisms.items()},
        "filters": list(asked.filters),
        "randomness": "system" if arguments.seed is None else f"seeded ({arguments.seed})",
        "text": str(arguments.text),
        "queries": queries,
        **{name: getattr(arguments, name) for name in names},
    }


def _release(
    name: str,
    model_filter: "PerModelFilter",
    arguments: argparse.Namespace,
    report: dict[str, object],
) -> None:
    """Prints the counts of a filter, and for the operator what its models have spent."""
    counts = list(release_counts(model_filter))
    if counts:
        report["released_counts"] = counts
    for line in count_lines(counts, model_filter.budget.sigma):
        print(line)
    if arguments.operator:
        show_spent(model_filter)
