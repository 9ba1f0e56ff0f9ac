"""The inputs of an experiment: models, evaluation text, and the length of the text.

| scale | models | text | DP-SGD |
| --- | --- | --- | --- |
| builtin | the demonstration's 64 adapters | its held-out topics | trained here, small |
| full | one of `adapmixed train --preset` | the data set's test split | `adapmixed-lab dp-sgd` |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.data import Corpus, Document, demo_base, held_out_documents
from adapmixed.ensemble import read_manifest
from adapmixed.training.blocks import token_stream
from adapmixed.training.demo import train_demo
from adapmixed.training.presets import PRESETS
from adapmixed_lab.reproduce.paper import DATASETS

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

SCALES = ("builtin", "full")
BASE = "gpt2"
"""The paper's public model, by its hub name."""

TEXTS: Mapping[str, Mapping[str, str]] = {
    "wikitext-103": {"source": "hub:Salesforce/wikitext", "config": "wikitext-103-raw-v1"},
}
"""Evaluation texts on the hub, for the data sets that `datasets` can read there."""


@dataclass(frozen=True)
class Sources:
    """The sources of the inputs; None chooses the scale's own.

    Attributes:
        dataset: whose presets and paper numbers are used, one of `DATASETS`.
        scale: one of `SCALES`.
        base: folder or hub name of the public model (full: "gpt2").
        ensemble: ensemble folder; must be given at full scale.
        text: evaluation text at full scale: file, folder or "hub:NAME", as `Corpus` reads it.
        text_column: column with the text of a row.
        split, config: of a hub data set (split: "test"); a folder has splits, too.
        device, dtype: of the models, as `Ensemble.from_pretrained` takes them.
    """

    dataset: str = "wikitext-103"
    scale: str = "builtin"
    base: str | None = None
    ensemble: Path | None = None
    text: str | None = None
    text_column: str | None = None
    split: str | None = None
    config: str | None = None
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, allowed in (("dataset", DATASETS), ("scale", SCALES)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        given = ("base", "ensemble", "text", "text_column", "split", "config")
        if self.scale == "builtin":
            for name in given:
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
        settings: dict[str, Any] = dict(TEXTS.get(self.dataset, {})) if self.text is None else {}
        if self.text is not None:
            settings["source"] = self.text
        if self.config is not None:
            settings["config"] = self.config
        if self.text_column is not None:
            settings["text_column"] = self.text_column
        hub = settings["source"].startswith("hub:")
        corpus = Corpus(**settings, split=self.split or ("test" if hub else None))
        return corpus.with_new_document(PRESETS[self.dataset].new_document)


@dataclass(frozen=True)
class Inputs:
    """The inputs of an experiment.

    Attributes:
        sources: where they come from.
        ensemble: the models.
        tokens: the evaluation text as one stream, each document followed by the end-of-text token.
        text: name of the text, without a path.
        empty: number of shards of the built-in ensemble that hold no text.
    """

    sources: Sources
    ensemble: Ensemble
    tokens: tuple[int, ...]
    text: str
    empty: int = 0

    def description(self) -> dict[str, object]:
        """Describe the inputs for a result file, without paths."""
        sources = self.sources
        return {
            "dataset": sources.dataset,
            "scale": sources.scale,
            "base": _name(sources.public_model),
            "ensemble": "built-in" if sources.ensemble is None else sources.ensemble.name,
            "num_models": self.ensemble.num_models,
            "vocab_size": self.ensemble.vocab_size,
            "text": self.text,
            "tokens": len(self.tokens),
            "unverified": list(self.ensemble.unverified),
            "device": sources.device,
            "dtype": sources.dtype,
        }

    def notes(self) -> list[str]:
        """Return the notes that a reader needs before comparing with the paper."""
        if self.sources.scale == "full":
            return []
        return [
            f"builtin: a 1.1-million-parameter GPT-2 with {self.ensemble.num_models} members over "
            "Python's documentation stands in for GPT-2 small over "
            f"{self.sources.dataset}. The members adapt the output layer alone. {self.empty} of "
            f"the {self.ensemble.num_models} shards are empty, and their members answer as the "
            f"public model. The paper's settings are those of {self.sources.dataset}. Perplexities "
            "and ε are comparable in their order at best, not in their size. A DP-SGD adapter "
            "trained here had a minute of training, and is no measure of what DP-SGD can do."
        ]


def load_inputs(sources: Sources, folder: Path, *, most: int | None = None) -> Inputs:
    """Load models and text.

    Args:
        sources: where they come from.
        folder: parent of the built-in ensemble's folder ``ensemble``, which is trained if missing.
        most: most tokens wanted; reading stops after the document that reaches this number.

    Raises:
        ValueError, OSError: as `Ensemble.from_pretrained` and `Corpus`, or if the base has no
            tokenizer.
    """
    documents: Iterable[Document]
    empty = 0
    if sources.scale == "builtin":
        adapters = train_demo(folder / "ensemble")
        empty = sum(shard["documents"] == 0 for shard in read_manifest(adapters).shards)
        documents, name = held_out_documents(), "held-out topics"
    else:
        assert sources.ensemble is not None  # checked by Sources
        corpus = sources.corpus()
        adapters, documents, name = sources.ensemble, corpus.documents(), corpus.name
    ensemble = sources.load(adapters)
    if ensemble.tokenizer is None:
        raise ValueError(f"base must have a tokenizer, {sources.public_model} has none")
    tokens: list[int] = []
    for document in documents:
        tokens += token_stream(ensemble.tokenizer, [document.text])
        if most is not None and len(tokens) >= most:
            break
    return Inputs(sources, ensemble, tuple(tokens), name, empty)


def _name(base: str) -> str:
    return Path(base).name if Path(base).is_dir() else base
