"""Print the GPU's name and architecture for gpu_check.sh, a line each.

Everything that is missing is named on standard error at once, and the status is 1. The variables
DRY and MODULE say that no GPU and no compiler are needed.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGES = {
    "torch": "built with CUDA",
    "numpy": "the tests need it",
    "mpmath": "the tests need it",
    "pytest": "the tests need it",
}
OPTIONAL = {
    "triton": "torch.compile does not work, and benchmarks without it fail",
    "peft": "tests/cuda/test_commands.py is not run",
    "dp_accounting": "tests/cuda/test_commands.py is not run",
}

TOOLS = {
    "compute-sanitizer": "its stages fail",
    "ncu": "its stage fails",
    "nvidia-smi": "the clocks are not known",
}


def missing_for_the_build() -> list[str]:
    """Return the names of the missing tools that a build needs."""
    missing = []
    if importlib.util.find_spec("pybind11") is None:
        missing.append("pybind11 >= 3.0 for this Python")
    for name in ("cmake", "ninja"):
        if shutil.which(name) is None:
            missing.append(name)
    cmake = shutil.which("cmake")
    if cmake:
        text = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"(\d+)\.(\d+)", text)
        if version is None or tuple(map(int, version.groups())) < (3, 24):
            missing.append(f"cmake >= 3.24 (there is {text.partition(chr(10))[0] or 'another'})")
    if shutil.which(os.environ.get("CUDACXX") or "nvcc") is None:
        missing.append("nvcc: put it on PATH or set CUDACXX")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        missing.append("a C++ compiler")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("the headers of this Python (Python.h)")
    return missing


def main() -> int:
    """Print the two lines, or what is missing."""
    dry = os.environ.get("DRY") == "true"
    missing = [] if sys.version_info >= (3, 11) else ["Python >= 3.11"]
    missing += [
        f"{name} for this Python ({why})"
        for name, why in PACKAGES.items()
        if importlib.util.find_spec(name) is None
    ]
    if not os.environ.get("MODULE"):
        missing += missing_for_the_build()
    name, architecture = "dry-run", "none"
    if importlib.util.find_spec("torch") is not None and not dry:
        import torch

        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            architecture = f"{major}{minor}-real"
            name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
        else:
            missing.append(f"a GPU that torch reaches (torch {torch.__version__}, CUDA "
                           f"{torch.version.cuda})")  # fmt: skip
    for item in missing:
        print(f"missing: {item}", file=sys.stderr)
    if missing:
        print(f"nothing was built; Python is {sys.executable}", file=sys.stderr)
        return 1
    for package, loss in OPTIONAL.items():
        if importlib.util.find_spec(package) is None:
            print(f"no {package}: {loss}", file=sys.stderr)
    for tool, loss in TOOLS.items():
        if shutil.which(tool) is None:
            print(f"no {tool}: {loss}", file=sys.stderr)
    print(name, architecture, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
