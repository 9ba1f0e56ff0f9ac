"""Read a result file without the models."""

import os
from dataclasses import dataclass
from typing import Any

from adapmixed.evaluation.result import Runs
from adapmixed.evaluation.result_file import read_content
from adapmixed.evaluation.tally import Tally, runs_of


@dataclass(frozen=True)
class StoredResult:
    """The content of a result file.

    Attributes:
        configuration: the description of the evaluation: methods, δ, digest of the text, ensemble,
            windows and seed.
        about: the values given as `about` to :func:`adapmixed.evaluation.evaluate`; {} if none.
        complete: whether the evaluation was complete.
        runs: one :class:`Runs` per mechanism over the runs that had begun. An incomplete evaluation
            has fewer queries, and no runs if nothing was answered.
    """

    configuration: dict[str, Any]
    about: dict[str, Any]
    complete: bool
    runs: tuple[Runs, ...]


def read_result(path: str | os.PathLike[str]) -> StoredResult:
    """Read a result file, which is private and for the operator.

    Raises:
        ValueError: if the file is truncated, corrupted, no result file, or of another version.
        OSError: if it cannot be read.
    """
    content = read_content(path)
    state = content["state"]
    tallies = [[Tally.from_state(one["tally"]) for one in methods] for methods in state["runs"]]
    runs = tuple(runs_of(tallies, state["forward_seconds"]))
    return StoredResult(content["configuration"], content["about"], content["complete"], runs)
