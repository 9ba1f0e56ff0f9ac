"""`synthesize`: private texts under one ε, each drawn from a batch of records of its own.

The members are prompts with one record each (`ensemble.prompts`), and ClippedLogPool draws. Batches
share no record. So the ε of one text, for the public number of tokens that it may have, is that of
all texts together (parallel composition).

The number of batches and of slots in each is public. A name goes to the batch that a keyed hash of
it tells, so that no other record decides in which it lies. Records of one name share a slot,
because one slot is charged. If more names meet in a batch than it has slots, those that come first
by their hash have one, and the others are left out. A slot without a name is empty.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adapmixed.data import Corpus, Document
from adapmixed.ensemble.prompts import LONGEST, PromptEnsemble
from adapmixed.files import create_file, sole_writer, write_file
from adapmixed.generation import PrivateGenerator
from adapmixed.limits import DEFAULT_ACTIVE, check_count
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant, Caveat, Guarantee
from adapmixed.privacy.planner import CHOSEN_SCALE, models_for, recommended
from adapmixed.training.shards import assign_shards, keyed_name

LEAST_WIDTH = 0.3
"""Width of the clip below which a record hardly shows."""
GOOD_WIDTH = 2.0
"""Width of the clip that a batch is made for, if its size is not given."""
MEMORY_BYTES = 4 << 30
"""For the caches of all prompts of a batch, unless told otherwise."""

BETWEEN = "\n\n"
"""Between the records of one name."""

Progress = Callable[[int, int], None]
JOURNAL_VERSION = 2


class Batches(NamedTuple):
    """The records of all batches. All of it is private.

    Attributes:
        slots: for each batch its records, None in an empty slot.
        left_out: the records of names that found their batch full.
    """

    slots: list[list[str | None]]
    left_out: list[str]

    @property
    def empty(self) -> int:
        """The number of empty slots."""
        return sum(record is None for batch in self.slots for record in batch)

    @property
    def names(self) -> int:
        """The number of names."""
        return sum(map(len, self.slots)) - self.empty + len(self.left_out)


def dealt(documents: Iterable[Document], count: int, size: int, *, key: bytes) -> Batches:
    """Return the records of `count` batches of `size` slots.

    Args:
        documents: the records and their names.
        count: number of batches, ≥ 1.
        size: number of slots in each, ≥ 1.
        key: 16 to 64 bytes, a secret.

    Raises:
        ValueError: there are fewer names than `size` for each of the batches.
    """
    texts: dict[str, list[str]] = {}
    for document in documents:
        texts.setdefault(document.identifier, []).append(document.text)
    if len(texts) < count * size:
        raise ValueError(
            f"texts must hold at least {count * size} names, {count} batches of {size}, got "
            f"{len(texts)}: ask for fewer texts, or for smaller batches"
        )
    batches: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(texts, key=lambda name: keyed_name(name, key)):
        (batch,) = assign_shards([name], count, key=key)
        batches[batch].append(BETWEEN.join(texts[name]))
    slots = [[*batch[:size], *[None] * (size - len(batch))] for batch in batches]
    return Batches(slots, [record for batch in batches for record in batch[size:]])


class Journal:
    """The one writer of a journal: which batches are spent, and the tokens drawn from them.

    It is a file of JSON lines. Its first line holds the settings. Then each batch has a line before
    its first token is drawn, and one for each token. Every line is on the device before the next
    token is drawn. So after a kill the same text goes on: no batch is spent unseen, and a token
    that was drawn without its line was seen by nobody.

    Args:
        path: of the file, which is continued if it is there; None to keep it in memory alone.
        settings: JSON values that must be those of the file, once a batch is spent.

    Attributes:
        tokens: the tokens that were drawn, by batch.

    Raises:
        ValueError: the file has other settings or another format, or it is damaged.
        BlockingIOError: another process writes it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.tokens: dict[int, list[int]] = {}
        self._stack, self._file, self._process = ExitStack(), None, os.getpid()
        if path is None:
            return
        with ExitStack() as stack:
            stack.enter_context(sole_writer(path))
            create_file(path, b"")
            first = {"format_version": JOURNAL_VERSION, **settings}
            kept = self._read(path, json.loads(_line(first)))
            self._file = stack.enter_context(open(path, "r+b", buffering=0))
            self._file.truncate(kept)  # a last line that was cut short
            self._file.seek(kept)
            if kept == 0:
                self._append(first)
            self._stack = stack.pop_all()

    def _read(self, path: Path, expected: Any) -> int:
        """Take in what was written; return the bytes to keep, 0 if no batch is spent yet."""
        content = path.read_bytes()
        kept = content.rfind(b"\n") + 1
        try:
            first, *lines = [json.loads(line) for line in content[:kept].splitlines()] or [{}]
            differ = [name for name, value in expected.items() if first.get(name) != value]
            for entry in lines:
                if "token" in entry:
                    self.tokens[entry["batch"]].append(entry["token"])
                else:
                    self.tokens[entry["batch"]] = []
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} must be an intact journal: {error!r}") from error
        if lines and differ:
            raise ValueError(
                f"{path} must have been begun with the same settings and texts, got others of "
                f"{', '.join(differ)}: give another output"
            )
        return kept if lines else 0

    def begin(self, batch: int) -> None:
        """Note that a batch is spent from now on, unless it is already."""
        if batch not in self.tokens:
            self._append({"batch": batch})
            self.tokens[batch] = []

    def add(self, batch: int, token: int) -> None:
        """Add a token that was drawn from a batch."""
        self._append({"batch": batch, "token": token})
        self.tokens[batch].append(token)

    def _append(self, entry: Mapping[str, Any]) -> None:
        if os.getpid() != self._process:  # parent and child of a fork would each draw a text
            raise ValueError("a synthesis must be used in the process that made it, got a fork")
        if self._file is not None:
            line = _line(entry)
            try:
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file.fileno())
            except OSError as error:
                error.filename = self._file.name
                raise

    def close(self) -> None:
        """Let another process write the file."""
        if os.getpid() == self._process:  # a forked child must not, as its parent holds it
            self._stack.close()


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"


