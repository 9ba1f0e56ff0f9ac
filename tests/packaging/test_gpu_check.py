"""scripts/gpu_check.sh without a GPU: its stages, their order, its results, and what ends it.

`stubs` has programs in place of NVIDIA's, which accept only the options that these have.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = Path(__file__).with_name("stubs")
# Replaces Python: it reports a GPU, notes its commands, and works on one stage until it is ended.
FAKE = """#!/bin/sh
echo "$PYTHONPATH|$ADAPMIXED_COMMIT|$*" >>{calls}
case "$*" in
  scripts/gpu_facts.py) echo pretended; echo 90-real; exit ;;
  *"{slow}"*) ;;
  *"{broken}"*) echo no good; exit 3 ;;
  *) echo worked; exit ;;
esac
echo at work
sleep 300 &
echo $! >>{pids}
wait
"""
NOTHING = "(nothing)"


class Checkout:
    """The script in a folder of its own, with a fake Python."""

    def __init__(self, folder: Path, *, slow: str = NOTHING, broken: str = NOTHING) -> None:
        self.calls, self.pids, self.results = folder / "calls", folder / "pids", folder / "results"
        for name in ("scripts", "adapmixed_ext", "tests/cuda", "tests/kernels"):
            (folder / name).mkdir(parents=True)
        self.script = shutil.copy(ROOT / "scripts" / "gpu_check.sh", folder / "scripts")
        self.module = folder / "module.so"
        for name in ("adapmixed_ext/a.py", "adapmixed_ext/a.pyi", "module.so",
                     "tests/cuda/test_a.py", "tests/cuda/test_b.py"):  # fmt: skip
            (folder / name).touch()
        self.python = folder / "python"
        self.python.write_text(
            FAKE.format(slow=slow, broken=broken, pids=self.pids, calls=self.calls)
        )
        self.python.chmod(0o755)

    def start(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.script, "--dry-run", "--module", self.module, *options, self.results],
            env=os.environ | {"PYTHON": str(self.python), "ADAPMIXED_COMMIT": "0123abc",
                              "PATH": f"{STUBS}{os.pathsep}{os.environ['PATH']}"} | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def table(self, part: str) -> dict[str, str]:
        """Return each stage of a part with its result."""
        log = (self.results / f"pretended-{part}.log").read_text()
        found = re.findall(
            r"^(\S+) +(good|no end|FAILED \(\d+\)|not to be had \(\d+\)) +\d+$", log, re.M
        )
        return dict(found)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_its_stages_and_their_order(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    run = checkout.start(PYTHONPATH="/inherited")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 0, said
    assert list(checkout.table("speed")) == [
        "import",
        "smoke",
        "benchmarks-speed",
        "kernels",
        "ncu",
    ]
    assert list(checkout.table("checks")) == [
        "import", "tests-cuda-test_a", "tests-cuda-test_b", "sanitizer-memcheck",
        "sanitizer-racecheck", "sanitizer-synccheck", "sanitizer-initcheck",
    ]  # fmt: skip
    assert list(checkout.table("compare")) == ["import", "benchmarks-compare"]
    results = {path.name for path in checkout.results.iterdir()}
    assert {f"pretended-{part}.log" for part in ("speed", "checks", "compare")} <= results
    # A command may have several lines; each begins with what it inherits.
    calls = [line.split("|", 2) for line in checkout.calls.read_text().splitlines() if "|" in line]
    # bf16 at B = 8 and the pool come before what compiles programs of torch.
    tables = [call[2] for call in calls if "benchmarks.operators" in call[2]]
    assert (
        "--only dtypes pools batches" in tables[0] and "speed" in tables[1].partition("--only")[2]
    )
    assert all(call[1] == "0123abc" for call in calls)
    stages = [call for call in calls if call[2] != "scripts/gpu_facts.py"]
    assert all(call[0].endswith(":/inherited") and "/site:" in call[0] for call in stages)
    [initcheck] = [call[2] for call in calls if "--ours-alone" in call[2]]
    assert "--few" in initcheck
    log = (checkout.results / "pretended-speed.log").read_text()
    assert "clocks.sm" in log and "commit 0123abc" in log and "===== smoke\nworked" in log


def test_a_failure_is_told_and_stops_nothing(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, broken="tests/cuda/test_a.py")
    run = checkout.start("--part", "checks")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1, said
    table = checkout.table("checks")
    assert table.pop("tests-cuda-test_a") == "FAILED (3)"
    assert set(table.values()) == {"good"}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    "slow,part", [("sanitizer_cases.py", "speed"), ("-m pytest", "checks")]
)  # fmt: skip
@pytest.mark.slow
def test_what_runs_ends_when_it_is_stopped(slow: str, part: str, tmp_path: Path) -> None:
    """It holds for a single stage and for several that run at the same time."""
    checkout = Checkout(tmp_path, slow=slow)
    run = checkout.start("--part", part)
    pids = checkout.pids
    try:
        deadline = time.monotonic() + 30
        while not (pids.exists() and pids.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=20)
        assert run.returncode == 130
        assert time.monotonic() - began < 10
        working = [int(pid) for pid in pids.read_text().split()]
        assert working and not any(alive(pid) for pid in working)
    finally:
        run.kill()
        for pid in pids.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    log = (checkout.results / f"pretended-{part}.log").read_text()
    assert "at work" in log and "stopped after" in log
