"""``adapmixed evaluate``: perplexity and privacy of one mechanism over a text."""

import argparse
import json
from pathlib import Path
from typing import Any

from adapmixed.commands.options import (
    add_mechanism_options,
    check_output,
    mechanism_of,
    memory_bytes,
    progress_bar,
    quiet_libraries,
    random_source,
)


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
    parser.set_defaults(run=run)


def methods_of(report: dict[str, object]) -> list[dict[str, Any]]:
    """A report's list of methods."""
    methods = report["methods"]
    assert isinstance(methods, list)
    return methods


def run(arguments: argparse.Namespace) -> int:
    """Evaluates and prints the table."""
    mechanism_of(arguments, queries=1)  # refuses bad options before the models are loaded
    check_output(arguments.json)
    check_output(arguments.out, folder=True)
    quiet_libraries()
    from adapmixed.data.builtin import read_text
    from adapmixed.evaluation import evaluate, plan
    from adapmixed.mechanisms import Mechanism, PublicOnly
    from adapmixed.models import Ensemble
    from adapmixed.report import build_report, environment, table, write_report
    from adapmixed.training.finetune import token_stream

    documents = read_text(arguments.text)
    ensemble = Ensemble.load(arguments.base, arguments.ensemble)
    if ensemble.tokenizer is None:
        raise ValueError(f"--base must have a tokenizer, {arguments.base} has none")
    tokens = token_stream(ensemble.tokenizer, [document.text for document in documents])
    _, total = plan(tokens, ensemble.max_positions, arguments.block, arguments.queries)
    mechanism = mechanism_of(arguments, total)
    mechanisms: dict[str, Mechanism] = {"public": PublicOnly()}
    mechanisms[mechanism.name] = mechanism
    update, close = progress_bar(total, "token")
    evaluations = evaluate(
        ensemble,
        tokens,
        mechanisms,
        delta=arguments.delta,
        rng=random_source(arguments.seed),
        block=arguments.block,
        queries=arguments.queries,
        rule=arguments.rule,
        memory_bytes=arguments.memory,
        progress=update,
    )
    close()
    report = build_report(
        evaluations,
        config={
            "command": "evaluate",
            "base": str(arguments.base),
            "ensemble": str(arguments.ensemble),
            "num_models": ensemble.num_models,
            "mechanism": repr(mechanism),
            "randomness": "system" if arguments.seed is None else f"seeded ({arguments.seed})",
            "text": str(arguments.text),
            "queries": total,
            "block": arguments.block,
            "preset": arguments.preset,
            "delta": arguments.delta,
            "rule": arguments.rule,
        },
        environment=environment(),
    )
    print(table(report))
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
