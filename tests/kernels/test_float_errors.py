"""The errors of single precision, against double: what the headers of csrc count.

The largest errors that were found are not far below their bounds, so a constant that is too small
does not pass.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Printed = Callable[[str], list[float]]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """Return a function that returns the largest errors of a header."""
    program = tmp_path_factory.mktemp("errors") / "program"
    flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-Wall", "-Wextra"]
    definitions = ["-DADAPMIXED_ISA=checked", f"-I{ROOT / 'csrc'}"]
    compiler = os.environ.get("CXX", "c++").split()
    path = Path(__file__).with_name("float_errors.cpp")
    subprocess.run([*compiler, *flags, *definitions, "-o", program, path], check=True)

    def run(header: str) -> list[float]:
        done = subprocess.run([program, header], check=True, capture_output=True, text=True)
        return [float(word) for word in done.stdout.split()]

    return run


@pytest.mark.slow
def test_ratios(printed: Printed) -> None:
    of_zero, of_one, of_two, of_all, of_q, of_split = printed("ratio")
    # kRatioUnits consists of these two and two roundings of f.
    assert 2.0 < of_zero < 2.27 and 2.8 < of_one < 2.97 and of_two < of_one
    assert 0.5 < of_all < 1.0  # of the allowed error
    assert 1.5 < of_q < 3.0 and 0.9 < of_split <= 1.0


def test_terms_of_project(printed: Printed) -> None:
    for share in printed("terms"):
        assert 0.3 < share < 0.9


def test_terms_of_losses(printed: Printed) -> None:
    own, mean, moved, power = printed("losses")
    assert 0.3 < own < 0.9 and 0.2 < mean < 0.9 and 0.5 < power < 0.9
    assert 0.9 < moved <= 1.0  # this one has no roundings


def test_terms_of_divergences(printed: Printed) -> None:
    entropy, excess, small, large = printed("divergences")
    assert 10.0 < entropy < 12.0 and 10.0 < excess < 12.0
    assert 0.2 < small < 0.9 and 0.5 < large < 0.9
