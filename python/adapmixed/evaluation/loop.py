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
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adapmixed.ensemble.ensemble import DEFAULT_MEMORY_BYTES
from adapmixed.ensemble.lora import LogitsRoom
from adapmixed.ensemble.members import read_versioned
from adapmixed.evaluation.report import Evaluation, compared
from adapmixed.evaluation.utility import Utility
from adapmixed.files import remove_leftovers, sole_writer, write_file
from adapmixed.limits import DEFAULT_ACTIVE, check_active, check_count, check_optional_count
from adapmixed.mechanisms import Mechanism, Origin, ShapedLogits, shaped
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
"""The largest number of points of a curve before its last one, even."""
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

    Every mechanism has an accountant of its own. Its guarantee covers one evaluation, as if the
    ensemble were used for that alone. It does not cover several *together*, whose costs add up.

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
        queries: number of tokens to score; None for the whole stream.
        epsilon: ε of every shard's budget, as in `Accountant`; None for no budget. A mapping gives
            it for some mechanisms by name.
        adjacency: neighbouring relation of the guarantees, "zero_out" or "replace_one".
        memory_bytes: limit in bytes for one chunk's logits and activations.
        progress: called with (queries done, queries in all), also before the first answer.
        result: a private file for the state; None to keep none. It is written at the end and after
            a window, at most every 10 seconds. The same call goes on from it after an interruption,
            which loses later answers. With a seed, the same memory limit and the same number of
            threads, the result equals that of an uninterrupted run in every bit. Without a seed the
            rest is answered with new randomness. Weights of a model object are not compared.
        diagnostics: whether to add the `utility` of every mechanism, which is private.
        active: K ≥ 2, number of the public model's likeliest tokens about which members speak;
            None, or V and more, for all.

    Returns:
        one :class:`Evaluation` per mechanism, in their order. Among several processes, only the
        main one gets them; the others get an empty list.

    Raises:
        ValueError: if there are no mechanisms, or too few tokens for one query.
        ValueError: if `block`, `stride` or `queries` is out of range.
        ValueError: if an accountant with these settings does not take a mechanism.
        ValueError: if the result file belongs to another evaluation or is damaged.
        OSError: if it cannot be read or written, or another process writes it.
    """
    if not mechanisms:
        raise ValueError("mechanisms must name at least one mechanism, got none")
    check_active(active)
    ranks, origin = ensemble.ranks, Origin.of(ensemble, active)
    windows = plan_windows(len(tokens), ensemble.longest_text, block, queries, stride)
    total = sum(w.queries for w in windows)
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
        "queries": total,
        "active": origin.active_tokens,
        "delta": delta,
        "adjacency": adjacency,
        "diagnostics": diagnostics,
        "mechanisms": [(name, repr(m), budgets.get(name)) for name, m in mechanisms.items()],
    }
    ranks.agree(described | {"memory_bytes": memory_bytes, "result": result is not None})

    def begun_tally(name: str) -> Tally:
        accountant = Accountant(delta, epsilon=budgets.get(name), adjacency=adjacency)
        accountant.bind(mechanisms[name], ensemble.num_models, origin)  # before the models run
        accountant.check_left(mechanisms[name], total)
        return Tally(name, accountant, Utility() if diagnostics else None)

    state = State(tuple(map(begun_tally, mechanisms)))
    sources = [rng.child(m.name) for m in mechanisms.values()]
    path = None if result is None else Path(result)
    randomness = {"seed": rng.seed, "label": rng.label} if isinstance(rng, SeededRandom) else None
    configuration = described | {"randomness": randomness}  # nothing of a key

    def save(path: Path) -> None:
        write_file(path, _written(configuration, to_json(state)))

    def begin() -> Tensor:
        nonlocal state
        assert path is not None
        remove_leftovers(path.parent, path.name)  # of a killed evaluation
        if not path.exists():
            save(path)  # raises if it cannot be written
        state = _read(path, configuration)
        for source, tally in zip(sources, state.tallies, strict=True):
            if isinstance(source, SeededRandom) and tally.position is not None:
                source.skip_to(tally.position)
        return torch.tensor([state.place])

    def answer(rows: ShapedLogits, targets: Tensor) -> None:
        each = zip(state.tallies, mechanisms.values(), sources, strict=True)
        for tally, mechanism, source in each:
            tally.answer(mechanism, rows, targets, source, origin)

    def tell(more: int = 0) -> None:
        if progress is not None and ranks.is_main:
            progress(before[state.place] + more, total)

    before = [0, *accumulate(w.queries for w in windows)]
    room = LogitsRoom()
    with nullcontext() if path is None or not ranks.is_main else sole_writer(path):
        if path is not None:
            state.place = int(ranks.tell(begin, (1,), torch.int64, torch.device("cpu")))
        saved = time.monotonic()
        tell()
        for window in windows[state.place :]:
            start, done = time.perf_counter(), 0
            parts = scored_parts(
                ensemble, tokens[window.start : window.stop], window.queries,
                memory_bytes=memory_bytes, active=origin.active_tokens, room=room,
            )  # fmt: skip
            for rows, targets in parts:
                whole = ranks.gather(rows.private)
                state.forward_seconds += time.perf_counter() - start
                if whole is not None:  # in the main process
                    answer(rows.of_all(whole), targets)
                done += len(targets)
                tell(done)
                del rows, whole  # the next chunk takes their memory
                start = time.perf_counter()
            state.place += 1
            due = state.place == len(windows) or time.monotonic() - saved >= SAVE_SECONDS
            if path is not None and ranks.is_main and due:
                save(path)
                saved = time.monotonic()
    if not ranks.is_main:
        return []
    return compared([tally.result(state.forward_seconds) for tally in state.tallies])


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


def plan_windows(
    length: int,
    window: int | None,
    block: int | None,
    queries: int | None,
    stride: int | None = None,
) -> list[Window]:
    """Return blocks whose first token is not scored, or windows that slide by `stride`.

    Args:
        length: number of tokens of the stream.
        window: the longest input of the models in tokens; None for no limit.
        block, queries, stride: as in :func:`evaluate`.

    Raises:
        ValueError: as :func:`evaluate`.
    """
    block = check_count("block", block_of(window, block), 2, window)
    check_optional_count("queries", queries)
    cuts = f"blocks of {block}"
    if stride is not None:  # every scored token has at least block - stride tokens of context
        check_count("stride", stride, 1, block - 1)
        cuts += f" that slide by {stride}"
    windows, first, left = list[Window](), 1, length if queries is None else queries
    for at in range(0, length, stride or block):
        first = first if stride else at + 1
        stop = min(at + block, length, first + left)  # the last window ends with the queries
        if first < stop:
            windows.append(Window(at, first, stop))
            first, left = stop, left - windows[-1].queries
    scored = sum(w.queries for w in windows)
    if scored < (queries or 1):
        raise ValueError(
            f"queries must be at least 1 and at most {scored} ({length} tokens in {cuts} offer no "
            f"more), got {queries or 0}"
        )
    return windows


def block_of(window: int | None, block: int | None) -> int:
    """Return the tokens per block; by default 512, or the models' window if that is shorter."""
    return min(512, window or 512) if block is None else block


