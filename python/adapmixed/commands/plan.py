"""``adapmixed plan``: recommend a mechanism for a privacy budget.

Recommend one mechanism with its settings, by a public rule, for a number of tokens within (epsilon,
delta). Without --ensemble and --models, show what several numbers of shards allow. Only public
numbers are used.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapmixed.commands.options import (
    CHOOSING,
    PLAN_VERSION,
    add_options,
    check_output,
    columns,
    option,
)
from adapmixed.files import write_file
from adapmixed.limits import QUESTIONS, check_optional_queries
from adapmixed.privacy import planner
from adapmixed.privacy.guarantee import Guarantee, format_epsilon, weak_warnings
from adapmixed.privacy.planner import Plan

_REPLY = 100  # tokens
_MEASURED = "SmolLM2-135M, 3500 change logs"
_RULES = {
    "clipped-mixing": "the widest box of shape log upper = {shape:g} |log lower|",
    "clipped-log-pool": "the widest clip from 0 at scale = {scale:g}",
}


@dataclass
class PlanOptions:
    """The options of this command."""

    ensemble: Path | None = option("which gives --models", metavar="FOLDER")
    models: int | None = option("shards, with one model each")
    epsilon: float | None = option("epsilon of the guarantee")
    delta: float = option("delta of the guarantee (default: 1e-5)", 1e-5)
    tokens: int | None = option("answered tokens")
    adjacency: str = option(
        "a shard is emptied, or its records change", "zero_out", choices=QUESTIONS
    )
    mechanism: str | None = option("to recommend (default: clipped-mixing)", choices=tuple(_RULES))
    all: bool = option("list other settings, too")
    save: Path | None = option("PRIVATE: the recommended plan, for --plan of other commands")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, PlanOptions)


def run(arguments: argparse.Namespace) -> int:
    """Recommend a plan, or print what several numbers of shards allow."""
    check_optional_queries(arguments.tokens, "--tokens")
    arguments.unit = "shard"
    if arguments.ensemble is not None:
        from adapmixed.ensemble.members import read_manifest

        if arguments.models is not None:
            raise ValueError(f"--models must not be given with --ensemble, got {arguments.models}")
        manifest = read_manifest(arguments.ensemble)
        arguments.models, unit = len(manifest.members), manifest.unit
        arguments.unit = "shard" if unit is None else repr(unit)
    if arguments.epsilon is None or arguments.tokens is None:
        raise ValueError("--epsilon and --tokens must be given, got one of them or neither")
    names = [name for name in ("save", "mechanism", "all") if getattr(arguments, name)]
    if names and arguments.models is None:
        raise ValueError(f"--{names[0]} needs --ensemble or --models")
    check_output("--save", arguments.save)
    if arguments.save is not None and arguments.ensemble is None:
        raise ValueError("--save needs --ensemble: a saved plan is of its present members")
    epsilon = _shards(arguments) if arguments.models is None else _recommended(arguments)
    for warning in weak_warnings(epsilon, arguments.delta):
        print(warning)
    return 0


def _question(arguments: argparse.Namespace, models: int) -> tuple[float, float, int, int, str]:
    """Return the first arguments of `planner.plan`."""
    epsilon, delta, queries = arguments.epsilon, arguments.delta, arguments.tokens
    return epsilon, delta, models, queries, arguments.adjacency


def _say_question(arguments: argparse.Namespace, whom: str = "") -> None:
    guarantee = Guarantee(0.0, arguments.delta, "fixed", arguments.adjacency, unit=arguments.unit)
    print(
        f"Within ε = {format_epsilon(arguments.epsilon)} at δ = {float(arguments.delta)!r} for "
        f"{arguments.tokens} tokens{whom};\nneighbouring: {guarantee.neighbours}.\n"
    )


def _shards(arguments: argparse.Namespace) -> float:
    """Print the box of ClippedMixing for several numbers of shards, and what it kept of a gain."""
    rows = [["mechanism", "settings", "shards", "kept"]]
    for models in planner.SHARDS:
        for plan in planner.chosen(*_question(arguments, models)):
            if plan.mechanism == "clipped-mixing":
                kept = f"{planner.kept_share(plan):.0%}"
                rows.append([plan.mechanism, _settings(plan), str(models), kept])
    _say_question(arguments)
    print(columns(rows, 2))
    print(
        "\nkept: the share of the best gain without protection, in log-perplexity. It is "
        "interpolated\nbetween settings that were measured with two trainings: "
        f'{_MEASURED},\ndivided among so many shards ("What private prediction costs"). Expect '
        "other shares on other\ntext. For the settings to use, add --ensemble or --models."
    )
    return float(arguments.epsilon)


def _recommended(arguments: argparse.Namespace) -> float:
    """Print and save the plan of the public rule, with --all others, too; return ε of all."""
    name = arguments.mechanism or next(iter(_RULES))
    question = _question(arguments, arguments.models)
    plan = planner.recommended(*question, mechanism=name)
    mechanism = f"{name} {_values(plan.settings)} queries={plan.queries}"
    _say_question(arguments, f" to {arguments.models} models")
    print(f'Recommended: --mechanism "{mechanism}"')
    replies = f", about {plan.queries / _REPLY:,.0f} replies of {_REPLY} tokens"
    note = replies if plan.queries >= 1.5 * _REPLY else ""
    tokens = f"{plan.queries} token{'s' * (plan.queries > 1)}"
    print(f"  ε = {format_epsilon(plan.epsilon)} for {tokens}{note}.")
    low, near, share = planner.SHARDS[0], planner.nearest(plan.num_models), planner.kept_share(plan)
    never = f"; fewer than {low} were never measured" * (plan.num_models < low)
    print(
        f"  With {near} shards such settings kept about {share:.0%} of the best gain without "
        f"protection, in\n  log-perplexity{never} (interpolated; two trainings on other text:\n"
        f'  {_MEASURED}; "What private prediction costs").'
    )
    rule = _RULES[name].format(shape=planner.CHOSEN_SHAPE, scale=planner.CHOSEN_SCALE)
    print(f"The rule: {rule}. It looks at no member and at no text.\n{CHOOSING}")
    if arguments.all:
        _say_all(planner.plan(*question))
    if arguments.save is not None:
        _save(arguments.save, arguments.ensemble, mechanism, plan)
        print(f"Wrote {arguments.save}, which is private: other commands take it as --plan.")
    return plan.epsilon


def _save(path: Path, folder: Path, mechanism: str, plan: Plan) -> None:
    """Write the plan of an ensemble folder. It holds a digest of the members, so it is private."""
    from adapmixed.ensemble.members import recorded_fingerprint

    content = {
        "format_version": PLAN_VERSION,
        "ensemble": recorded_fingerprint(folder),
        "mechanism": mechanism,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "adjacency": plan.adjacency,
    }
    write_file(path, f"{json.dumps(content, indent=2)}\n".encode())


def _say_all(plans: list[Plan]) -> None:
    """Print the widest settings of every mechanism with a fixed guarantee."""
    rows = [["mechanism", "settings", "ε"]]
    rows += [[plan.mechanism, _settings(plan), format_epsilon(plan.epsilon)] for plan in plans]
    print(f"\n{columns(rows, 2)}")
    print("\nSettings are shown rounded inward: a copy costs a little less than the ε shown.")
    if all(plan.mechanism != "pmixed" for plan in plans):
        print("pmixed: no fixed guarantee of this kind within the budget.")


def _settings(plan: Plan) -> str:
    """Return what --mechanism takes, rounded inward, so that copied values keep ε."""
    if plan.mechanism == "pmixed":  # it finds its radius from epsilon
        return _values({name: plan.settings[name] for name in ("order", "epsilon")})
    return _values(planner.rounded_inward(plan.settings))


def _values(settings: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.15g}" for name, value in settings.items())
