"""The file with the state of an evaluation, from which it continues after an interruption.

The file is one JSON object, which is replaced atomically. A process that is killed at any moment
leaves the state of the last write. The file is for the operator: it holds each model's charges,
losses and perplexities. Of the randomness it holds only a seed, if there is one, and how many
random numbers were drawn from it.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapmixed.evaluation.result import Evaluation, Tally, results
from adapmixed.files import remove_leftovers, sole_writer, write_file
from adapmixed.privacy.encoding import canonical, from_json, parse

FORMAT_VERSION = 8
"""Increases if an entry changes its meaning, or if older files lack a required entry."""

NOTICE = (
    "PRIVATE, for the operator: losses, perplexities and what each model was charged depend on the "
    "private data and must not be published."
)
_TOLERANCE = 1e-3  # of a probe: more than rounding on other machines, less than other ensembles


class ResultFile:
    """The file with the state of an evaluation.

    Args:
        path: path of the file.
        configuration: strict JSON values that describe the evaluation. The numbers of "probe" may
            differ by rounding.
    """

    def __init__(self, path: str | os.PathLike[str], configuration: dict[str, Any]) -> None:
        self.path = Path(path)
        self.configuration = configuration

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the file against other writers while the context is entered.

        Raises:
            ValueError: if another process holds it.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(sole_writer(self.path))
            except BlockingIOError:
                raise ValueError(
                    f"result must name a file that no other process writes, got {self.path}, which "
                    "another evaluation holds"
                ) from None
            yield

    def begin(self, *, resume: bool) -> dict[str, Any] | None:
        """Return the state to continue from, or None to begin; call it while the file is `held`.

        Raises:
            ValueError: as `check_result`; or if the file has another configuration or version, or
                is truncated or corrupted.
        """
        remove_leftovers(self.path.parent, self.path.name)
        check_result(self.path, resume=resume)
        if not self.path.exists():
            return None
        content = read_content(self.path)
        for name, mine, found in _differences(self.configuration, content["configuration"], ""):
            raise ValueError(
                f"{self.path} must be of the same evaluation to be resumed: {name} is {mine}, but "
                f"the file was begun with {found}"
            )
        state: dict[str, Any] = content["state"]
        return state

    def save(self, state: dict[str, Any], *, complete: bool) -> None:
        """Replace the file atomically; it is on the device when this returns."""
        content = {
            "format_version": FORMAT_VERSION,
            "notice": NOTICE,
            "configuration": self.configuration,
            "complete": complete,
            "state": state,
        }
        write_file(self.path, _written(content), mode=0o600)


def check_result(path: str | os.PathLike[str] | None, *, resume: bool) -> None:
    """Check where a result is to be kept.

    Raises:
        ValueError: if there is a file and `resume` is False, no path and `resume` is True, or if
            the path cannot be that of a file.
    """
    if path is None:
        if resume:
            raise ValueError("result must be given with resume, the file to continue from")
        return
    place = Path(path)
    if place.is_dir() or not place.parent.is_dir():
        raise ValueError(f"result must name a file in an existing folder, got {path}")
    if place.exists() and not resume:
        raise ValueError(f"result must name a new file unless it is resumed, got {path}")


def read_content(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content that `ResultFile.save` wrote.

    Raises:
        ValueError: if the file is truncated, corrupted, no result file, or of another version.
        OSError: if it cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        content: dict[str, Any] = dict(parse(data.decode("utf-8")))
        version = content["format_version"]
        if version == FORMAT_VERSION:
            del content["checksum"]
            if _written(content) != data:
                raise ValueError("its checksum differs")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} must be a whole result file as evaluate wrote it (--result), it is truncated "
            f"or corrupted: {error}"
        ) from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}")
    return content


@dataclass(frozen=True)
class StoredResult:
    """The content of a result file.

    Attributes:
        configuration: the description of the evaluation: methods, δ, digest of the text, ensemble,
            windows and seed.
        complete: whether the evaluation was complete.
        evaluations: one :class:`Evaluation` per mechanism over the runs that had begun. An
            incomplete evaluation has fewer queries, and none of these if nothing was answered.
    """

    configuration: dict[str, Any]
    complete: bool
    evaluations: list[Evaluation]


def read_result(path: str | os.PathLike[str]) -> StoredResult:
    """Read a result file, which is private and for the operator.

    Raises:
        ValueError: if the file is truncated, corrupted, no result file, or of another version.
        OSError: if it cannot be read.
    """
    content = read_content(path)
    state = content["state"]
    tallies = [[from_json(Tally, one["tally"]) for one in run] for run in state["runs"]]
    found = results(tallies, state["forward_seconds"])
    return StoredResult(content["configuration"], content["complete"], found)


def _written(content: dict[str, Any]) -> bytes:
    """Return the file's bytes, with a checksum over all entries."""
    checksum = hashlib.sha256(canonical(content).encode("ascii")).hexdigest()
    return f"{canonical(content | {'checksum': f'sha256:{checksum}'})}\n".encode("ascii")


def _differences(mine: Any, found: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, mine, found) of every entry that differs."""
    if name == "probe":
        same = len(mine) == len(found)
        same = same and all(abs(a - b) <= _TOLERANCE for a, b in zip(mine, found, strict=True))
        if not same:
            yield "ensemble", "another one, by its logits for the first tokens", "other logits"
    elif isinstance(mine, dict) and isinstance(found, dict):
        for key in [*mine, *(key for key in found if key not in mine)]:
            where = f"{name}.{key}" if name else key
            yield from _differences(mine.get(key), found.get(key), where)
    elif mine != found:
        yield name, canonical(mine), canonical(found)