@dataclass(frozen=True)
class Synthesis:
    """Texts that are drawn as they are asked for: iterate once over (batch, text).

    Attributes:
        ensemble: of prompts.
        batches: the records. Private, its numbers included.
        mechanism: of every text.
        most: the most tokens of a text, its end included.
        delta: δ.
        top_k, temperature, active, memory_bytes: as in `PrivateGenerator`.
        out: CSV file of the texts that are complete; None for none.
        journal: what was drawn.
        corpus: the source of the records.
        progress: called with (tokens drawn, most tokens).
    """

    ensemble: PromptEnsemble
    batches: Batches
    mechanism: ClippedLogPool
    most: int
    delta: float
    top_k: int | None
    temperature: float
    active: int | None
    memory_bytes: int
    out: Path | None
    journal: Journal
    corpus: Corpus
    progress: Progress | None = None

    @cached_property
    def cut(self) -> int:
        """How many records are longer than a prompt holds, and are cut. Private."""
        return sum(self.ensemble.filled(records).cut for records in self.batches.slots)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of all texts together: every record is in one batch at most."""
        cost = self.mechanism.cost_ahead(self.ensemble.num_models, self.most)
        caveats = [Caveat("positions")] if self.corpus.positional else []
        guarantee = Accountant(self.delta).add([*cost, *caveats]).guarantee()
        return replace(guarantee, unit="record")

    @property
    def promise(self) -> str:
        """The guarantee as a sentence about all texts."""
        names = self.corpus.id_column
        whose = "" if names is None else f" A record is everything of one '{names}'."
        return (
            f"Each of the {len(self.batches.slots)} texts is drawn from records of its own, so "
            f"what holds for one holds for all of them together. {self.guarantee}{whose} If a "
            "record leaves, another may take its slot (replace-one)."
        )

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield the batch and the text of each; a text that is complete is not drawn again.

        Raises:
            ValueError: the prompts do not fit the model's window or the memory.
            OSError: the journal or the CSV cannot be written. Nothing more is drawn then.
        """
        return self._drawn

    @cached_property
    def _drawn(self) -> Iterator[tuple[int, str]]:
        """The one generator: a second one would draw from the same records again."""
        journal = self.journal
        complete = [batch for batch, drawn in journal.tokens.items() if self._is_complete(drawn)]
        texts = {batch: self._text(batch) for batch in sorted(complete)}
        for batch, records in enumerate(self.batches.slots):
            steps = self._steps(records, journal.tokens.get(batch, []))
            journal.begin(batch)  # unless the text does not fit, which has raised
            for step in steps:
                journal.add(batch, int(step[0]))
                self._show(batch * self.most + len(journal.tokens[batch]))
            texts[batch] = self._text(batch)
            if self.out is not None:
                write_file(self.out, _csv(texts), mode=0o644)
            self._show((batch + 1) * self.most)
            yield batch, texts[batch]

    def _is_complete(self, drawn: list[int]) -> bool:
        ended = bool(drawn) and drawn[-1] in self.ensemble.end_tokens
        return ended or len(drawn) == self.most

    def _text(self, batch: int) -> str:
        tokens = self.journal.tokens[batch]
        return str(self.ensemble.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def _steps(self, records: list[str | None], before: list[int]) -> Iterator[Tensor]:
        """Return the tokens of a text behind those that were drawn already."""
        if self._is_complete(before):
            return iter(())
        generator = PrivateGenerator(
            self.ensemble.filled(records),
            self.mechanism,
            Accountant(self.delta),
            memory_bytes=self.memory_bytes,
            active=self.active,
        )
        return generator.stream_tokens(
            torch.tensor([[*self.ensemble.opening, *before]]),
            max_new_tokens=self.most - len(before),
            temperature=self.temperature,
            top_k=self.top_k,
            ends=self.ensemble.end_tokens,
        )

    def _show(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, len(self.batches.slots) * self.most)

    def close(self) -> None:
        """Let another process go on."""
        self.journal.close()


def synthesize(
    base: Any,
    texts: Corpus,
    describe: str,
    *,
    epsilon: float,
    delta: float,
    count: int,
    max_tokens: int,
    batch: int | None = None,
    longest: int = LONGEST,
    plain: bool = False,
    top_k: int | None = 100,
    temperature: float = 1.0,
    active: int | None = DEFAULT_ACTIVE,
    memory_bytes: int = MEMORY_BYTES,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Synthesis:
    """Return private texts that are like those of a corpus, under one (ε, δ) for all of them.

    `count`, `max_tokens`, `batch` and `longest` are public: do not take them from the texts.

    Args:
        base: an instruct model with its tokenizer, a folder or a hub name.
        texts: the records. With `id_column` everything under one name is one record. Rows without
            text are none.
        describe: what a record is, as in "a clinic's discharge summary".
        epsilon: ε > 0 of all texts together, for the text of one record that is emptied.
        delta: δ in [1e-15, 0.1].
        count: number of texts, and of batches.
        max_tokens: most tokens of a text, its end included.
        batch: number of records that a text is drawn from; None for the least with which the clip
            is `GOOD_WIDTH` wide.
        longest: most tokens of a record that a prompt holds; the others are cut.
        plain: whether prompts are plain text instead of a message for the chat template.
        top_k, temperature, active, memory_bytes: as in `PrivateGenerator`.
        dtype, device: as in `PromptEnsemble`.
        out: CSV file with the columns text and batch. A private folder `OUT.private` next to it
            holds the key and the journal, from which a killed run goes on. None for neither.
        progress: called with (tokens drawn, most tokens).

    Raises:
        ValueError: an argument is not valid; ε buys a clip narrower than `LEAST_WIDTH`; the texts
            are empty, or fill fewer batches; `out` is another file, or was begun with other
            settings.
        OSError: the journal cannot be written, or another process writes it.
    """
    check_count("count", count)
    check_count("max_tokens", max_tokens)
    size = _size(epsilon, delta, max_tokens) if batch is None else check_count("batch", batch)
    plan = recommended(epsilon, delta, size, max_tokens, mechanism="clipped-log-pool")
    if plan.settings["upper"] < LEAST_WIDTH:
        raise ValueError(
            f"epsilon must pay for a clip {LEAST_WIDTH} wide, in which a record shows, got "
            f"{epsilon!r}, which pays for {plan.settings['upper']:g} with {max_tokens} tokens of "
            f"batches of {size}: give a larger one, fewer tokens, or larger batches"
        )
    mechanism = ClippedLogPool(**plan.settings, queries=max_tokens)
    ensemble = PromptEnsemble(
        base, describe, records=size, longest=longest, plain=plain, dtype=dtype, device=device
    )
    folder = None if out is None else out.with_name(f"{out.name}.private")
    kept = set(os.listdir(folder)) if folder is not None and folder.is_dir() else set()
    begun = "key" in kept
    if out is not None and out.exists() and not {"key", "journal.jsonl"} <= kept:
        raise ValueError(f"out must be a new file, or one with its folder {folder}, got {out}")
    key = (folder / "key").read_bytes() if folder is not None and begun else os.urandom(32)
    documents = list(texts.documents())
    if not documents:
        column = texts.description()["text_column"]
        where = texts.name if column is None else f"the column {column!r}"
        raise ValueError(f"texts must hold records, got none: {where} is empty")
    batches = dealt(documents, count, size, key=key)
    if folder is not None and not begun:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not create_file(folder / "key", key):
            raise BlockingIOError(f"{folder} must be used by one process, another has begun it")
    held = hashlib.sha256(repr(batches.slots).encode()).hexdigest()
    settings = {
        "mechanism": repr(mechanism), "delta": delta, "prompts": ensemble.fingerprint,
        "batches": held, "top_k": top_k, "temperature": temperature, "active": active,
    }  # fmt: skip
    journal = Journal(None if folder is None else folder / "journal.jsonl", settings)
    return Synthesis(
        ensemble, batches, mechanism, max_tokens, delta, top_k, temperature, active, memory_bytes,
        out, journal, texts, progress,
    )  # fmt: skip


def _size(epsilon: float, delta: float, max_tokens: int) -> int:
    """Return the least number of records with which the clip is `GOOD_WIDTH` wide."""
    size = models_for(epsilon, delta, max_tokens, lower=0.0, upper=GOOD_WIDTH, scale=CHOSEN_SCALE)
    if size is None:
        raise ValueError(f"epsilon must pay for {max_tokens} tokens of a batch, got {epsilon!r}")
    return size


def _csv(texts: dict[int, str]) -> bytes:
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(["text", "batch"])
    writer.writerows([text, batch] for batch, text in texts.items())
    return output.getvalue().encode()
