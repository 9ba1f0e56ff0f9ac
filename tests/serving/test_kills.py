"""A server that is killed under load has charged all that its clients got: see kill_server.py."""

from __future__ import annotations

import subprocess
import sys
from os import environ, pathsep
from pathlib import Path

import pytest
from serving_cases import IN_VLLM
from trained_demo import DEMO_ENSEMBLE

PROGRAM = Path(__file__).with_name("kill_server.py")


def killed(*options: str) -> str:
    """Run the program and return its last line."""
    command = [sys.executable, str(PROGRAM), *options]
    helpers = str(Path(__file__).parents[1] / "helpers")
    paths = [helpers, *(one for one in sys.path if one)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environ | {"PYTHONPATH": pathsep.join(paths)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("demo_ensemble")
@pytest.mark.parametrize(
    "options",
    [
        ("--count", "60"),
        ("--count", "5", "--real", "--ensemble", str(DEMO_ENSEMBLE)),
        pytest.param(("--count", "3", "--vllm"), marks=IN_VLLM),
    ],
    ids=["stub", "real", "vllm"],
)
def test_clients_never_get_more_than_was_charged(options: tuple[str, ...]) -> None:
    line = killed(*options)
    assert line.startswith(f"{options[1]} kills")
    assert "counted 0 tokens" not in line
