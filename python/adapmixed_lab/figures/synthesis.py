"""The report of a synthesis as one self-contained HTML page, from ``synthesis.html``.

It measures likeness to real texts, and what synthetic ones tell of records that were planted.
Everything here is an unprotected function of the records, so it is for the operator only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from adapmixed.data import Corpus, Document
from adapmixed.errors import missing_extra
from adapmixed.evaluation.report import MISSING
from adapmixed.files import create_file, write_file
from adapmixed.synthesis import Synthesis
from adapmixed.text import plain_ids
from adapmixed_lab.figures.html import template
from adapmixed_lab.figures.style import COLOURS, DASHES, DrawnFigure, canvas

LEAST = 100
"""Texts on either side without which MAUVE says nothing."""
RESAMPLES, CLUSTERINGS = 50, 5
TOGETHER = 16  # texts that are read together
Features = NDArray[np.float32]


class Reader:
    """A public model as transformers runs it: it reads and writes texts without any prompt slot.

    Args:
        base: a folder or a hub name.
        dtype: of its weights.
        device: of its weights.
    """

    def __init__(self, base: Any, dtype: torch.dtype, device: str | torch.device = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        self._model = model.to(device).eval()

    @torch.no_grad()
    def features(self, texts: Sequence[Sequence[int]]) -> Features:
        """Return the last hidden state behind each text of tokens, (n, d)."""
        body, parts = self._model.base_model, [np.zeros((0, 1), dtype=np.float32)]
        for start in range(0, len(texts), TOGETHER):
            some = [torch.tensor(tokens) for tokens in texts[start : start + TOGETHER]]
            ids = pad_sequence(some, batch_first=True)  # what follows a token does not change it
            states = body(ids.to(self._model.device)).last_hidden_state
            ends = [row[len(tokens) - 1] for row, tokens in zip(states, some, strict=True)]
            parts.append(torch.stack(ends).float().cpu().numpy())
        return np.concatenate(parts[1:] or parts)

    @torch.no_grad()
    def write(
        self, prompt: Sequence[int], count: int, *, max_tokens: int, temperature: float,
        top_k: int | None, ends: Sequence[int],
    ) -> list[list[int]]:  # fmt: skip
        """Return the tokens of so many texts behind a prompt, without their ends."""
        ids = torch.tensor([prompt] * count, device=self._model.device)
        ending = list(ends) or [-1]
        written = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=True,
            temperature=temperature, top_k=top_k or 0, top_p=1.0, repetition_penalty=1.0,
            eos_token_id=ending, pad_token_id=ending[0],
        )  # fmt: skip
        return [until(row, ending) for row in written[:, len(prompt) :].tolist()]


def until(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """Return the tokens before the first that ends a text."""
    stops = [place for place, token in enumerate(tokens) if token in ends]
    return list(tokens[: min(stops, default=len(tokens))])


def mauve(texts: Features, others: Features) -> float:
    """Return MAUVE of two sets of features: 1 for equal distributions (arXiv 2102.01454).

    It is the mean over `CLUSTERINGS` clusterings, since that of one depends on its seed.

    Raises:
        ValueError: the package mauve-text is missing.
    """
    try:
        from mauve import compute_mauve
    except ModuleNotFoundError as error:
        raise missing_extra("MAUVE", "mauve-text", "synthesize", error) from error
    scores = []
    with _silent():
        for seed in range(CLUSTERINGS):
            result = compute_mauve(texts, others, verbose=False, seed=seed, kmeans_num_redo=1)
            scores.append(float(result.mauve))
    return float(np.mean(scores))


def centred(value: float, resampled: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % interval: the quantiles of resamples, moved so that their mean is the value.

    Resamples hold fewer different texts, so their MAUVE is lower than that of as many new ones.
    """
    low, high = np.quantile(resampled, (0.025, 0.975)) - np.mean(resampled) + value
    return float(low), float(high)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what faiss writes about few texts for a cluster from standard error."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def mauve_interval(texts: Features, others: Features) -> tuple[float, float, float] | None:
    """Return MAUVE and a 95 % interval, by resampling both sets; None for too few texts."""
    if min(len(texts), len(others)) < LEAST:
        return None
    rng = np.random.default_rng(0)
    again = []
    for _ in range(RESAMPLES):
        sample, other = (some[rng.integers(len(some), size=len(some))] for some in (texts, others))
        again.append(mauve(sample, other))
    value = mauve(texts, others)
    low, high = centred(value, again)
    return value, max(0.0, low), min(1.0, high)


