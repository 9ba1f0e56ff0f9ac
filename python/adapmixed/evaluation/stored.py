"""Read a result file without the models."""

import os
from dataclasses import dataclass
from typing import Any

from adapmixed.evaluation.diagnostics import Diagnostics
from adapmixed.evaluation.result import Evaluation, Runs
from adapmixed.evaluation.result_file import read_content
from adapmixed.evaluation.tally import Tally


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
    try:
        state = content["state"]
        found = [
            [_evaluation(one, seconds) for one in methods]
            for methods, seconds in zip(state["runs"], state["forward_seconds"], strict=True)
        ]
        runs = tuple(Runs(one[0].name, tuple(one)) for one in zip(*found, strict=True))
        about = dict(content["about"])
        return StoredResult(content["configuration"], about, content["complete"], runs)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a result file of an evaluation: {error!r}") from error


def _evaluation(state: dict[str, Any], forward_seconds: float) -> Evaluation:
    kept = state.get("diagnostics")
    diagnosis = None if kept is None else Diagnostics.from_state(kept).diagnosis()
    return Tally.from_state(state["tally"]).result(forward_seconds, diagnosis)
