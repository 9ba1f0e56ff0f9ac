"""scripts/rooms.py counts the lines of tracked sources, and fails above a budget."""

import importlib.util
import subprocess
from pathlib import Path

import pytest


def test_a_room_above_its_budget_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).resolve().parents[1] / "scripts" / "rooms.py"
    spec = importlib.util.spec_from_file_location("rooms", path)
    assert spec is not None and spec.loader is not None
    rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rooms)
    for name in ("csrc/a.cuh", "docs/a.md", "docs/_ext/a.py", "csrc/a.txt", "docs/untracked.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n2\n3\n")
    subprocess.run(["git", "-C", tmp_path, "init", "-q"], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "csrc", "docs/a.md", "docs/_ext"], check=True)
    monkeypatch.setattr(rooms, "BUDGETS", {"csrc": 3, "docs": 3})
    monkeypatch.setattr(rooms.sys, "argv", ["rooms.py", str(tmp_path)])
    assert rooms.main() == 0
    assert rooms.lines(tmp_path) == {"csrc": 3, "docs": 3}
    monkeypatch.setattr(rooms, "BUDGETS", {"csrc": 3, "docs": 2})
    assert rooms.main() == 1 and "above the budget: docs" in capsys.readouterr().out
