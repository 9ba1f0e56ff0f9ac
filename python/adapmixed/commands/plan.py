"""``adapmixed plan``: find the settings that a privacy budget allows, before any training."""

import argparse
import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.options import check_output
from adapmixed.limits import MOST_MODELS, MOST_QUERIES, QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from adapmixed.privacy.beforehand import Beforehand
    from adapmixed.privacy.planner import Plan

FORMAT_VERSION = 1
"""Version of the JSON that is written."""
_ASKED = ("epsilon", "models", "queries")
_NEIGHBOURS = {
    "zero_out": "one shard is emptied and its member answers the public distribution",
    "replace_one": "any change of the records in one shard",
}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        help="find the settings that a privacy budget allows",
        description="List the widest settings within (epsilon, delta) for every mechanism with a "
        "fixed guarantee, choose one setting of each clipped mechanism, and show the epsilon of "
        "fewer queries. Without --models, show what several numbers of shards allow. With --lower "
        "and --upper, compute instead whichever of --epsilon, --models and --queries is left out. "
        "Only public numbers are used.",
    )
    parser.add_argument("--epsilon", type=float, help="epsilon of the guarantee")
    parser.add_argument(
        "--delta", type=float, default=1e-5, help="delta of the guarantee (default: 1e-5)"
    )
    parser.add_argument("--models", type=int, help="number of shards, with one model each")
    parser.add_argument("--queries", type=int, help="total number of answered tokens")
    parser.add_argument(
        "--adjacency",
        choices=QUESTIONS,
        default="zero_out",
        help="neighbouring relation of the guarantee: one shard is emptied, or its records change "
        "(default: zero_out)",
    )
    parser.add_argument(
        "--lower",
        type=float,
        help="lower bound of clipped-mixing (a ratio) or, with --scale, of clipped-log-pool (a "
        "log-ratio)",
    )
    parser.add_argument("--upper", type=float, help="upper bound, in the unit of --lower")
    parser.add_argument(
        "--scale",
        type=float,
        help="scale of clipped-log-pool (default: --lower and --upper are of clipped-mixing)",
    )
    parser.add_argument(
        "--json", type=Path, help="file to write the plans or the answer to, as JSON"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan and print the table, or answer an inverse question."""
    check_output(arguments.json)
    missing = [name for name in _ASKED if getattr(arguments, name) is None]
    if (arguments.lower is None) != (arguments.upper is None):
        given, other = ("lower", "upper") if arguments.upper is None else ("upper", "lower")
        raise ValueError(
            f"--lower and --upper must be given together, got --{given} without --{other}"
        )
    if arguments.lower is not None:
        if len(missing) != 1:
            raise ValueError(
                "of --epsilon, --models and --queries one must be left out with --lower "
                f"and --upper, got {3 - len(missing)} of them"
            )
        content = _answer(arguments, missing[0])
    elif arguments.scale is not None or missing not in ([], ["models"]):
        raise ValueError(
            "--epsilon and --queries must be given, or two of --epsilon, --models and --queries "
            "with --lower and --upper, got no "
            f"{', '.join('--' + name for name in missing or ['lower'])}"
        )
    else:
        content = _shards(arguments) if missing else _plans(arguments)
    if arguments.json is not None:
        content = {"format_version": FORMAT_VERSION, "kind": "plan", **content}
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _answer(arguments: argparse.Namespace, asked: str) -> dict[str, object]:
    """Print the ε, the number of models or the number of queries that the settings allow."""
    from adapmixed.privacy.guarantee import format_epsilon
    from adapmixed.privacy.planner import epsilon_of, models_for, queries_for

    delta, way = arguments.delta, arguments.adjacency
    names = ("lower", "upper", "scale")
    settings = {name: getattr(arguments, name) for name in names}
    found: float | None
    if asked == "epsilon":
        found = epsilon_of(delta, arguments.models, arguments.queries, way, **settings)
        said = f"ε = {format_epsilon(found)} for {_plural(arguments.queries, 'query')}"
        said += f" to {_plural(arguments.models, 'model')}"
    elif asked == "queries":
        found = queries_for(arguments.epsilon, delta, arguments.models, way, **settings)
        more = " or more" if found == MOST_QUERIES else ""
        said = f"{_plural(found, 'query')}{more} to {_plural(arguments.models, 'model')}"
        said += f" within ε = {format_epsilon(arguments.epsilon)}"
    else:
        found = models_for(arguments.epsilon, delta, arguments.queries, way, **settings)
        least = f"more than {MOST_MODELS} models" if found is None else _plural(found, "model")
        said = f"{least} for {_plural(arguments.queries, 'query')}"
        said += f" within ε = {format_epsilon(arguments.epsilon)}"
    name = "clipped-mixing" if settings["scale"] is None else "clipped-log-pool"
    given = {key: value for key, value in settings.items() if value is not None}
    listed = " ".join(f"{key}={value!r}" for key, value in given.items())
    print(f"{name} {listed}: {said} at δ = {float(delta)!r};")
    print(f"neighbouring ({way}): {_NEIGHBOURS[way]}.")
    _warn(arguments.epsilon if found is None or asked != "epsilon" else found, delta)
    known = {key: getattr(arguments, key) for key in _ASKED if key != asked}
    shown = found if found is None or math.isfinite(found) else str(found)
    return {
        "mechanism": name,
        "settings": given,
        **known,
        "delta": delta,
        "adjacency": way,
        asked: shown,
    }


def _warn(epsilon: float, delta: float) -> None:
    """Print the warnings that a guarantee with this ε and δ will have."""
    from adapmixed.privacy.guarantee import weak_warnings

    for warning in weak_warnings(epsilon, delta):
        print(warning)


def _plural(number: int, noun: str) -> str:
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def _question(arguments: argparse.Namespace, models: int) -> tuple[float, float, int, int, str]:
    """Return the first arguments of `planner.plan`."""
    epsilon, delta, queries = arguments.epsilon, arguments.delta, arguments.queries
    return epsilon, delta, models, queries, arguments.adjacency


def _say_question(arguments: argparse.Namespace, models: str = "") -> None:
    from adapmixed.privacy.guarantee import format_epsilon

    print(
        f"Within ε = {format_epsilon(arguments.epsilon)} at δ = {float(arguments.delta)!r} for "
        f"{arguments.queries} queries{models};\n"
        f"neighbouring ({arguments.adjacency}): {_NEIGHBOURS[arguments.adjacency]}.\n"
    )


def _shards(arguments: argparse.Namespace) -> dict[str, object]:
    """Print the box of ClippedMixing for several numbers of shards, and what it kept of a gain."""
    from adapmixed.privacy.planner import SHARDS, chosen, kept_share

    found = [one for models in SHARDS for one in chosen(*_question(arguments, models))]
    plans = [one for one in found if one.mechanism == "clipped-mixing"]
    _say_question(arguments)
    rows = [["mechanism", "settings", "shards", "kept"]]
    for one in plans:
        rows.append([one.mechanism, _settings(one), str(one.num_models), f"{kept_share(one):.0%}"])
    print(_table(rows))
    print(
        "\nkept: the share of the best gain without protection that these settings kept, in "
        "log-perplexity.\nIt was measured once: SmolLM2-135M, 3500 change logs, divided among so "
        'many shards ("What private\nprediction costs"). Expect other shares on other text. There '
        "this mechanism was the best or near it.\nFor all settings of a number of shards, add "
        "--models."
    )
    _warn(arguments.epsilon, arguments.delta)
    return {"shards": [_entry(one) | {"kept": kept_share(one)} for one in plans]}


def _plans(arguments: argparse.Namespace) -> dict[str, object]:
    """Print the settings that the budget allows."""
    from adapmixed.privacy.planner import adapmixed_beforehand, plan

    question = _question(arguments, arguments.models)
    plans, adaptive = plan(*question), adapmixed_beforehand(*question)
    _say_question(arguments, f" to {arguments.models} models")
    print(_overview(plans))
    print(
        "\nclipped-mixing bounds the ratio of a member's to the public probability by lower and "
        "upper;\nclipped-log-pool bounds its logarithm, and multiplies that by scale. Wider "
        "settings are closer\nto the private models. All fit the budget. Settings are shown "
        "rounded inward: a copy costs a\nlittle less than the ε shown."
    )
    print(_chosen_words(plans))
    print(
        "ε(n) is the guarantee of n queries if n is fixed in advance. An accountant for all "
        f"{arguments.queries} queries\n(queries={arguments.queries}) states ε({arguments.queries}) "
        "from the first answer on, even if fewer follow."
    )
    for mechanism, note in dict.fromkeys((one.mechanism, one.note) for one in plans if one.note):
        print(f"{mechanism}: {note}.")
    if all(one.mechanism != "pmixed" for one in plans):
        print("pmixed: no fixed guarantee of this kind within the budget.")
    print(_adaptive_words(adaptive, arguments.epsilon))
    _warn(arguments.epsilon, arguments.delta)
    return {
        "plans": [_entry(one) for one in plans],
        "adapmixed": _adaptive_entry(adaptive),
    }


def _overview(plans: "list[Plan]") -> str:
    from adapmixed.privacy.guarantee import format_epsilon

    rows = [["mechanism", "settings", *(f"ε({count})" for count, _ in plans[0].over_time)]]
    for one in plans:
        costs = [format_epsilon(cost) for _, cost in one.over_time]
        rows.append([one.mechanism, _settings(one), *costs])
    return _table(rows)


def _chosen_words(plans: "list[Plan]") -> str:
    """Return the chosen settings, the rules that chose them, and the evidence for the rules."""
    from adapmixed.privacy.planner import CHOSEN_SCALE, CHOSEN_SHAPE

    rules = {
        "clipped-mixing": f"the widest box of shape log upper = {CHOSEN_SHAPE:g} |log lower|",
        "clipped-log-pool": f"the widest clip at scale = {CHOSEN_SCALE:g}",
    }
    lines = [
        "\nChosen from these public numbers, one of each mechanism; the rest are alternatives:"
    ]
    for name, rule in rules.items():
        found = [_settings(one) for one in plans if one.mechanism == name and one.chosen]
        lines.append(f"  {name} {found[0]}: {rule}" if found else f"  {name}: nothing fits")
    lines.append(
        'The rules come from one measurement of perplexity at equal ε (see "Plan a budget"). For '
        "other\nmodels, compare the settings by perplexity on public text.\n"
    )
    return "\n".join(lines)


def _adaptive_words(one: "Beforehand", epsilon: float) -> str:
    from adapmixed.privacy.guarantee import format_epsilon

    shown = format_epsilon(epsilon)
    words = (
        "adapmixed: its ε depends on the private data, is known only after the answers, and must "
        "not be\npublished.\n"
        f"  With loss=fixed and order={one.order:g}, all queries at the paper's "
        f"target_leakage={one.target_leakage:g} cost at most\n"
        f"  ε = {format_epsilon(one.epsilon)}; "
    )
    if one.largest_leakage is None:
        return words + f"no target_leakage keeps ε = {shown}."
    return words + f"ε = {shown} is kept with {_values({'target_leakage': one.largest_leakage})}."


def _adaptive_entry(one: "Beforehand") -> dict[str, object]:
    return {
        "kind": "data-dependent, ex-post",
        "publishable": False,
        "order": one.order,
        "target_leakage": one.target_leakage,
        "worst_case_epsilon": one.epsilon if math.isfinite(one.epsilon) else str(one.epsilon),
        "largest_target_leakage": one.largest_leakage,
    }


def _settings(one: "Plan") -> str:
    # Only what --mechanism takes: PMixED finds its radius from epsilon.
    found = {"radius", "target_leakage"}
    return _values({name: one.settings[name] for name in one.settings if name not in found})


def _values(settings: "Mapping[str, float]") -> str:
    """Return settings to four digits, rounded inward, so that copied values keep ε.

    An order is shown as planned, and ε as it was given. Of a box near 1 four digits of its distance
    from 1 are shown.
    """
    from adapmixed.privacy.rounding import four_digits

    shown = []
    for name, value in settings.items():
        if name in ("order", "epsilon"):
            shown.append(f"{name}={value:.15g}")
            continue
        rounding = ROUND_CEILING if name == "lower" else ROUND_FLOOR
        shown.append(f"{name}={four_digits(value, rounding)}")
    return " ".join(shown)


def _entry(one: "Plan") -> dict[str, object]:
    over_time = [{"queries": count, "epsilon": cost} for count, cost in one.over_time]
    return {**vars(one), "settings": dict(one.settings), "over_time": over_time}


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        left = [text.ljust(width) for text, width in zip(row[:2], widths[:2], strict=True)]
        right = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)
