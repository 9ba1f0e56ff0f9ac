"""Inputs of experiments, and checks of their figures and files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_ensemble import FakeEnsemble
from matplotlib.figure import Figure

from adapmixed_lab.cli import main
from adapmixed_lab.figures.style import svg_text
from adapmixed_lab.reproduce.drawing import draw
from adapmixed_lab.reproduce.inputs import Inputs, Sources
from adapmixed_lab.reproduce.result import read_experiment


def inputs(models: int = 3, tokens: int = 2000, **sources: Any) -> Inputs:
    """Return inputs with a small ensemble in place of the built-in one."""
    generator = torch.Generator().manual_seed(3)
    stream = torch.randint(0, 7, (tokens,), generator=generator).tolist()
    ensemble: Any = FakeEnsemble(models, spread=0.3, max_positions=32)
    return Inputs(Sources(**sources), ensemble, tuple(stream), "random")


def rows_of(result: dict[str, Any], method: str) -> list[dict[str, Any]]:
    return [one for one in result["rows"] if one["method"] == method]


def drawn(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, file: str, name: str
) -> list[Figure]:
    """Return the figures of this name that the module draws from a committed result."""
    figures: list[Figure] = []

    def noted(figure: Figure, found: str, title: str) -> str:
        if found == name:
            figures.append(figure)
        return svg_text(figure, found, title)

    monkeypatch.setattr(module, "svg_text", noted)
    draw(read_experiment(Path(__file__).parents[3] / "benchmarks" / "results" / file))
    return figures


def check_redrawn(written: list[Path], folder: Path) -> None:
    """Check that `adapmixed-lab report` on an experiment's JSON writes the same bytes again."""
    again = folder / "again"
    assert main(["report", str(written[0]), "--out", str(again)]) == 0
    assert sorted(path.name for path in written) == sorted(path.name for path in again.iterdir())
    for path in written:
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
