"""A tiny public model in a folder, and the files of an uninterrupted run over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_cases import a_run, trained, write_base


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "tiny-base")


@pytest.fixture(scope="session")
def reference(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    torch.set_num_threads(1)
    return trained(a_run(tmp_path_factory.mktemp("reference"), tiny))
