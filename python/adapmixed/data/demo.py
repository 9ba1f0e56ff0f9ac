"""The demonstration's public model, which comes with the package, and its held-out text."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from adapmixed.data.builtin import held_out_documents


def demo_base() -> Path:
    """Return the folder of the demonstration's public model and tokenizer.

    Raises:
        FileNotFoundError: if the package was installed without its assets.
    """
    folder = Path(str(files("adapmixed").joinpath("assets", "demo", "base")))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"the demonstration's base must be installed, but {folder} has no config.json "
            "(scripts/build_demo_base.py writes it)"
        )
    return folder


def held_out_text() -> list[str]:
    """Return the held-out text for evaluation, one string per paragraph."""
    return [document.text for document in held_out_documents()]
