"""`ensemble.json`: written, read back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import ADAPTED

from adapmixed.ensemble import Manifest, read_manifest, write_manifest

RECORD = {
    "documents": 1, "sha256": "b" * 64, "identifiers": ["a" * 32], "identifier_key": "c" * 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format_version": 5}, "format_version must be 4, got 5"),
        ({"adapted": {"lm_head": 8}}, "adapted must map layer names to .* got .*'lm_head': 8"),
        ({"num_models": 3}, "num_models"),
        ({"members": [], "num_models": 0}, "at least one"),
        ({"members": ["a", "a"]}, "distinct"),
        ({"members": ["a", "../b"]}, "plain folder names"),
        ({"members": "ab"}, "members must be a list"),
        ({"base_files": {"vocab.json": "0" * 32}}, "base_files"),
        ({"revision": 5}, "revision must be a string"),
        ({"training": "x"}, "training must be an object"),
        ({"shards": [RECORD]}, "each of the 2 members"),
    ],
)
def test_manifest_refusals(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    write_manifest(tmp_path, Manifest("tiny", ("a", "b"), ADAPTED))
    path = tmp_path / "ensemble.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=reason):
        read_manifest(tmp_path)


def test_manifest_round_trip(tmp_path: Path) -> None:
    manifest = Manifest(
        "tiny",
        ("a", None),
        {"lm_head": (2, 8)},
        base_files={"merges.txt": "d" * 64},
        training={"rank": 4},
        shards=(RECORD, RECORD | {"documents": 0, "identifiers": []}),
    )
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    (tmp_path / "ensemble.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        read_manifest(tmp_path)
    with pytest.raises(ValueError, match="must hold ensemble.json"):
        read_manifest(tmp_path / "elsewhere")
    (single := tmp_path / "single").mkdir()
    (single / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="a single adapter: give a list of such folders"):
        read_manifest(single)
