"""Ensembles: over the model families, and the demonstration's; one thread, so that runs compare
bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TARGETS, VOCAB, tiny_model, write_adapter

from adapmixed.data.demo import demo_base
from adapmixed.models import Ensemble, read_manifest, write_manifest


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


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends an answer: as many are charged as are asked for, whatever is drawn."""
    monkeypatch.setattr(Ensemble, "end_tokens", frozenset())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, demo_ensemble: Path) -> Ensemble:
    """The demo's first two members."""
    folder = tmp_path_factory.mktemp("ensemble")
    whole = read_manifest(demo_ensemble)
    write_manifest(folder, replace(whole, members=whole.members[:2], shards=whole.shards[:2]))
    for name in whole.members[:2]:
        (folder / name).symlink_to(demo_ensemble / name)
    return Ensemble.from_pretrained(demo_base(), folder)
