"""File formats: a specimen of each kind is read, and another version of it raises."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from adapmixed.commands import options
from adapmixed.ensemble import members as manifest
from adapmixed.training import shards as training
from adapmixed_lab import dp_sgd
from adapmixed_lab.reproduce import result as reproduction


def _run(path: Path) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    folder = training.TrainingFolder(path.parent / "ensemble", 4)
    folder.private.mkdir(exist_ok=True)
    shutil.copyfile(path, folder.private / "run.json")
    folder.check_settings(settings)


# name of a specimen -> name under which it is read, its version, and its reader
READERS: dict[str, tuple[str, int, Callable[[Path], object]]] = {
    "ensemble": (
        "ensemble.json",
        manifest.FORMAT_VERSION,
        lambda path: manifest.read_manifest(path.parent),
    ),
    "reproduction": ("result.json", reproduction.FORMAT_VERSION, reproduction.read_experiment),
    "run": ("run.json", training.FORMAT_VERSION, _run),
    "shard": (
        "shard.json",
        manifest.MEMBER_VERSION,
        lambda path: training.read_member_record(path.parent),
    ),
    "plan": ("plan.json", options.PLAN_VERSION, options.read_plan),
    "guarantee": (
        "guarantee.json",
        dp_sgd.FORMAT_VERSION,
        lambda path: dp_sgd.read_dp_adapter(path.parent),
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_other_versions_of_a_format_are_not_read(kind: str, tmp_path: Path) -> None:
    """The unchanged specimen is read, and with another version number it raises."""
    name, newest, read = READERS[kind]
    copy = tmp_path / name
    shutil.copyfile(Path(__file__).parent / "formats" / f"{kind}-{newest}.json", copy)
    read(copy)
    written = copy.read_text(encoding="utf-8")
    for version in (newest - 1, newest + 1):
        other = re.sub(rf'("format_version": ?){newest}\b', rf"\g<1>{version}", written)
        assert other != written
        copy.write_text(other, encoding="utf-8")
        with pytest.raises(ValueError, match=rf"format_version .*{version}.*make it again"):
            read(copy)
