"""A report from an evaluation's result file, complete or under way, without the models."""

from typing import TYPE_CHECKING

from adapmixed.report.build import build_report, plain
from adapmixed.report.runs import runs_entry

if TYPE_CHECKING:
    from adapmixed.evaluation import StoredResult


def stored_report(stored: "StoredResult") -> dict[str, object]:
    """What `build_report` makes of the evaluation, as far as it has come.

    The methods are those of the first run; under "runs" are the runs that are whole, if the
    evaluation is of several. The environment it ran in and validation losses are not in the file.

    Raises:
        ValueError: nothing is answered yet.
    """
    from adapmixed.evaluation import Runs

    if not stored.runs:
        raise ValueError("nothing is answered yet")
    settings = {key: value for key, value in stored.configuration.items() if key != "probe"}
    # A function of the members' weights; reports go to others.
    settings["ensemble"] = {
        key: value for key, value in settings["ensemble"].items() if key != "fingerprint"
    }
    queries, runs = settings["queries"], settings["runs"]
    begun = len(stored.runs[0].evaluations)
    last = stored.runs[0].evaluations[-1].queries
    settings |= {
        "command": "evaluate",
        "filters": [name for name, one in settings["methods"].items() if one["filter"]],
        "complete": stored.complete,
        "answered": f"{last} of {queries} queries in run {begun} of {runs}",
    }
    report = build_report(
        [one.evaluations[0] for one in stored.runs], config=settings, environment={}
    )
    whole = [
        Runs(one.name, tuple(e for e in one.evaluations if e.queries == queries))
        for one in stored.runs
    ]
    if runs > 1 and whole[0].evaluations:
        report["runs"] = plain(runs_entry(whole), "runs")
    return report
