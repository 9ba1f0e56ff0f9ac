"""Build a report from an evaluation's result file, complete or not, without the models."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adapmixed.report.build import build_report, plain
from adapmixed.report.runs import runs_entry

if TYPE_CHECKING:
    from adapmixed.evaluation import StoredResult


def stored_report(stored: "StoredResult") -> dict[str, object]:
    """Return the report of an evaluation, possibly incomplete, as `build_report` makes it.

    The methods are those of the first run. If the evaluation has several runs, "runs" holds the
    complete ones. `adapmixed evaluate` keeps the settings, the environment and the training losses
    in the file. Then the report of a complete evaluation equals the one it printed. Otherwise the
    settings come from the file's configuration, and there is no environment and no training loss.

    Raises:
        ValueError: if nothing was answered yet.
    """
    from adapmixed.evaluation import Runs

    if not stored.runs:
        raise ValueError("nothing is answered yet")
    about = stored.about
    queries, runs = stored.configuration["queries"], stored.configuration["runs"]
    config = dict(about["config"]) if "config" in about else _settings(stored.configuration)
    if not stored.complete:
        begun = len(stored.runs[0].evaluations)
        last = stored.runs[0].evaluations[-1].queries
        config["answered"] = f"{last} of {queries} queries in run {begun} of {runs}"
    report = build_report(
        [one.evaluations[0] for one in stored.runs],
        config=config,
        environment=about.get("environment", {}),
        training=about.get("training", ()),
    )
    whole = [
        Runs(one.name, tuple(e for e in one.evaluations if e.queries == queries))
        for one in stored.runs
    ]
    if runs > 1 and whole[0].evaluations:
        report["runs"] = plain(runs_entry(whole), "runs")
    return report


def _settings(configuration: Mapping[str, Any]) -> dict[str, object]:
    """Return a configuration without values that depend on the members' weights."""
    settings = {key: value for key, value in configuration.items() if key != "probe"}
    settings["ensemble"] = {
        key: value for key, value in settings["ensemble"].items() if key != "fingerprint"
    }
    return settings | {"command": "evaluate"}
