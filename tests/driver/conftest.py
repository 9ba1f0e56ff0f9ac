"""Fixtures over the model families; one thread, so that runs compare bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TARGETS, VOCAB, tiny_model, write_adapter


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["gpt2", "llama"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(family: str) -> Any:
    return tiny_model(family)


@pytest.fixture
def make_adapters(base: Any, family: str, tmp_path: Path) -> Callable[..., list[Path]]:
    """make_adapters(n, first=0, **settings) writes n adapters with seeds first, first + 1, ..."""

    def make(count: int, first: int = 0, **settings: Any) -> list[Path]:
        arguments = {"target_modules": TARGETS[family]} | settings
        return [
            write_adapter(base, tmp_path / f"adapter-{seed}", seed=seed, **arguments)
            for seed in range(first, first + count)
        ]

    return make


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(7))
