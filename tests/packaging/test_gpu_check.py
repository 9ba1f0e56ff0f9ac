"""If scripts/gpu_check.sh is stopped, its stages end, and it leaves the results so far."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Replaces Python: it reports a GPU, and works on one stage until it is ended.
FAKE = """#!/bin/sh
case "$*" in
  scripts/gpu_facts.py) echo pretended; echo 90; exit ;;
  *"{slow}"*) ;;
  *) exit ;;
esac
echo at work
sleep 300 &
echo $! >>{pids}
wait
"""


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("slow", ["sanitizer_cases.py", "-m pytest"])
@pytest.mark.slow
def test_what_runs_ends_when_it_is_stopped(slow: str, tmp_path: Path) -> None:
    """It holds for a single stage and for several that run at the same time."""
    for folder in ("scripts", "adapmixed_ext", "tests/cuda", "tests/kernels"):
        (tmp_path / folder).mkdir(parents=True)
    script = shutil.copy(ROOT / "scripts" / "gpu_check.sh", tmp_path / "scripts")
    for name in ("adapmixed_ext/a.py", "adapmixed_ext/a.pyi", "tests/cuda/test_a.py", "module.so",
                 "tests/cuda/test_b.py"):  # fmt: skip
        (tmp_path / name).touch()
    python, pids = tmp_path / "python", tmp_path / "pids"
    python.write_text(FAKE.format(slow=slow, pids=pids))
    python.chmod(0o755)
    results = tmp_path / "results"
    run = subprocess.Popen(
        [script, "--dry-run", "--module", tmp_path / "module.so", results],
        env=os.environ | {"PYTHON": str(python)}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while not (pids.exists() and pids.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=20) == 130
        assert time.monotonic() - began < 10
        working = [int(pid) for pid in pids.read_text().split()]
        assert working and not any(alive(pid) for pid in working)
    finally:
        run.kill()
        for pid in pids.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    log = (results / "pretended.log").read_text()
    assert "at work" in log and "stopped after" in log
