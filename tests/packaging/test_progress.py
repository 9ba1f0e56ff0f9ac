"""Without a terminal, a command writes no progress bar, neither its own nor a library's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trained_demo import DEMO_ENSEMBLE

from adapmixed.data.demo import demo_base, held_out_text

pytestmark = pytest.mark.usefixtures("demo_ensemble")

SETTINGS = ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")


@pytest.mark.slow
def test_no_progress_bar_off_a_terminal(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(held_out_text()[:2]), encoding="utf-8")
    # There must be no bar even if the caller does not turn it off.
    clean = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    done = subprocess.run(
        [
            sys.executable, "-m", "adapmixed", "evaluate",
            "--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE),
            "--text", str(text), "--queries", "20",
        ],
        cwd=tmp_path, env=clean, stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    # Bytes: text mode would turn "\r" into "\n".
    assert done.returncode == 0, done.stderr.decode()
    assert b"%|" not in done.stderr and b"\r" not in done.stderr, done.stderr.decode()
    assert b"adapmixed" in done.stdout
