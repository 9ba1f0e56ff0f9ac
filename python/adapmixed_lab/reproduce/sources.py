"""The sources of an experiment's inputs, which are options of ``adapmixed-lab reproduce``.

| scale | models | text | DP-SGD |
| --- | --- | --- | --- |
| builtin | the demonstration's 64 adapters | its held-out topics | trained here, small |
| full | one of `adapmixed train --preset` | the data set's test split | `adapmixed-lab dp-sgd` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adapmixed.commands.options import PRESETS, option

if TYPE_CHECKING:
    from adapmixed.data import Corpus
    from adapmixed.ensemble import Ensemble

BASE = "gpt2"
"""The paper's public model, by its hub name."""
TEXTS = {"wikitext-103": "hub:Salesforce/wikitext:wikitext-103-raw-v1"}
"""Evaluation texts on the hub, for the data sets that `datasets` can read there."""


@dataclass(frozen=True)
class Sources:
    """The sources of the inputs; None chooses the scale's own."""

    dataset: str = option("data set whose settings are used", PRESETS[0], choices=PRESETS)
    paper: bool = option("put the paper's numbers for the data set next to these")
    scale: str = option(
        "builtin: bundled models and text; full: your own, as in the paper",
        "builtin",
        choices=("builtin", "full"),
    )
    base: str | None = option(f"public model: folder or hub name (default: {BASE})")
    ensemble: Path | None = option("ensemble folders of 'adapmixed train'", nargs="+")
    text: str | None = option(
        "test text, as --corpus of 'adapmixed train', of the hub its split 'test' (default: "
        "WikiText-103's)"
    )
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.scale == "builtin":
            for name in ("base", "ensemble", "text"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} applies to scale 'full', got {getattr(self, name)} at 'builtin'"
                    )
            return
        if self.ensemble is None:
            raise ValueError(
                f"ensemble must be given at scale 'full': the folder that 'adapmixed train "
                f"--preset {self.dataset}' wrote"
            )
        if self.text is None and self.dataset not in TEXTS:
            raise ValueError(
                f"text must be given at scale 'full' for {self.dataset}: a file, a folder or "
                f"hub:NAME with its test split"
            )

    @property
    def public_model(self) -> str:
        """Folder or hub name of the public model."""
        from adapmixed.data import demo_base

        return str(demo_base()) if self.scale == "builtin" else self.base or BASE

    def load(self, adapters: Path | Sequence[Path]) -> Ensemble:
        """Load the public model with an ensemble folder or with single adapters."""
        import torch

        from adapmixed.ensemble import Ensemble

        dtype = getattr(torch, self.dtype)
        return Ensemble.from_pretrained(
            self.public_model, adapters, dtype=dtype, device=self.device
        )

    def corpus(self) -> Corpus:
        """Return the evaluation text of the full scale."""
        from adapmixed.data import Corpus
        from adapmixed.training import settings

        source = TEXTS[self.dataset] if self.text is None else self.text
        corpus = Corpus(source, split="test" if source.startswith("hub:") else None)
        return corpus.with_new_document(settings.PRESETS[self.dataset].new_document)
