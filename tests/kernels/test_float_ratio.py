"""The error bounds of csrc/common/float_ratio.h, on every float and on random logits."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_errors_are_as_counted(tmp_path: Path) -> None:
    program = tmp_path / "float_ratio_errors"
    source = Path(__file__).with_name("float_ratio_errors.cpp")
    flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-Wall", "-Wextra"]
    definitions = ["-DADAPMIXED_ISA=checked", f"-I{ROOT / 'csrc'}"]
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run([*compiler, *flags, *definitions, "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    of_zero, of_one, of_two, of_all, of_q, of_split = map(float, printed.split())
    # kRatioUnits consists of these two and two roundings of f.
    assert 2.0 < of_zero < 2.27 and 2.8 < of_one < 2.97 and of_two < of_one
    assert 0.5 < of_all < 1.0  # of the allowed error
    assert 1.5 < of_q < 3.0 and 0.9 < of_split <= 1.0
