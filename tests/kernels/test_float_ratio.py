"""The error bounds of csrc/common/float_ratio.h and csrc/project/terms.h, against double."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def printed(header: str, folder: Path) -> list[float]:
    """Return the largest errors of a header."""
    program = folder / "program"
    flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-Wall", "-Wextra"]
    definitions = ["-DADAPMIXED_ISA=checked", f"-I{ROOT / 'csrc'}"]
    compiler = os.environ.get("CXX", "c++").split()
    path = Path(__file__).with_name("float_errors.cpp")
    subprocess.run([*compiler, *flags, *definitions, "-o", program, path], check=True)
    found = subprocess.run([program, header], check=True, capture_output=True, text=True).stdout
    return [float(word) for word in found.split()]


@pytest.mark.slow
def test_errors_are_as_counted(tmp_path: Path) -> None:
    of_zero, of_one, of_two, of_all, of_q, of_split = printed("ratio", tmp_path)
    # kRatioUnits consists of these two and two roundings of f.
    assert 2.0 < of_zero < 2.27 and 2.8 < of_one < 2.97 and of_two < of_one
    assert 0.5 < of_all < 1.0  # of the allowed error
    assert 1.5 < of_q < 3.0 and 0.9 < of_split <= 1.0


def test_terms_of_project_are_as_close_as_their_bounds_say(tmp_path: Path) -> None:
    careful, chains, powers = printed("terms", tmp_path)
    assert 0.3 < careful < 0.9 and 0.2 < powers < 0.9
    assert chains <= 0.5  # what raises lambda covers most of theirs
