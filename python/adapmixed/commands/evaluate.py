"""``adapmixed evaluate``: perplexity and privacy of one mechanism over a text."""

import argparse
import json
from pathlib import Path
from typing import Any

from adapmixed.commands.options import (
    add_mechanism_options,
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


def run(arguments: argparse.Namespace) -> int:
    """Evaluates and prints the table."""
    mechanism = mechanism_of(arguments)
    quiet_libraries()
    from adapmixed.data.builtin import read_text
    from adapmixed.evaluation import evaluate
    from adapmixed.mechanisms import Mechanism, PublicOnly
    from adapmixed.models import Ensemble
    from adapmixed.report import build_report, environment, table, write_report
    from adapmixed.training.finetune import token_stream

    documents = read_text(arguments.text)
    ensemble = Ensemble.load(arguments.base, arguments.ensemble)
    if ensemble.tokenizer is None:
        raise ValueError(f"--base must have a tokenizer, {arguments.base} has none")
    tokens = token_stream(ensemble.tokenizer, [document.text for document in documents])
    mechanisms: dict[str, Mechanism] = {"public": PublicOnly()}
    mechanisms[mechanism.name] = mechanism
    update, close = progress_bar(len(tokens), "token")
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
            "block": arguments.block,
            "rule": arguments.rule,
        },
        environment=environment(),
    )
    print(table(report))
    if arguments.json is not None:
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if arguments.out is not None:
        for path in write_report(report, arguments.out):
            print(f"wrote {path}")
    return 0
