"""The CUDA kernels' own source, run on a CPU and held to the bounds of the CPU's operators.

simt.h and scheduler.cpp replace the CUDA runtime. simulated.py builds the kernels against them
(with cmake, ninja and pybind11 of the `test` extra) and lets the public operators of adapmixed_ext,
which must be built, too, run them:

    with simulated.kernels("reverse"):
        adapmixed_ext.project(private, public, order=18, radius=3.6)

After a change of csrc, the next process that calls simulated.module() builds again.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "kernels"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
