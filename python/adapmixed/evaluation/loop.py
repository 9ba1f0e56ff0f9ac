"""Evaluate mechanisms on a text; all of them answer the logits of one forward pass.

The result file holds the state of an evaluation, from which it goes on after an interruption. It is
one JSON object, which is replaced atomically. It is private, since it has each model's charges. Of
the randomness it has only a seed, if there is one, and how many numbers were drawn from it.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adapmixed.ensemble.ensemble import DEFAULT_MEMORY_BYTES
from adapmixed.ensemble.lora import LogitsRoom
from adapmixed.ensemble.members import read_versioned
from adapmixed.evaluation.diagnostics import Diagnostics
from adapmixed.evaluation.report import Curve, Evaluation, compared
from adapmixed.files import remove_leftovers, sole_writer, write_file
from adapmixed.limits import DEFAULT_ACTIVE, check_active, check_count, check_optional_count
from adapmixed.mechanisms import Answer, Mechanism, Origin, Rows, Ticket, shaped
from adapmixed.privacy import Accountant
from adapmixed.privacy.events import READERS, canonical, from_json, to_json
from adapmixed.rng import SecureRandom, SeededRandom
from adapmixed.text import begun

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

SAVE_SECONDS = 10.0
"""Least number of seconds between two writes of a result file, which end a window."""

# Positions per call of a mechanism: enough to share its overhead, few enough to bound its memory.
_POSITIONS_PER_CALL = 64
CURVE_POINTS = 512
FORMAT_VERSION = 12
"""Of a result file; increases if an entry changes its meaning, or if a required one is new."""


def evaluate(
    ensemble: Ensemble,
    tokens: Sequence[int],
    mechanisms: Mapping[str, Mechanism],
    *,
    delta: float,
    rng: SecureRandom | SeededRandom,
    block: int | None = None,
    stride: int | None = None,
    queries: int | None = None,
    runs: int = 1,
    epsilon: float | None | Mapping[str, float | None] = None,
    adjacency: str = "zero_out",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
    result: str | os.PathLike[str] | None = None,
    diagnostics: bool = False,
    active: int | None = DEFAULT_ACTIVE,
) -> list[Evaluation]:
    """Answer every position of a token stream, or of parts of it, with every mechanism.

    By default the stream is cut into blocks that do not overlap, and the first token of a block is
    not scored, as in the authors' program. With a stride it is cut into overlapping windows, so
    that every token but the first one is scored once. Every scored token is one query. The models
    run once, chunk by chunk within the memory limit, and all mechanisms answer the same logits. If
    an argument raises, nothing was answered.

    Several runs answer disjoint parts, as in the paper's Table 1: as many whole blocks as the
    queries of a run need. In every run each mechanism has its own accountant and its own
    randomness. A guarantee covers one run, as if the ensemble were used for that run alone. It does
    not cover all runs *together*, whose costs add up.

    Args:
        ensemble: the models.
        tokens: the token stream, at least two tokens.
        mechanisms: the mechanisms by the name to report.
        delta: δ of the guarantees.
        rng: the source of randomness; a seeded one makes the evaluation repeatable. Every mechanism
            draws from its own child, so its result does not depend on the other mechanisms. With a
            seed, mechanisms of one kind draw the same noise, so that their settings compare.
        block: tokens per block, >= 2; None for 512, or for the model's window if that is shorter.
        stride: in [1, block − 1]. Windows of `block` tokens begin every `stride` tokens, and each
            scores the tokens after the window before it. So a scored token has at least
            block − stride tokens of context, if the stream has that many before it. None for blocks
            that do not overlap.
        queries: number of tokens to score in every run; None for the whole stream, or for as many
            as an even division of the whole blocks among several runs allows.
        runs: number of runs, >= 1.
        epsilon: ε of every shard's budget, as in `Accountant`; None for no budget. A mapping gives
            it for some mechanisms by name.
        adjacency: neighbouring relation of the guarantees, "zero_out" or "replace_one".
        memory_bytes: limit in bytes for one chunk's logits and activations.
        progress: called with (queries done, queries in all) of all runs, also before the first
            answer.
        result: a private file for the state; None to keep none. It is written at the end and after
            a window, at most every 10 seconds. The same call goes on from it after an interruption,
            which loses later answers. With a seed, the same memory limit and the same number of
            threads, the result equals that of an uninterrupted run in every bit. Without a seed the
            rest is answered with new randomness. Weights of a model object are not compared.
        diagnostics: whether to add :class:`Diagnostics` of every mechanism, which are private.
        active: K ≥ 2, number of the public model's likeliest tokens about which members speak;
            None, or V and more, for all.

    Returns:
        one :class:`Evaluation` per mechanism, in their order. Among several processes, only the
        main one gets them; the others get an empty list.

    Raises:
        ValueError: if there are no mechanisms, or too few tokens for one query.
        ValueError: if `block`, `stride`, `queries` or `runs` is out of range.
        ValueError: if an accountant with these settings does not take a mechanism.
        ValueError: if the result file belongs to another evaluation or is damaged.
        OSError: if it cannot be read or written, or another process writes it.
    """
    if not mechanisms:
        raise ValueError("mechanisms must name at least one mechanism, got none")
    check_active(active)
    ranks, origin = ensemble.ranks, Origin.of(ensemble, active)
    windows, total = plan_runs(
        tokens, ensemble.longest_text, block, queries, runs=runs, stride=stride
    )
    budgets = dict(epsilon) if isinstance(epsilon, Mapping) else dict.fromkeys(mechanisms, epsilon)
    if unknown := sorted(budgets.keys() - mechanisms.keys()):
        raise ValueError(f"epsilon must name mechanisms of this evaluation, got {unknown!r}")
    described = {
        "num_models": ensemble.num_models,
        "fingerprint": ensemble.fingerprint,
        "beginning": ensemble.beginning,
        "unverified": ensemble.unverified,
        "dtype": str(ensemble.dtype),
        "text": _digest(tokens),
        "block": block_of(ensemble.longest_text, block),
        "stride": stride,
        "runs": runs,
        "queries": total,
        "active": origin.active_tokens,
        "delta": delta,
        "adjacency": adjacency,
        "diagnostics": diagnostics,
        "mechanisms": [(name, repr(one), budgets.get(name)) for name, one in mechanisms.items()],
    }
    ranks.agree(described | {"memory_bytes": memory_bytes, "result": result is not None})

    def method(name: str, source: SecureRandom | SeededRandom) -> Method:
        accountant = Accountant(delta, epsilon=budgets.get(name), adjacency=adjacency)
        accountant.bind(mechanisms[name], ensemble.num_models, origin)  # before the models run
        accountant.check_left(mechanisms[name], total)
        tally = Tally(name, accountant, Diagnostics() if diagnostics else None)
        return Method(mechanisms[name], source.child(mechanisms[name].name), tally)

    sources = [rng.child(f"run {run}") if run else rng for run in range(runs)]
    methods = [[method(name, source) for name in mechanisms] for source in sources]
    session = Session(ensemble, tokens, windows, methods, origin, memory_bytes, progress)
    path = None if result is None else Path(result)
    randomness = {"seed": rng.seed, "label": rng.label} if isinstance(rng, SeededRandom) else None
    configuration = described | {"randomness": randomness}  # nothing of a key

    def save(path: Path) -> None:
        write_file(path, _written(configuration, session.state()))

    def begin() -> Tensor:
        assert path is not None
        remove_leftovers(path.parent, path.name)  # of a killed evaluation
        state = _state(path, configuration)
        if state is None:
            save(path)  # raises if it cannot be written
        else:
            session.restore(state)
        return torch.tensor([session.place])

    with nullcontext() if path is None or not ranks.is_main else sole_writer(path):
        if path is not None:
            session.place = int(ranks.tell(begin, (1,), torch.int64, torch.device("cpu")))
        saved = time.monotonic()
        session.tell()
        while not session.complete:
            session.step()
            due = session.complete or time.monotonic() - saved >= SAVE_SECONDS
            if path is not None and ranks.is_main and due:
                save(path)
                saved = time.monotonic()
    return session.results()


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the stream that the models read at once; each scored token is one query.

    Attributes:
        start: index of the first token read.
        first: index of the first token scored, > start; the tokens before it are context.
        stop: index after the last token scored; the last token is scored but not read.
    """

    start: int
    first: int
    stop: int

    @property
    def queries(self) -> int:
        """The number of scored tokens."""
        return self.stop - self.first