@dataclass
class Tally:
    """The running totals of one mechanism, which a result file holds as JSON.

    Attributes:
        name: the name of the mechanism in the evaluation.
        accountant: is charged for every answer.
        utility: totals of the utility theorem to collect, or None.
        loss: Σ −log p(target).
        screened: queries that the public model alone answered.
        seconds: time spent in the mechanism.
        position: the next number of a seeded source; None for the system's randomness.
        calls: calls so far.
        step: every how many calls a point is kept. It follows from the number of calls alone.
        points: (n, 3), the kept points: the queries so far, their ε, which is NaN without a
            guarantee, and their perplexity.
    """

    name: str
    accountant: Accountant
    utility: Utility | None = None
    loss: float = 0.0
    screened: int = 0
    seconds: float = 0.0
    position: int | None = None
    calls: int = 0
    step: int = 1
    points: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 3)))

    def answer(
        self,
        mechanism: Mechanism,
        rows: ShapedLogits,
        targets: Tensor,
        rng: SecureRandom | SeededRandom,
        origin: Origin,
    ) -> None:
        """Answer, charge and count B queries, whose (B,) int64 targets are scored."""
        start = time.perf_counter()
        ticket = mechanism.propose_rows(rows, targets=targets, rng=rng, origin=origin)
        self.accountant.charge(ticket)
        answer = ticket.release()
        self.seconds += time.perf_counter() - start
        self.position = rng.position if isinstance(rng, SeededRandom) else None
        assert answer.log_prob is not None  # targets were given
        self.loss -= math.fsum(answer.log_prob.tolist())
        self.screened += int(answer.public.sum())
        self.calls += 1
        if self.calls % self.step == 0:
            self.points = self._with_this()
            if len(self.points) > CURVE_POINTS:
                self.points, self.step = self.points[1::2], 2 * self.step
        if self.utility is not None:
            self.utility.add(ticket, answer, targets)

    def result(self, forward_seconds: float) -> Evaluation:
        """Return the results so far, after at least one query.

        Args:
            forward_seconds: time of the models' forward passes, shared by all mechanisms.
        """
        guarantee, queries = self.accountant.guarantee(), self.accountant.queries
        ended = self.calls % self.step == 0
        points = (self.points if ended else self._with_this()).tolist()
        return Evaluation(
            name=self.name,
            perplexity=points[-1][2],
            queries=queries,
            guarantee=guarantee,
            screened=0.0 if guarantee.kind == "public" else self.screened / queries,
            tokens_per_second=queries / (self.seconds + forward_seconds),
            curve=tuple((int(n), None if math.isnan(cost) else cost) for n, cost, _ in points),
            perplexities=tuple((int(n), perplexity) for n, _, perplexity in points),
            breakdown=self.accountant.breakdown(),
            utility=None if self.utility is None else self.utility.report(),
        )

    def _with_this(self) -> NDArray[np.float64]:
        """Return the points and that of the last call."""
        queries, epsilon = self.accountant.queries, self.accountant.guarantee().epsilon
        mean = self.loss / queries
        perplexity = math.exp(mean) if mean < 700.0 else math.inf
        point = queries, math.nan if epsilon is None else epsilon, perplexity
        return np.concatenate([self.points, [point]])


