"""The demonstration's public model, which comes with the package, and its held-out text."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from adapmixed.data.builtin import held_out_documents


def demo_base() -> Path:
    """Return the folder of the demonstration's public model and tokenizer."""
    return Path(str(files("adapmixed").joinpath("assets", "demo", "base")))


def held_out_text() -> list[str]:
    """Return the held-out text for evaluation, one string per paragraph."""
    return [document.text for document in held_out_documents()]
