"""``adapmixed evaluate``: perplexity and privacy of one mechanism over a text."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.filters import (
    add_filter_options,
    count_lines,
    filter_budget_of,
    model_filter_of,
    release_counts,
    show_spent,
)
from adapmixed.commands.options import (
    add_mechanism_options,
    add_rank_option,
    check_output,
    mechanism_of,
    memory_bytes,
    progress_bar,
    quiet_libraries,
    random_source,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapmixed.evaluation import Evaluation
    from adapmixed.ranks import Ranks


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "evaluate",
        help="perplexity and privacy over a text",
        description="Scores every token of a text with one mechanism and with the public model. "
        "Evaluation reveals probabilities: its output is for the operator.",
    )
    parser.add_argument("--base", required=True, help="public model: folder or hub name")
    parser.add_argument("--ensemble", required=True, help="ensemble folder (ensemble.json)")
    parser.add_argument("--text", required=True, type=Path, help="UTF-8 text file or folder")
    parser.add_argument("--json", type=Path, help="write the report there as JSON")
    parser.add_argument("--out", type=Path, help="write report.json and report.html there")
    parser.add_argument("--queries", type=int, help="stop after this many tokens")
    parser.add_argument("--block", type=int, help="tokens per block (512, or the model's window)")
    parser.add_argument("--seed", type=int, help="repeatable randomness (evaluation only)")
    parser.add_argument("--memory", type=memory_bytes, default=1 << 30, help="e.g. 512M or 2G")
    add_mechanism_options(parser)
    add_filter_options(parser)
    add_rank_option(parser)
    parser.set_defaults(run=run)


def methods_of(report: dict[str, object]) -> list[dict[str, Any]]:
    """A report's list of methods."""
    methods = report["methods"]
    assert isinstance(methods, list)
    return methods


def over_time(evaluations: "Sequence[Evaluation]", rows: int = 8) -> list[str]:
    """Perplexity of each stretch of the text: a filter's models retire as it goes on."""
    stretches = [_stretches(evaluation.perplexities, rows) for evaluation in evaluations]
    widths = [max(len(e.name), 10) for e in evaluations]
    names = (e.name.rjust(width) for e, width in zip(evaluations, widths, strict=True))
    lines = ["  ".join(["perplexity of queries".ljust(22), *names])]
    for row in zip(*stretches, strict=True):
        first, last, _ = row[0]
        cells = (f"{value:.2f}".rjust(w) for (_, _, value), w in zip(row, widths, strict=True))
        lines.append("  ".join([f"{first} to {last}".rjust(22), *cells]))
    return lines


def _stretches(
    perplexities: "Sequence[tuple[int, float]]", rows: int
) -> list[tuple[int, int, float]]:
    """(first query, last query, perplexity between) of about `rows` stretches."""
    count = min(rows, len(perplexities))
    chosen = [perplexities[(row + 1) * len(perplexities) // count - 1] for row in range(count)]
    found, before, loss_before = [], 0, 0.0
    for queries, perplexity in chosen:
        loss = queries * math.log(perplexity)
        mean = (loss - loss_before) / (queries - before) if math.isfinite(loss) else math.inf
        found.append((before + 1, queries, math.exp(mean) if mean < 700.0 else math.inf))
        before, loss_before = queries, loss
    return found


def run(arguments: argparse.Namespace) -> int:
    """Evaluates and prints the table; of several ranks one prints and writes."""
    from adapmixed.ranks import joined

    with joined(timeout_seconds=arguments.rank_timeout) as ranks:
        return _run(arguments, ranks)


def _run(arguments: argparse.Namespace, ranks: "Ranks") -> int:
    budget = filter_budget_of(arguments)
    mechanism_of(arguments, queries=1)  # refuses bad options before the models are loaded
    if ranks.leads:
        check_output(arguments.json)
        check_output(arguments.out, folder=True)
    quiet_libraries()
    from adapmixed.data.text import read_text
    from adapmixed.evaluation import evaluate, plan
    from adapmixed.mechanisms import Mechanism, PublicOnly
    from adapmixed.models import Ensemble
    from adapmixed.report import build_report, environment, table, write_report
    from adapmixed.training.finetune import token_stream

    documents = read_text(arguments.text)
    ensemble = Ensemble.load(arguments.base, arguments.ensemble, ranks=ranks)
    if ensemble.tokenizer is None:
        raise ValueError(f"--base must have a tokenizer, {arguments.base} has none")
    tokens = token_stream(ensemble.tokenizer, [document.text for document in documents])
    _, total = plan(tokens, ensemble.max_positions, arguments.block, arguments.queries)
    mechanism = mechanism_of(arguments, total)
    mechanisms: dict[str, Mechanism] = {"public": PublicOnly()}
    mechanisms[mechanism.name] = mechanism
    model_filter = model_filter_of(arguments, budget, ensemble.num_models)
    update, close = progress_bar(total, "token", shown=ranks.leads)
    evaluations = evaluate(
        ensemble,
        tokens,
        mechanisms,
        delta=arguments.delta,
        rng=random_source(arguments.seed),
        block=arguments.block,
        queries=arguments.queries,
        rule=arguments.rule,
        adjacency=arguments.adjacency,
        model_filters={} if model_filter is None else {mechanism.name: model_filter},
        memory_bytes=arguments.memory,
        progress=update,
    )
    close()
    if not ranks.leads:
        return 0
    report = build_report(
        evaluations,
        config={
            "command": "evaluate",
            "base": str(arguments.base),
            "ensemble": str(arguments.ensemble),
            "num_models": ensemble.num_models,
            "ranks": ranks.world,
            "mechanism": repr(mechanism),
            "randomness": "system" if arguments.seed is None else f"seeded ({arguments.seed})",
            "text": str(arguments.text),
            "queries": total,
            "block": arguments.block,
            "preset": arguments.preset,
            "delta": arguments.delta,
            "rule": arguments.rule,
            "adjacency": arguments.adjacency,
            "filter_epsilon": arguments.filter_epsilon,
        },
        environment=environment(),
    )
    print(table(report))
    if model_filter is not None:
        print("\n".join(["", *over_time(evaluations)]))
        report["released_counts"] = counts = release_counts(model_filter)
        for line in count_lines(counts, model_filter.sigma):
            print(line)
        if arguments.operator:
            show_spent(model_filter)
    if arguments.out is not None:
        for path in write_report(report, arguments.out):
            print(f"wrote {path}")
    if arguments.json is not None:
        if arguments.seed is not None:
            # What a seed repeats is the evaluation, not its speed.
            report["methods"] = [m | {"tokens_per_second": None} for m in methods_of(report)]
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0
