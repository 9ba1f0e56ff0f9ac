"""Local text files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from adapmixed.data.text import read_text


def test_read_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("öne", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "other.md").write_text("not read")
    assert [(d.identifier, d.text) for d in read_text(tmp_path)] == [
        ("b.txt", "two"),
        ("sub/a.txt", "öne"),
    ]
    assert [d.identifier for d in read_text(tmp_path / "other.md")] == ["other.md"]
    with pytest.raises(ValueError, match="path must name"):
        read_text(tmp_path / "nowhere")
    for name in ("rows.jsonl", "rows.CSV", "rows.parquet", "rows.json"):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / name).write_text("{}", encoding="utf-8")
        with pytest.raises(ValueError, match="path must hold .* got .*rows"):
            read_text(tmp_path / "rows" / name)
    shutil.rmtree(tmp_path / "rows")
    with pytest.raises(ValueError, match="has none"):
        read_text(tmp_path / "empty.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="UTF-8"):
        read_text(tmp_path)
