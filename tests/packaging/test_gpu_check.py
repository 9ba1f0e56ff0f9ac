"""scripts/gpu_check.sh without a GPU: its stages, their order and its results.

`stubs` has programs in place of NVIDIA's, which accept only the options that these have.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = Path(__file__).with_name("stubs")
KERNEL_TESTS = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
# Replaces Python: it reports a GPU and notes its commands.
FAKE = """#!/bin/sh
echo "$PYTHONPATH|$ADAPMIXED_COMMIT|$*" >>{calls}
case "$*" in
  scripts/gpu_facts.py) echo pretended; echo 90-real; exit ;;
  *"{broken}"*) echo no good; exit 3 ;;
  *) echo worked; exit ;;
esac
"""


class Checkout:
    """The script in a folder of its own, with a fake Python."""

    def __init__(self, folder: Path, broken: str = "(nothing)") -> None:
        self.calls, self.results = folder / "calls", folder / "results"
        for name in ("scripts", "adapmixed_ext", "tests/cuda", "tests/kernels"):
            (folder / name).mkdir(parents=True)
        for file in KERNEL_TESTS:
            shutil.copy(file, folder / "tests" / "kernels")
        self.script = shutil.copy(ROOT / "scripts" / "gpu_check.sh", folder / "scripts")
        self.module = folder / "module.so"
        for name in ("adapmixed_ext/a.py", "adapmixed_ext/a.pyi", "module.so",
                     "tests/cuda/test_a.py", "tests/cuda/test_b.py"):  # fmt: skip
            (folder / name).touch()
        self.python = folder / "python"
        self.python.write_text(FAKE.format(broken=broken, calls=self.calls))
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
        stages = re.findall(
            r"^(\S+) +(good|no end|FAILED \(\d+\)|not to be had \(\d+\)) +\d+$", log, re.M
        )
        return dict(stages)


def runs_on_a_gpu(file: Path) -> bool:
    """Tell whether a test takes a fixture that is a GPU, too."""
    functions = [
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    tests = [function for function in functions if function.name.startswith("test_")]
    return any({"device", "path"} & {argument.arg for argument in test.args.args} for test in tests)


def test_its_stages_and_their_order(tmp_path: Path) -> None:
    """A stage that fails is told, and stops nothing."""
    checkout = Checkout(tmp_path, broken="tests/cuda/test_a.py")
    run = checkout.start(PYTHONPATH="/inherited")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1, said
    tables = [checkout.table(part) for part in ("speed", "checks", "compare")]
    kernels = [f"tests-{file.stem}" for file in KERNEL_TESTS if runs_on_a_gpu(file)]
    assert "tests-test_sample" in kernels
    assert list(map(list, tables)) == [
        ["import", "smoke", "benchmarks-speed", "ncu"],
        ["import", "tests-cuda-test_a", "tests-cuda-test_b", *kernels, "sanitizer-memcheck",
         "sanitizer-racecheck", "sanitizer-synccheck", "sanitizer-initcheck"],
        ["import", "benchmarks-compare", "generation"],
    ]  # fmt: skip
    assert tables[1].pop("tests-cuda-test_a") == "FAILED (3)"
    assert {result for table in tables for result in table.values()} == {"good"}
    # A command may have several lines; each begins with what it inherits.
    calls = [line.split("|", 2) for line in checkout.calls.read_text().splitlines() if "|" in line]
    # bf16 at B = 8 and the pool come before what compiles programs of torch.
    first, second, *_ = (call[2] for call in calls if "benchmarks.operators" in call[2])
    assert "--only dtypes pools batches" in first and "speed" in second.partition("--only")[2]
    assert all(call[1] == "0123abc" for call in calls)
    stages = [call for call in calls if call[2] != "scripts/gpu_facts.py"]
    assert all(call[0].endswith(":/inherited") and "/site:" in call[0] for call in stages)
    [initcheck] = [call[2] for call in calls if "--ours-alone" in call[2]]
    assert "--few" in initcheck
    log = (checkout.results / "pretended-speed.log").read_text()
    assert "clocks.sm" in log and "commit 0123abc" in log and "===== smoke\nworked" in log


def test_a_part_without_a_failure(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    run = checkout.start("--part", "speed")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 0, said
    assert [path.name for path in checkout.results.glob("*.log")] == ["pretended-speed.log"]
