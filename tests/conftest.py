"""Files with one long step go first, so that no process waits for it at the end; the ensemble of
the demonstration is trained once, by the first process that needs it."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

_FIRST = (
    "packaging/test_distribution.py",
    "isa/test_emulated_avx512.py",
    "cuda_on_cpu/test_sizes.py",
    "driver/test_train_kill.py",
    "driver/test_tutorial.py",
)
_RANKS = {Path(__file__).parent / name: rank for rank, name in enumerate(_FIRST)}
_DEMO = "ADAPMIXED_TESTS_DEMO"  # of `trained_demo`; processes that are started here inherit it


def pytest_configure(config: pytest.Config) -> None:
    if _DEMO not in os.environ:
        os.environ[_DEMO] = tempfile.mkdtemp(prefix="adapmixed-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(_DEMO)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _RANKS.get(item.path, len(_RANKS)))


@pytest.fixture(scope="session")
def demo_ensemble() -> Path:
    """Folder of the demonstration's ensemble."""
    from trained_demo import trained

    return trained()