def plan_runs(
    tokens: Sequence[int],
    window: int | None,
    block: int | None,
    queries: int | None,
    *,
    runs: int = 1,
    stride: int | None = None,
) -> tuple[list[list[Window]], int]:
    """Return the windows of every run and the queries in each; see :func:`evaluate`.

    Args:
        tokens: the token stream.
        window: the longest input of the models in tokens; None for no limit.
        block, queries, runs, stride: as in :func:`evaluate`.

    Raises:
        ValueError: as :func:`evaluate`.
    """
    check_count("runs", runs)
    block = check_count("block", block_of(window, block), 2, window)
    check_optional_count("queries", queries)
    cuts = f"blocks of {block}"
    if stride is not None:  # every scored token has at least block - stride tokens of context
        check_count("stride", stride, 1, block - 1)
        cuts += f" that slide by {stride}"
    length = len(tokens)
    share = length if runs == 1 else length // block // runs * block  # whole blocks
    available = sum(one.queries for one in _cut(0, share, block, stride))
    total = available if queries is None else queries
    if not 1 <= total <= available:
        raise ValueError(
            f"queries must be at least 1 and at most {available} for each of {runs} runs ({length} "
            f"tokens in {cuts} offer no more), got {total}"
        )
    blocks = -(-total // (block - 1)) if stride is None else -(-(total + 1) // block)
    found = []
    for start in range(0, runs * blocks * block, blocks * block):
        found.append(_cut(start, min(start + blocks * block, length), block, stride, total))
    return found, total


def block_of(window: int | None, block: int | None) -> int:
    """Return the tokens per block; by default 512, or the models' window if that is shorter."""
    return min(512, window or 512) if block is None else block


def _cut(
    start: int, stop: int, block: int, stride: int | None, queries: int | None = None
) -> list[Window]:
    """Return blocks whose first token is not scored, or windows that slide by `stride`.

    With a number of queries, the last window ends with them.
    """
    found, first, left = list[Window](), start + 1, stop if queries is None else queries
    for at in range(start, stop, stride or block):
        first = first if stride else at + 1
        if first >= stop or left < 1:  # a last block of one token has nothing to score
            break
        found.append(Window(at, first, min(at + block, stop, first + left)))
        first, left = found[-1].stop, left - found[-1].queries
    return found


@dataclass
class Tally:
    """The running totals of one mechanism in one run, which a result file holds as JSON.

    Attributes:
        name: the name of the mechanism in the evaluation.
        accountant: is charged for every answer.
        diagnostics: diagnostics to collect, or None.
        loss: Σ −log p(target).
        screened: queries that the public model alone answered.
        seconds: time spent in the mechanism.
        curve: its points hold the queries so far, their ε, which is NaN without a guarantee, and
            their perplexity.
    """

    name: str
    accountant: Accountant
    diagnostics: Diagnostics | None = None
    loss: float = 0.0
    screened: int = 0
    seconds: float = 0.0
    curve: Curve = field(default_factory=lambda: Curve(CURVE_POINTS))

    def add(self, ticket: Ticket, answer: Answer, targets: Tensor) -> None:
        """Count the answers of one call.

        Args:
            ticket: the ticket of B queries, charged and released.
            answer: its answer, with log-probabilities of the targets.
            targets: (B,) int64 token ids.
        """
        assert answer.log_prob is not None  # targets were given
        self.loss -= math.fsum(answer.log_prob.tolist())
        self.screened += int(answer.public.sum())
        done, epsilon = self.accountant.queries, self.accountant.guarantee().epsilon
        self.curve.add((done, math.nan if epsilon is None else epsilon, self._perplexity(done)))
        if self.diagnostics is not None:
            self.diagnostics.add(ticket, answer, targets)

    def result(self, forward_seconds: float) -> Evaluation:
        """Return the results so far, after at least one query.

        Args:
            forward_seconds: time of the models' forward passes, shared by all mechanisms.
        """
        guarantee, queries = self.accountant.guarantee(), self.accountant.queries
        points = [(int(done), *values) for done, *values in self.curve.all().tolist()]
        return Evaluation(
            name=self.name,
            perplexity=self._perplexity(queries),
            queries=queries,
            guarantee=guarantee,
            screened=0.0 if guarantee.kind == "public" else self.screened / queries,
            tokens_per_second=queries / (self.seconds + forward_seconds),
            curve=tuple((done, None if math.isnan(cost) else cost) for done, cost, _ in points),
            perplexities=tuple((done, perplexity) for done, _, perplexity in points),
            breakdown=self.accountant.breakdown(),
            diagnosis=self.diagnostics,
        )

    def _perplexity(self, queries: int) -> float:
        mean = self.loss / queries
        return math.exp(mean) if mean < 700.0 else math.inf


READERS["Accountant"] = Accountant.from_state


@dataclass
class Method:
    """One mechanism in one run: its source of randomness, and its totals so far."""

    mechanism: Mechanism
    rng: SecureRandom | SeededRandom
    tally: Tally


@dataclass
class Session:
    """An evaluation in progress: all totals so far, and the next window.

    Attributes:
        ensemble, tokens, memory_bytes, progress: as in :func:`evaluate`.
        windows: those of each run.
        methods: those of each run.
        origin: of the rows.
        place: number of windows answered, over all runs.
    """

    ensemble: Ensemble
    tokens: Sequence[int]
    windows: Sequence[Sequence[Window]]
    methods: Sequence[Sequence[Method]]
    origin: Origin
    memory_bytes: int
    progress: Callable[[int, int], None] | None
    place: int = 0

    def __post_init__(self) -> None:
        self._order = [(run, one) for run, windows in enumerate(self.windows) for one in windows]
        self._before = [0, *accumulate(one.queries for _, one in self._order)]
        self._forward_seconds = [0.0] * len(self.windows)
        self._room = LogitsRoom()

    @property
    def complete(self) -> bool:
        """True if every window of every run is answered."""
        return self.place == len(self._order)

    def tell(self, more: int = 0) -> None:
        """Tell how many queries are done, `more` of them in the next window."""
        if self.progress is not None and self.ensemble.ranks.is_main:
            self.progress(self._before[self.place] + more, self._before[-1])

    def step(self) -> None:
        """Answer the next window."""
        run, window = self._order[self.place]
        start, done, active = time.perf_counter(), 0, self.origin.active_tokens
        text = self.tokens[window.start : window.stop]
        parts = scored_parts(
            self.ensemble, text, window.queries, memory_bytes=self.memory_bytes, active=active,
            room=self._room,
        )  # fmt: skip
        for rows, targets in parts:
            whole = self.ensemble.ranks.gather(rows.private)
            self._forward_seconds[run] += time.perf_counter() - start
            if whole is not None:  # in the main process
                rows = replace(rows, private=whole)
                for method in self.methods[run]:
                    self._answer(method, rows, targets)
            done += len(targets)
            self.tell(done)
            del rows, whole  # the next chunk takes their memory
            start = time.perf_counter()
        self.place += 1

    def _answer(self, method: Method, rows: Rows, targets: Tensor) -> None:
        """Answer, charge and count B queries, whose (B,) int64 targets are scored."""
        start = time.perf_counter()
        ticket = method.mechanism.propose_rows(
            rows, targets=targets, rng=method.rng, origin=self.origin
        )
        method.tally.accountant.charge(ticket)
        answer = ticket.release()
        method.tally.seconds += time.perf_counter() - start
        method.tally.add(ticket, answer, targets)

    def results(self) -> list[Evaluation]:
        """Return the results of all mechanisms; an empty list off the main process."""
        if not self.ensemble.ranks.is_main:
            return []
        runs = zip(self.methods, self._forward_seconds, strict=True)
        found = [[one.tally.result(seconds) for one in methods] for methods, seconds in runs]
        first = zip(*found, strict=True)
        return compared([replace(one, further=tuple(further)) for one, *further in first])

    def state(self) -> dict[str, Any]:
        """Return the private state to continue from, as strict JSON values."""
        return {
            "place": self.place,
            "forward_seconds": list(self._forward_seconds),
            "methods": [
                {"tally": to_json(one.tally), "counter": getattr(one.rng, "position", None)}
                for methods in self.methods
                for one in methods
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state()` of a session with the same settings."""
        methods = [one for methods in self.methods for one in methods]
        for method, written in zip(methods, state["methods"], strict=True):
            method.tally = from_json(Tally, written["tally"])
            if isinstance(method.rng, SeededRandom):
                method.rng.skip_to(written["counter"])
        self._forward_seconds, self.place = list(state["forward_seconds"]), state["place"]


def _digest(tokens: Sequence[int]) -> str:
    digest, step = hashlib.sha256(), 1 << 12  # in parts, to avoid a copy of the whole text
    for start in range(0, len(tokens), step):
        digest.update(np.asarray(tokens[start : start + step], dtype="<i8").tobytes())
    return digest.hexdigest()


def scored_parts(
    ensemble: Ensemble,
    text: Sequence[int],
    queries: int,
    *,
    memory_bytes: int,
    active: int | None,
    room: LogitsRoom | None = None,
) -> Iterator[tuple[Rows, Tensor]]:
    """Read a text, and yield the rows that score its last tokens, a few positions at a time.

    Args:
        ensemble: the models.
        text: token ids, without those that begin a text.
        queries: how many of its last tokens are scored.
        memory_bytes: limit in bytes for one chunk's logits and activations.
        active, room: as in `iter_logits`.

    Yields:
        the rows of B positions and of this process's members, and the scored tokens (B,).
    """
    read = begun(ensemble.beginning, text)
    inputs = torch.tensor([read[:-1]], device=ensemble.device)
    labels = torch.tensor(read[1:], device=ensemble.device)
    context = len(labels) - queries  # what begins a text, and what is not scored here
    chunks = ensemble.iter_logits(inputs, memory_bytes=memory_bytes, room=room, active=active)
    for where, private, public, tokens in chunks:
        targets = labels[where]
        for first in range(max(0, context - where.start), len(targets), _POSITIONS_PER_CALL):
            part = slice(first, first + _POSITIONS_PER_CALL)
            speaking = None if tokens is None else tokens[0, part]
            rows = shaped(private[:, 0, part], public[0, part], active=active, tokens=speaking)
            yield rows, targets[part]
            del rows
        del private, public, tokens


def _state(path: Path, configuration: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state in a result file that this process holds; None if there is no file.

    Raises:
        ValueError: the file has another configuration or version, or is damaged.
    """
    if not path.exists():
        return None
    content = read_versioned(path, FORMAT_VERSION, "configuration", "state", "checksum")
    if _written(content["configuration"], content["state"]) != path.read_bytes():
        raise ValueError(f"{path} must be as evaluate wrote it (--result), its checksum differs")
    found = content["configuration"]
    for name in [*configuration, *found]:
        now, then = canonical(configuration.get(name)), canonical(found.get(name))
        if now != then:
            raise ValueError(
                f"{path} must be of the same evaluation to be resumed: {name} is {now}, but the "
                f"file was begun with {then}"
            )
    return dict(content["state"])


def _written(configuration: Mapping[str, Any], state: Mapping[str, Any]) -> bytes:
    """Return the file's bytes, with a checksum over all entries."""
    content = {"format_version": FORMAT_VERSION, "configuration": configuration, "state": state}
    checksum = hashlib.sha256(canonical(content).encode("ascii")).hexdigest()
    return f"{canonical(content | {'checksum': f'sha256:{checksum}'})}\n".encode("ascii")
