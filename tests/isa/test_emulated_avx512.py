"""The AVX-512 path on machines without AVX-512: a few kernel tests with emulated instructions.

`make isa` runs all kernel tests and more fuzzed calls. On machines with AVX-512, tests/kernels runs
the path itself.
"""

from __future__ import annotations

import re
import subprocess
import sys

import emulated
import pytest

from adapmixed_ext import _C

pytestmark = pytest.mark.skipif(
    _C.instruction_set() != "avx2", reason="this machine has AVX-512, or lacks AVX2"
)
KERNELS = emulated.ROOT / "tests" / "kernels"


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return emulated.environment()


def run(environment: dict[str, str], *arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, cwd=emulated.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_emulated_module_is_imported(environment: dict[str, str]) -> None:
    program = "from adapmixed_ext import _C; print(_C.instruction_set(), _C.__file__)"
    name, path = run(environment, "-c", program).split()
    assert name == "avx512" and path.startswith(str(emulated.BUILD))


def test_kernel_tests_pass(environment: dict[str, str]) -> None:
    files = [KERNELS / f"test_{name}.py" for name in ("chacha", "gaussian", "offsets", "sample")]
    chosen = "avx512 or every_path or by_the_stream or leave_open"
    output = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen)
    (passed,) = re.findall(r"(\d+) passed", output)
    assert int(passed) >= 50 and "skipped" not in output, output


def test_fuzzed_calls(environment: dict[str, str]) -> None:
    output = run(environment, KERNELS / "fuzz.py", "--isa", "avx512", "--count", 60)
    assert re.search(r"^60 cases .* 0 failures$", output, re.MULTILINE), output
