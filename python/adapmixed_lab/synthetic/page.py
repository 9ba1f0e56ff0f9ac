"""The report of a synthesis as one self-contained HTML page, from ``synthesis.html``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapmixed.ensemble.vocabulary import plain_ids
from adapmixed.files import write_file
from adapmixed.report import MISSING
from adapmixed.synthesis import Synthesis
from adapmixed_lab.figures.html import template
from adapmixed_lab.figures.style import COLOURS, DASHES, DrawnFigure, canvas
from adapmixed_lab.synthetic.quality import (
    LEAST,
    Canaries,
    Features,
    Reader,
    chance,
    exposures,
    mauve_interval,
    shared_words,
    until,
)

EXAMPLES, READ = 5, 500
"""Texts that are shown of each kind; records of each kind that are read."""


def write_page(
    found: Synthesis, corpus: Canaries, texts: Mapping[int, str], base: Any, folder: Path
) -> Path:
    """Write synthesis.html, which holds records.

    Args:
        found: whose texts are all drawn.
        corpus: of the records.
        texts: by batch.
        base: a folder or a hub name.
        folder: of the page; it must exist.
    """
    ensemble, most = found.ensemble, found.most
    ends = sorted(ensemble.end_tokens)
    reader = Reader(base, ensemble.dtype, ensemble.device)
    public = reader.write(
        ensemble.public_prompt, len(texts), max_tokens=most, temperature=found.temperature,
        top_k=found.top_k, ends=ends,
    )  # fmt: skip
    made, decode = corpus.records, ensemble.tokenizer.decode
    shown = [r for batch in found.batches.slots for r in batch if r is not None and r not in made]
    kept = [record for record in found.batches.left_out if record not in made][:READ]
    alone = [str(decode(one, skip_special_tokens=True)).strip() for one in public[:EXAMPLES]]
    unseen = [textwrap.shorten(one, 600) for one in kept[:EXAMPLES]]
    tokens = {
        "synthetic": [until(found.journal.tokens[batch], ends) for batch in texts],
        "public model alone": public,
        "records in prompts": [_cut(found, one) for one in shown[:: max(1, len(shown) // READ)]],
        "records in no prompt": [_cut(found, one) for one in kept],
    }
    page: str = template("synthesis.html").render(
        promise=found.promise,
        plan=_plan(found, len(corpus.codes)),
        plan_words="The settings follow from public numbers. The numbers of records are private.",
        likeness=[("texts", "number", "MAUVE", "95 %"), *_likeness(reader, found, tokens)],
        likeness_words=(
            "MAUVE compares the last hidden states of the public model behind the texts with those "
            "behind the records that no prompt held: it is 1 if they are alike. Intervals come "
            f"from resampling. Fewer than {LEAST} texts on either side are not compared."
        ),
        lengths=_lengths(tokens),
        leaks=_leaks(found, corpus, texts, kept),
        leaks_words=(
            "Shared words: the longest run of words that a text has in common with a record of "
            "its batch, or with one of as many records that no prompt held. A planted record has "
            "a code. The code is ranked among others by how likely each makes the text; the "
            "exposure is log2 of the number of codes less log2 of the rank."
        ),
        examples=[
            ("Synthetic", list(texts.values())[:EXAMPLES]),
            ("The public model alone", alone),
            ("Records that no prompt held", unseen),
        ],
    )
    path = folder / "synthesis.html"
    write_file(path, page.encode())
    return path


def _cut(found: Synthesis, record: str) -> list[int]:
    """Return a record's tokens, as many as a text has at most."""
    ids = plain_ids(found.ensemble.tokenizer, record)
    return [one for one in ids if one < found.ensemble.vocab_size][: found.most]


def _plan(found: Synthesis, planted: int) -> list[tuple[str, str]]:
    """Return the settings and the counts of records."""
    pool, dealt = found.mechanism, found.batches
    return [
        ("mechanism", f"ClippedLogPool, clip [{pool.lower:g}, {pool.upper:g}], κ = {pool.scale:g}"),
        ("batches", f"{len(dealt.slots)}, of {found.ensemble.num_models} slots each"),
        ("tokens of a text", f"at most {found.most}"),
        ("temperature, top-k", f"{found.temperature:g}, {found.top_k or 'all'}"),
        ("names", f"{dealt.names}, with {planted} that were planted"),
        ("names that found their batch full", f"{len(dealt.left_out)}"),
        ("empty slots", f"{dealt.empty}"),
        ("records that were cut", f"{found.cut}"),
    ]


def _likeness(
    reader: Reader, found: Synthesis, tokens: Mapping[str, list[list[int]]]
) -> list[tuple[str, ...]]:
    """Return a row for each kind of text but the last, which all are compared with."""
    start = [*found.ensemble.beginning] or sorted(found.ensemble.end_tokens)[:1]
    features: dict[str, Features] = {
        name: reader.features([[*start, *one] for one in texts]) for name, texts in tokens.items()
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
            sizes = np.sort([len(one) for one in texts])
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


def _leaks(
    found: Synthesis, corpus: Canaries, texts: Mapping[int, str], others: list[str]
) -> list[tuple[str, str]]:
    """Return what the texts have in common with records, and the exposure of planted ones."""
    size, own, far = found.ensemble.num_models, [], []
    for batch, text in texts.items():
        own.append(shared_words(text, [one for one in found.batches.slots[batch] if one]))
        far.append(shared_words(text, others[:size]))
    rows = [
        ("shared words with a text's own batch", f"mean {np.mean(own):.2f}, most {max(own)}"),
        ("shared words with other records", f"mean {np.mean(far):.2f}, most {max(far)}"),
    ]
    measured = exposures(found, corpus, texts)
    if measured:
        written = sum(seen for seen, _ in measured)
        mean = np.mean([bits for _, bits in measured])
        rows += [
            ("planted records in a batch", f"{len(measured)}"),
            ("their codes that a text holds", f"{written}"),
            ("mean exposure", f"{mean:.2f} bits, by chance {chance(size):.2f}"),
        ]
    return rows
