"""Options that commands share: errors before the work, and progress."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import main
from adapmixed.commands import options
from adapmixed.data import demo_base, held_out_text

pytestmark = pytest.mark.usefixtures("demo_ensemble")
MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
POOL = ["--mechanism", "clipped-log-pool lower=-0.25 upper=1 scale=2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(held_out_text()[:3]), encoding="utf-8")
    return path


def test_missing_files_are_named_before_the_work(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere, given = str(tmp_path / "missing" / "out.json"), ["--text", str(text)]
    no_base = ["--base", str(tmp_path / "no-base"), "--ensemble", str(DEMO_ENSEMBLE)]
    no_ensemble = ["--base", str(demo_base()), "--ensemble", str(tmp_path), "--prompt", "x", *POOL]
    for command, words in (
        (["evaluate", *no_base, *given, "--json", nowhere], "--json must name a file in an exist"),
        (["evaluate", *no_base, *given], "no-base"),
        (["evaluate", *MODELS, "--text", str(tmp_path / "none.txt")], "none.txt"),
        (["generate", *no_ensemble], "ensemble.json"),
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.strip().splitlines()) == 1


def test_the_time_left_is_that_of_the_work_since_a_resumption(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0, 100.0, 140.0])
    monkeypatch.setattr(options.time, "monotonic", lambda: next(clock))
    update, close = options.progress_bar(1000, "token")
    update(900, 1000)  # read from a file
    update(920, 1000)
    close()
    assert capsys.readouterr().err == "920 of 1,000 tokens, 02:40 left\n"
