"""``adapmixed plan``: what a privacy budget buys, before anything is trained or answered."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import ADJACENCIES, check_output

if TYPE_CHECKING:
    from adapmixed.privacy.planner import Plan

_NEIGHBOURS = {
    "zero_out": "one shard is emptied, its slot answers the public distribution",
    "add_remove": "the ensemble lacks one shard's model",
    "replace_one": "any change of the records in one shard",
}


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "plan",
        help="the settings that a privacy budget buys",
        description="Lists, for every mechanism with a guarantee fixed beforehand, the widest "
        "settings within (epsilon, delta), and what fewer queries would cost. Public numbers only.",
    )
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--models", type=int, required=True, help="shards, one model each")
    parser.add_argument("--queries", type=int, required=True, help="answers (tokens) in all")
    parser.add_argument("--adjacency", choices=ADJACENCIES, default="zero_out")
    parser.add_argument("--json", type=Path, help="write the plans there as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plans and prints the table."""
    check_output(arguments.json)
    from adapmixed.privacy.guarantee import format_epsilon
    from adapmixed.privacy.planner import plan

    plans = plan(
        arguments.epsilon,
        arguments.delta,
        arguments.models,
        arguments.queries,
        arguments.adjacency,
    )
    print(
        f"Within ε = {arguments.epsilon:g} at δ = {arguments.delta:g} for {arguments.queries} "
        f"queries to {arguments.models} models;\n"
        f"neighbouring ({arguments.adjacency}): {_NEIGHBOURS[arguments.adjacency]}.\n"
    )
    counts = [count for count, _ in plans[0].over_time]
    header = ["mechanism", "settings", *(f"ε({count})" for count in counts)]
    rows = [
        [one.mechanism, _settings(one), *(format_epsilon(cost) for _, cost in one.over_time)]
        for one in plans
    ]
    print(_table([header, *rows]))
    print(
        "\nclipped-mixing: lower and upper bound p_i/q; clipped-log-pool: log p_i/q, times scale."
        "\nWider is closer to the private models; perplexity on public text tells which is best."
    )
    for one in plans:
        if one.note:
            print(f"{one.mechanism}: {one.note}.")
    if all(one.mechanism != "pmixed" for one in plans):
        print("pmixed: no fixed guarantee of this kind within the budget.")
    if arguments.json is not None:
        entries = [_entry(one) for one in plans]
        text = json.dumps(entries, indent=2, ensure_ascii=False, allow_nan=False)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _settings(one: "Plan") -> str:
    names = {"target_leakage": "beta"}
    return " ".join(f"{names.get(name, name)}={value:.4g}" for name, value in one.settings.items())


def _entry(one: "Plan") -> dict[str, object]:
    return {
        "mechanism": one.mechanism,
        "settings": dict(one.settings),
        "epsilon": one.epsilon,
        "delta": one.delta,
        "num_models": one.num_models,
        "queries": one.queries,
        "adjacency": one.adjacency,
        "over_time": [{"queries": count, "epsilon": cost} for count, cost in one.over_time],
        "note": one.note,
    }


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        left = [text.ljust(width) for text, width in zip(row[:2], widths[:2], strict=True)]
        right = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)
