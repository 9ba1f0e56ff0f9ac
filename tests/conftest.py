"""Files with one long step go first, so that no process waits for it at the end."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _RANKS.get(item.path, len(_RANKS)))