@dataclass
class State:
    """The totals of an evaluation so far, which a result file holds as JSON.

    Attributes:
        tallies: of the mechanisms, in their order.
        place: number of windows answered.
        forward_seconds: time of the models' forward passes, shared by all mechanisms.
    """

    tallies: tuple[Tally, ...]
    place: int = 0
    forward_seconds: float = 0.0


READERS["Accountant"] = Accountant.from_state
READERS["tuple[Tally, ...]"] = lambda written: tuple(from_json(Tally, tally) for tally in written)


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
) -> Iterator[tuple[ShapedLogits, Tensor]]:
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


def _read(path: Path, configuration: Mapping[str, Any]) -> State:
    """Return the state in a result file that this process holds.

    Raises:
        ValueError: the file has another configuration or version, or is damaged.
    """
    content = read_versioned(path, FORMAT_VERSION, "configuration", "state", "checksum")
    if _written(content["configuration"], content["state"]) != path.read_bytes():
        raise ValueError(f"{path} must be as evaluate wrote it (--result), its checksum differs")
    stored = content["configuration"]
    for name in [*configuration, *stored]:
        wanted, then = canonical(configuration.get(name)), canonical(stored.get(name))
        if wanted != then:
            raise ValueError(
                f"{path} must be of the same evaluation to be resumed: {name} is {wanted}, but the "
                f"file was begun with {then}"
            )
    return from_json(State, content["state"])


def _written(configuration: Mapping[str, Any], state: Mapping[str, Any]) -> bytes:
    """Return the file's bytes, with a checksum over all entries."""
    content = {"format_version": FORMAT_VERSION, "configuration": configuration, "state": state}
    checksum = hashlib.sha256(canonical(content).encode("ascii")).hexdigest()
    return f"{canonical(content | {'checksum': f'sha256:{checksum}'})}\n".encode("ascii")