@dataclass(frozen=True)
class Canaries(Corpus):
    """A corpus and records that were made up, each under a name and with a code of its own.

    Attributes:
        codes: of these records.
        describe: what a record is.
    """

    codes: tuple[str, ...] = ()
    describe: str = ""

    @classmethod
    def among(cls, corpus: Corpus, describe: str, count: int, folder: Path) -> Canaries:
        """Return a corpus with so many more records, whose codes the folder keeps."""
        fresh = [f"{secrets.randbelow(10**8):08}" for _ in range(count)]
        create_file(folder / "codes.json", json.dumps(fresh).encode())
        codes = json.loads((folder / "codes.json").read_text(encoding="utf-8"))
        values = {field.name: getattr(corpus, field.name) for field in fields(corpus) if field.init}
        return cls(**values, codes=tuple(codes[:count]), describe=describe)

    def documents(self, render: Any = None) -> Iterator[Document]:
        """Yield the documents of the corpus, and those that were made up."""
        yield from super().documents(render)
        for number, code in enumerate(self.codes):
            yield Document(f"\0planted {number}", record_of(self.describe, code))

    @property
    def records(self) -> tuple[str, ...]:
        """The records that were made up."""
        return tuple(record_of(self.describe, code) for code in self.codes)


def record_of(describe: str, code: str) -> str:
    """Return a record that holds a code."""
    return f"{describe}: the code is {code}."


def exposures(
    run: Synthesis, corpus: Canaries, texts: Mapping[int, str]
) -> list[tuple[bool, float]]:
    """Return, for each planted record, whether its code was written out, and its exposure.

    The exposure is log2 R − log2 of the rank of the true code among R. Codes are ranked by how
    likely they make the text of the record's batch, if each is the record of a prompt: more than
    anybody who sees the text alone can know. By chance it is 1.44 bits for large R.
    """
    ensemble, result = run.ensemble, []
    for code, planted in zip(corpus.codes, corpus.records, strict=True):
        batch = next((at for at, slots in enumerate(run.batches.slots) if planted in slots), None)
        if batch is None or not (tokens := run.journal.tokens[batch]):
            continue
        others = [_other(corpus.describe, code, at) for at in range(1, ensemble.num_models)]
        ids = torch.tensor([[*ensemble.opening, *tokens]])
        likely = torch.zeros(ensemble.num_models, dtype=torch.float64)
        first = len(ensemble.opening) - 1
        filled = ensemble.filled([planted, *others])
        for span, private, _, _ in filled.iter_logits(ids, memory_bytes=run.memory_bytes):
            for at in range(max(span.start, first), min(span.stop, ids.shape[1] - 1)):
                rows = private[:, 0, at - span.start].double().log_softmax(-1)
                likely += rows[:, ids[0, at + 1]].cpu()
        rank = 1 + int((likely[1:] >= likely[0]).sum())
        result.append((code in texts[batch], math.log2(len(likely)) - math.log2(rank)))
    return result


def chance(ranks: int) -> float:
    """Return the mean exposure of a code that nothing tells of, among so many."""
    return math.log2(ranks) - sum(map(math.log2, range(1, ranks + 1))) / ranks


def _other(describe: str, code: str, number: int) -> str:
    """Return the same record with another code."""
    digest = hashlib.blake2b(f"{number} {code}".encode()).digest()
    return record_of(describe, f"{int.from_bytes(digest, 'big') % 10**8:08}")


EXAMPLES, READ = 5, 500
"""Texts that are shown of each kind; records of each kind that are read."""


