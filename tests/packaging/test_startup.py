"""Importing the package or asking for help loads no heavy package, so a user does not wait."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "torch", "numpy", "transformers", "tokenizers", "peft", "safetensors", "dp_accounting", "tqdm",
    "scipy", "matplotlib", "opacus", "datasets", "adapmixed_ext", "importlib.metadata",
    "starlette", "uvicorn", "prometheus_client",
}  # fmt: skip

HELP = """
import contextlib, io
from adapmixed.cli import main
out = io.StringIO()
with contextlib.redirect_stdout(out):
    try:
        main({arguments})
    except SystemExit as ended:
        assert not ended.code
assert out.getvalue().startswith({start!r}), out.getvalue()
"""


def loaded_after(program: str) -> set[str]:
    """Return the names in sys.modules that a program adds to those of the interpreter's start."""
    # An editable install may import packages of its own at the start.
    whole = f"import sys\nbefore = set(sys.modules)\n{program}\nprint(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "program",
    [
        "import adapmixed; adapmixed.__version__",
        HELP.format(arguments=["--help"], start="usage: adapmixed"),
        HELP.format(arguments=["--version"], start="adapmixed "),
        HELP.format(arguments=["evaluate", "--help"], start="usage: adapmixed evaluate"),
        HELP.format(arguments=["serve", "--help"], start="usage: adapmixed serve"),
    ],
    ids=[
        "import adapmixed",
        "adapmixed --help",
        "adapmixed --version",
        "evaluate --help",
        "serve --help",
    ],
)
def test_nothing_heavy_is_imported(program: str) -> None:
    loaded = loaded_after(program)
    assert "adapmixed" in loaded
    assert not loaded & HEAVY
