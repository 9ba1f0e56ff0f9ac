"""Synthesis: what all texts of `synthesize` together tell of one record.

The library's own code deals a corpus, prompts the built-in model with its records and draws. Every
text that a batch can give is enumerated: behind every beginning a run goes on as after a kill, and
the distribution of its next token is kept. ε at δ follows from the texts of all batches with and
without a planted record. A search of random texts found that record, which moves the tokens most,
and the one that replaces it, which moves them the other way. top_k = 2 leaves two tokens to a step.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import ne
from pathlib import Path
from typing import Any

import numpy as np

from adapmixed.data import Corpus, Document, demo_base
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.mechanisms.mechanism import NextToken
from adapmixed.mechanisms.rows import ShapedLogits
from adapmixed.synthesis import Synthesis, synthesize
from adapmixed.synthesis.run import Journal, dealt
from adapmixed_ext.types import RandomSource
from adapmixed_lab.audit import Effort, Finding
from adapmixed_lab.audit.canaries import flight_dialogue
from adapmixed_lab.audit.search import hockey_stick, last, one_thread

Law = dict[tuple[int, ...], float]  # the probability of every text that a batch can give
NAMES = [f"customer {k}" for k in range(30)]
PLANTED, REPLACING = 16 * " width", 8 * "ackity"
COUNT, SIZE, TOKENS, DELTA = 2, 3, 4, 1e-6


@dataclass(frozen=True)
class Watched(ClippedLogPool):
    """ClippedLogPool that keeps the distributions it draws from."""

    seen: list[NextToken] = field(default_factory=list, compare=False, repr=False)

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        self.seen.append(super()._prepare(rows, rng))
        return self.seen[-1]


def laws(run: Synthesis, **settings: Any) -> list[Law]:
    """Return the law of every batch's text, drawn with other settings than the guarantee's."""
    watched, every = Watched(**vars(run.mechanism) | settings), []
    replay = replace(run, mechanism=watched, most=settings.get("queries", run.most))
    for records in run.batches.slots:
        begun: Law = {(): 1.0}
        every.append(whole := Law())
        while begun:
            before, share = begun.popitem()
            if next(replay._steps(records, list(before)), None) is None:
                whole[before] = share
                continue
            answer = watched.seen.pop()
            tokens, odds = answer.rows.tokens, answer.probabilities()
            assert tokens is not None and tokens.shape == odds.shape  # there is no tail
            for token, odd in zip(tokens[0].tolist(), odds[0].tolist(), strict=True):
                begun[*before, token] = share * odd
    return every


def least_epsilon(here: list[Law], there: list[Law]) -> float:
    """Return the least ε at δ that the texts of all batches together allow, in both directions."""
    if [*map(list, here)] != [*map(list, there)]:
        return math.inf  # some text comes from one of the worlds alone
    shares = ([np.array([*law.values()]) for law in world] for world in (here, there))
    p, q = (reduce(np.multiply.outer, world).ravel() for world in shares)
    if not hockey_stick(p, q, 128.0) <= DELTA:
        return math.inf
    return last(lambda epsilon: bool(hockey_stick(p, q, epsilon) > DELTA))


def synthesis(folder: Path, key: bytes, texts: dict[str, str], tokens: int = TOKENS) -> Synthesis:
    """Return the synthesis of these texts by name, dealt with this key."""
    private, corpus = folder / "out.csv.private", folder / "texts.jsonl"
    private.mkdir(parents=True)
    (private / "key").write_bytes(key)
    corpus.write_text("\n".join(json.dumps({"who": a, "text": b}) for a, b in texts.items()))
    run = synthesize(
        demo_base(), Corpus(str(corpus), id_column="who"), "Python", epsilon=1.0, delta=DELTA,
        count=COUNT, max_tokens=tokens, batch=SIZE, longest=16, plain=True, top_k=2,
        temperature=0.3, out=folder / "out.csv",
    )  # fmt: skip
    run.close()
    return run


def holding(run: Synthesis, *records: str | None) -> Synthesis:
    """Return the same with these records in the first slots of the first batches."""
    slots = run.batches.slots
    put = [[record, *batch[1:]] for record, batch in zip(records, slots, strict=False)]
    return replace(run, batches=run.batches._replace(slots=[*put, *slots[len(put) :]]))


class Killing(Journal):
    """A journal of a process that ends behind every token, as soon as it is on the device."""

    drawn: Counter[int]

    def add(self, batch: int, token: int) -> None:
        super().add(batch, token)
        self.drawn[batch] += 1
        raise InterruptedError


def over_kills(run: Synthesis, path: Path, lost: bool) -> int:
    """Return the most tokens that one batch gives; if `lost`, each run finds no journal."""
    drawn: Counter[int] = Counter()
    for _ in range(2 * COUNT * TOKENS):
        journal = Killing(path, {})
        journal.drawn = drawn
        with contextlib.suppress(InterruptedError):
            dict(replace(run, journal=journal))
        journal.close()
        if lost:
            path.unlink()
    return max(drawn.values())


def slots_changed(key: bytes, leaves: bool, named: bool) -> int:
    """Return the most slots that change if one name leaves, or if its two texts change.

    Without names rows are dealt by their positions.
    """

    def slots(edited: str = "") -> list[Counter[str | None]]:
        rows = [Document(name, f"{part} of {name}") for part in "ab" for name in NAMES]
        rows = [row for row in rows if not (leaves and row.identifier == edited)]
        rows = [replace(row, text="c") if row.identifier == edited else row for row in rows]
        if not named:
            rows = [replace(row, identifier=str(k)) for k, row in enumerate(rows)]
        return [Counter(batch) for batch in dealt(rows, 5, 5, key=key).slots]

    pairs = (zip(slots(), slots(name), strict=True) for name in NAMES)
    return max(sum((p - q).total() for p, q in batches) for batches in pairs)


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack the dealing, the texts and the journal; the effort's seconds change nothing."""
    key = effort.generator("synthesis").bytes(32)
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for name, claim, claimed, measured, control in _attacks(Path(folder), key):
            yield Finding("synthesis", name, claim, claimed, measured, 1.0, control)


