"""Plant every fault of `faults` in a copy of the sources; one of its tests must fail.

    python -m tests.promises.plant [--only WORD] [--python-only] [--keep-going]

The copy holds all files that git tracks or does not ignore, and the compiled module. First, all
named tests run there without a fault, and must pass. Then each fault is planted alone, its tests
run, and its file is restored. Faults in csrc/ need cmake, ninja and pybind11, and share one build
folder. One line per fault names the test that caught it. The exit status is 1 if a fault was not
caught, or if a test fails without a fault.

Options:
    --only WORD     plant the faults with this word in their promise, file or description.
    --python-only   leave out the faults of the compiled module.
    --keep-going    continue after a fault that was not caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.compiled import build_module, copy_module

from .faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
SECONDS = 600.0
"""Seconds that the tests of one fault may take."""

_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Copy:
    """A copy of the tree, in which faults are planted one at a time."""

    def __init__(self, folder: Path) -> None:
        """Copy all files that git knows or does not ignore, and the compiled module."""
        self.root = folder / "tree"
        self._build = folder / "build"
        self._module = folder / "module"
        self._demo = folder / "demo"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in found.stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        for made in (self._module, self._demo):
            made.mkdir()
        copy_module(ROOT / "adapmixed_ext", self._module)
        copy_module(self._module, self.root / "adapmixed_ext")

    def build(self) -> None:
        """Build the compiled module from the sources of the copy and put it in its place.

        Raises:
            RuntimeError: the module cannot be built.
        """
        build_module(self.root, self._build)

    def keep_module(self) -> None:
        """Remember the present module as the one without a fault."""
        copy_module(self.root / "adapmixed_ext", self._module)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Plant a fault in the copy; restore its file and the module afterwards.

        Raises:
            ValueError: the fault's text does not occur exactly once.
        """
        path = self.root / fault.file
        text = path.read_text(encoding="utf-8")
        if text.count(fault.old) != 1:
            raise ValueError(f"{fault.file} must hold {fault.old!r} once: {fault.what}")
        try:
            path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
            if fault.compiled:
                self.build()
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            copy_module(self._module, self.root / "adapmixed_ext")

    def run(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """Run tests until one fails.

        Args:
            tests: files or single tests, from the root.

        Returns:
            The exit status of pytest, or None if it took too long, and its output.
        """
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (self.root / "python", self.root))),
            "PYTHONDONTWRITEBYTECODE": "1",  # a restored file may be as old and long as the fault
            "ADAPMIXED_TESTS_DEMO": str(self._demo),  # is trained once, without a fault
        }
        process = subprocess.Popen(
            command, cwd=self.root, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None, ""
            raise
        return process.returncode, output


def verdict(status: int | None, output: str) -> tuple[bool, str]:
    """Return True if a fault was caught, and a description.

    Only a test that fails catches a fault, not a test that cannot be collected.

    Args:
        status: exit status from `Copy.run`.
        output: output from `Copy.run`.
    """
    if status == 1:
        found = _FAILED.search(output)
        return True, f"caught by {found[1] if found else 'a test'}"
    why = {None: f"no answer within {SECONDS:g} s", 0: "all tests passed"}
    return False, f"NOT CAUGHT: {why.get(status, f'pytest ended with status {status}')}"


def chosen(only: str | None, python_only: bool) -> list[Fault]:
    """Return the faults that the options ask for."""
    return [
        one
        for one in FAULTS
        if not (python_only and one.compiled)
        and (only is None or only.lower() in f"{one.promise} {one.file} {one.what}".lower())
    ]


def plant(faults: Sequence[Fault], *, keep_going: bool = False) -> int:
    """Plant these faults one after the other and print which test caught each.

    Returns:
        0 if all were caught, otherwise 1.
    """
    missed = 0
    with tempfile.TemporaryDirectory(prefix="adapmixed-faults-") as folder:
        copy = Copy(Path(folder))
        if any(fault.compiled for fault in faults):
            started = time.monotonic()
            copy.build()
            copy.keep_module()
            _say("built", started, "without a fault")
        started = time.monotonic()
        status, output = copy.run(_distinct(test for fault in faults for test in fault.tests))
        if status != 0:
            print(output)
            _say("control", started, f"FAILED: without a fault pytest ended with status {status}")
            return 1
        _say("control", started, "all tests pass without a fault")
        for number, fault in enumerate(faults, 1):
            started = time.monotonic()
            with copy.planted(fault):
                caught, words = verdict(*copy.run(fault.tests))
            missed += not caught
            _say(f"{number}/{len(faults)}", started, f"{fault.promise}: {fault.what}: {words}")
            if missed and not keep_going:
                break
    print(f"{missed} faults were not caught" if missed else "every fault was caught")
    return 1 if missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.promises.plant")
    parser.add_argument(
        "--only", metavar="WORD", help="only faults with this word in promise, file or description"
    )
    parser.add_argument("--python-only", action="store_true", help="leave out faults in csrc/")
    parser.add_argument("--keep-going", action="store_true", help="continue after a miss")
    options = parser.parse_args(arguments)
    faults = chosen(options.only, options.python_only)
    if not faults:
        parser.error(f"no fault has {options.only!r} in its promise, file or description")
    return plant(faults, keep_going=options.keep_going)


def _distinct(tests: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(tests))


def _say(what: str, started: float, words: str) -> None:
    print(f"{what:>8} {time.monotonic() - started:6.1f} s  {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
