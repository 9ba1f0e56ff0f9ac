"""A tiny public model in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_cases import write_base


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "tiny-base")