def _attacks(folder: Path, key: bytes) -> Iterator[tuple[str, str, Any, float, bool]]:
    claim = "slots with another record"
    for edit, leaves in (("changes its texts", False), ("leaves", True)):
        for by, named in (("names", True), ("positions", False)):
            most = slots_changed(key, leaves, named)
            yield f"dealt by {by}, a name {edit}", claim, 1, most, not named

    dialogues = [flight_dialogue(name, "38170") for name in NAMES]
    first = dealt(dialogues, COUNT, SIZE, key=key).slots[0][0]
    (name,) = (row.identifier for row in dialogues if row.text == first)
    left = {row.identifier: row.text for row in dialogues if row.identifier != name}
    planted = left | {name: PLANTED}
    here = synthesis(folder / "here", key, planted)
    stated, loose = here.guarantee, {"lower": -32.0, "upper": 32.0}
    claim, apart = f"ε of {COUNT} texts at δ = {DELTA:g}", "batches with other probabilities"
    p, free = laws(here), laws(here, **loose)
    for what, world, epsilon in (
        ("zero_out", holding(here, None), stated.epsilon),
        ("replace_one", synthesis(folder / "b", key, planted | {name: REPLACING}), stated.replaced),
        ("a name leaves, replace_one", synthesis(folder / "c", key, left), stated.replaced),
    ):
        q, unclipped = laws(world), least_epsilon(free, laws(world, **loose))
        yield what, claim, epsilon, least_epsilon(p, q), False
        yield what, apart, 1, sum(map(ne, p, q)), False
        yield f"without a clip, {what}", claim, epsilon, unclipped, True

    p, q = (laws(holding(here, record, record)) for record in (PLANTED, None))
    yield "a record in two batches", claim, stated.epsilon, least_epsilon(p, q), True
    yield "a record in two batches", apart, 1, sum(map(ne, p, q)), True
    short = synthesis(folder / "short", key, planted, TOKENS // 2)
    p, q = (laws(run, queries=TOKENS) for run in (short, holding(short, None)))
    what, epsilon = f"planned for {TOKENS // 2} tokens", short.guarantee.epsilon
    yield what, claim, epsilon, least_epsilon(p, q), True
    for what, lost in (("killed behind every token", False), ("killed, its journal lost", True)):
        seen = over_kills(here, folder / f"{what}.jsonl", lost)
        yield what, "tokens of one batch", TOKENS, seen, lost
