"""The inputs of an experiment: models, evaluation text, and the length of the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from adapmixed.data import Document, held_out_documents
from adapmixed.data.corpus import HUB
from adapmixed.evaluation import evaluate
from adapmixed.mechanisms import Mechanism, UnprotectedPool
from adapmixed.rng import SeededRandom
from adapmixed.training.blocks import token_stream
from adapmixed.training.demo import train_demo
from adapmixed_lab.reproduce.paper import DELTA
from adapmixed_lab.reproduce.sources import Sources

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

SCALES_TRIED = (1, 2, 4, 8)
"""κ of the non-private pools of which the best is shown."""
_OTHER = 1024  # tokens to choose κ on


@dataclass(frozen=True)
class Texts:
    """The inputs of an experiment.

    Attributes:
        sources: where they come from.
        ensemble: the models.
        tokens: the evaluation text as one stream, each document followed by the end-of-text token.
        text: name of the text, without a path.
        other: the text after it, on which the best non-private pool is chosen.
        whole: folder of one adapter that was trained on the text of all shards; None for none.
    """

    sources: Sources
    ensemble: Ensemble
    tokens: tuple[int, ...]
    text: str
    other: tuple[int, ...] = ()
    whole: Path | None = None

    @cached_property
    def pool(self) -> float | None:
        """κ of the best non-private pool on `other`; None without such text."""
        if len(self.other) < 2:
            return None
        pools: dict[str, Mechanism] = {repr(one): UnprotectedPool(one) for one in SCALES_TRIED}
        rng, delta = SeededRandom(0), DELTA
        found = evaluate(self.ensemble, self.other, pools, delta=delta, rng=rng, active=None)
        return float(min(found, key=lambda one: one.perplexity).name)

    def description(self) -> dict[str, object]:
        """Describe the inputs for a result file, without paths."""
        sources, base = self.sources, self.sources.public_model
        base = Path(base).name if Path(base).is_dir() else base
        return {
            "dataset": sources.dataset,
            "scale": sources.scale,
            "base": "built-in" if sources.scale == "builtin" else base,
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
        """Return the notes on the references and on what the models stand for."""
        notes = []
        if self.pool is not None:
            notes.append(
                "The best non-private pool is the unclipped logarithmic pool, with the best κ of "
                f"{SCALES_TRIED} on text after the evaluation's: {self.pool:g}. No line is bounded "
                "by it or by the unprotected ensemble."
            )
        if self.sources.scale == "full":
            return notes
        return [
            *notes,
            f"builtin: a 1.1-million-parameter GPT-2 with {self.ensemble.num_models} members over "
            "Python's documentation stands in for GPT-2 small over "
            f"{self.sources.dataset}. The members adapt the output layer alone. Some shards "
            "are empty, and their members answer as the public model. The paper's settings are "
            f"those of {self.sources.dataset}. Perplexities and ε are comparable in their order at "
            "best, not in their size. A DP-SGD adapter trained here had a minute of training, and "
            "is no measure of what DP-SGD can do.",
        ]


def load_inputs(sources: Sources, folder: Path, *, most: int | None = None, seed: int = 0) -> Texts:
    """Load models and text.

    The end of the text is kept to choose the best non-private pool, and is not evaluated.

    Args:
        sources: where they come from.
        folder: parent of the built-in ensemble's folder ``ensemble``, which is trained if missing.
        most: most tokens wanted; reading stops after the document that reaches this number.
        seed: of the built-in ensemble's training and division.

    Raises:
        ValueError, OSError: as `Ensemble.from_pretrained` and `Corpus`, or if the base has no
            tokenizer.
    """
    documents: Iterable[Document]
    if sources.scale == "builtin":
        adapters = train_demo(folder / (f"ensemble-{seed}" if seed else "ensemble"), seed=seed)
        documents, name = held_out_documents(), "held-out topics"
    else:
        assert sources.ensemble is not None  # checked by Sources
        corpus = sources.corpus()
        adapters, documents = sources.ensemble, corpus.documents()
        name = corpus.name.removeprefix(HUB).rpartition("/")[2]
    ensemble = sources.load(adapters)
    if ensemble.tokenizer is None:
        raise ValueError(f"base must have a tokenizer, {sources.public_model} has none")
    stream: list[int] = []
    for document in documents:
        stream += token_stream(ensemble.tokenizer, [document.text], ensemble.vocab_size)
        if most is not None and len(stream) >= most + _OTHER:
            break
    kept = len(stream) - min(_OTHER, len(stream) // 8)
    return Texts(sources, ensemble, tuple(stream[:kept]), name, tuple(stream[kept:]))