def write_page(
    run: Synthesis, corpus: Canaries, texts: Mapping[int, str], base: Any, folder: Path
) -> Path:
    """Write synthesis.html, which holds records.

    Args:
        run: whose texts are all drawn.
        corpus: of the records.
        texts: by batch.
        base: a folder or a hub name.
        folder: of the page; it must exist.
    """
    ensemble, most = run.ensemble, run.most
    ends = sorted(ensemble.end_tokens)
    reader = Reader(base, ensemble.dtype, ensemble.device)
    public = reader.write(
        ensemble.public_prompt, len(texts), max_tokens=most, temperature=run.temperature,
        top_k=run.top_k, ends=ends,
    )  # fmt: skip
    planted, decode = corpus.records, ensemble.tokenizer.decode
    shown = [r for batch in run.batches.slots for r in batch if r is not None and r not in planted]
    kept = [record for record in run.batches.left_out if record not in planted][:READ]
    samples = [str(decode(ids, skip_special_tokens=True)).strip() for ids in public[:EXAMPLES]]
    unseen = [textwrap.shorten(record, 600) for record in kept[:EXAMPLES]]
    tokens = {
        "synthetic": [until(run.journal.tokens[batch], ends) for batch in texts],
        "public model alone": public,
        "records in prompts": [_cut(run, r) for r in shown[:: max(1, len(shown) // READ)]],
        "records in no prompt": [_cut(run, r) for r in kept],
    }
    page: str = template("synthesis.html").render(
        promise=run.promise,
        plan=_plan(run, len(corpus.codes)),
        likeness=[("texts", "number", "MAUVE", "95 %"), *_likeness(reader, run, tokens)],
        least=LEAST,
        lengths=_lengths(tokens),
        leaks=_leaks(exposures(run, corpus, texts), run.ensemble.num_models),
        examples=[
            ("Synthetic", list(texts.values())[:EXAMPLES]),
            ("The public model alone", samples),
            ("Records that no prompt held", unseen),
        ],
    )
    path = folder / "synthesis.html"
    write_file(path, page.encode())
    return path


def _cut(run: Synthesis, record: str) -> list[int]:
    """Return a record's tokens, as many as a text has at most."""
    ids = plain_ids(run.ensemble.tokenizer, record)
    return [token for token in ids if token < run.ensemble.vocab_size][: run.most]


def _plan(run: Synthesis, planted: int) -> list[tuple[str, str]]:
    """Return the settings and the counts of records."""
    pool, dealt = run.mechanism, run.batches
    return [
        ("mechanism", f"ClippedLogPool, clip [{pool.lower:g}, {pool.upper:g}], κ = {pool.scale:g}"),
        ("batches", f"{len(dealt.slots)}, of {run.ensemble.num_models} slots each"),
        ("tokens of a text", f"at most {run.most}"),
        ("temperature, top-k", f"{run.temperature:g}, {run.top_k or 'all'}"),
        ("names", f"{dealt.names}, with {planted} that were planted"),
        ("names that found their batch full", f"{len(dealt.left_out)}"),
        ("empty slots", f"{dealt.empty}"),
        ("records that were cut", f"{run.cut}"),
    ]


def _likeness(
    reader: Reader, run: Synthesis, tokens: Mapping[str, list[list[int]]]
) -> list[tuple[str, ...]]:
    """Return a row for each kind of text but the last, which all are compared with."""
    start = [*run.ensemble.beginning] or sorted(run.ensemble.end_tokens)[:1]
    features: dict[str, Features] = {
        name: reader.features([[*start, *text] for text in texts]) for name, texts in tokens.items()
    }
    *names, last = features
    rows = []
    for name in names:
        value = mauve_interval(features[name], features[last])
        cells = (MISSING, MISSING) if value is None else (
            f"{value[0]:.3f}", f"[{value[1]:.3f}, {value[2]:.3f}]"
        )  # fmt: skip
        rows.append((name, str(len(tokens[name])), *cells))
    return [*rows, (last, str(len(tokens[last])), MISSING, MISSING)]


def _lengths(tokens: Mapping[str, list[list[int]]]) -> DrawnFigure:
    """Draw the distribution of lengths."""
    with canvas(2.8) as (figure, axes):
        for (name, texts), colour, line in zip(tokens.items(), COLOURS, DASHES, strict=False):
            sizes = np.sort([len(text) for text in texts])
            shares = np.arange(1, len(sizes) + 1) / max(1, len(sizes))
            axes.step(sizes, shares, where="post", color=colour, linestyle=line, label=name)
        axes.set_xlabel("tokens")
        axes.set_ylabel("share of texts")
        axes.legend()
    return DrawnFigure(
        "lengths", "Lengths of texts",
        "The share of texts that have at most so many tokens, without their end. Records are cut "
        "to the most tokens of a text.", figure,
    )  # fmt: skip


def _leaks(measured: list[tuple[bool, float]], size: int) -> list[tuple[str, str]]:
    """Return the exposure of the planted records that stood in batches of this size."""
    written = sum(seen for seen, _ in measured)
    mean = f"{np.mean([bits for _, bits in measured]):.2f} bits" if measured else MISSING
    return [
        ("planted records in a batch", f"{len(measured)}"),
        ("their codes that a text holds", f"{written}"),
        ("mean exposure", f"{mean}, by chance {chance(size):.2f}"),
    ]
