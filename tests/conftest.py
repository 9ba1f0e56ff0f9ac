"""Fixtures and order of the tests.

Files with one long step go first, so that no process waits for it at the end. One of them trains
the demonstration's ensemble, and those after it do not need it, so that no process waits for that
either. Tests use one thread, so that runs agree in every bit.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from adapmixed import Ensemble

_FIRST = (
    "docs/test_blocks.py",
    "ensemble/test_families.py",
    "serving/test_nothing_private.py",
    "serving/test_batch.py",
    "cuda_on_cpu/test_kernels.py",
    "packaging/test_distribution.py",
    "mechanisms/test_distributions.py",
    "lab/audit/test_audits.py",
    "test_headline.py",
    "test_benchmarks.py",
    "lab/commands/test_reproduce.py",
    "training/test_run.py",
)
_RANKS = {Path(__file__).parent / name: rank for rank, name in enumerate(_FIRST)}
_DEMO = "ADAPMIXED_TESTS_DEMO"  # read by `trained_demo`; child processes inherit it


def pytest_configure(config: pytest.Config) -> None:
    if _DEMO not in os.environ:
        os.environ[_DEMO] = tempfile.mkdtemp(prefix="adapmixed-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(_DEMO)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _RANKS.get(item.path, len(_RANKS)))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["gpt2", "llama"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(family: str) -> Any:
    from tiny_models import tiny_model

    return tiny_model(family)


@pytest.fixture
def make_adapters(base: Any, family: str, tmp_path: Path) -> Callable[..., list[Path]]:
    """Return make_adapters(n, first=0, **settings), which writes n adapters with seeds >= first."""
    from tiny_models import TARGETS, write_adapter

    def make(count: int, first: int = 0, **settings: Any) -> list[Path]:
        arguments = {"target_modules": TARGETS[family]} | settings
        return [
            write_adapter(base, tmp_path / f"adapter-{seed}", seed=seed, **arguments)
            for seed in range(first, first + count)
        ]

    return make


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Ensemble:
    """Return a tiny GPT-2 with three adapters."""
    from tiny_models import TARGETS, tiny_model, write_adapter

    from adapmixed import Ensemble

    base, folder = tiny_model("gpt2"), tmp_path_factory.mktemp("adapters")
    adapters = [
        write_adapter(base, folder / str(i), seed=i, target_modules=TARGETS["gpt2"])
        for i in range(3)
    ]
    return Ensemble.from_pretrained(base, adapters)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a ledger that is not there yet."""
    return tmp_path / "ledger.db"


@pytest.fixture
def ids() -> torch.Tensor:
    from tiny_models import VOCAB

    return torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no token end an answer, so that the number of charged tokens is known."""
    from adapmixed import Ensemble

    monkeypatch.setattr(Ensemble, "end_tokens", frozenset())


@pytest.fixture(scope="session")
def demo_ensemble() -> Path:
    """Return the folder of the demonstration's ensemble."""
    from trained_demo import trained

    return trained()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, demo_ensemble: Path) -> Ensemble:
    """Return an ensemble of the demonstration's first two members."""
    from adapmixed import Ensemble
    from adapmixed.data import demo_base
    from adapmixed.ensemble import read_manifest, write_manifest

    folder = tmp_path_factory.mktemp("ensemble")
    whole = read_manifest(demo_ensemble)
    write_manifest(folder, replace(whole, members=whole.members[:2], shards=whole.shards[:2]))
    for name in whole.members[:2]:
        (folder / name).symlink_to(demo_ensemble / name)
    return Ensemble.from_pretrained(demo_base(), folder)
