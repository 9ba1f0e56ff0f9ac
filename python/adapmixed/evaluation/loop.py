"""Evaluate mechanisms on a text; all of them answer the logits of one forward pass."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adapmixed.ensemble.ensemble import DEFAULT_MEMORY_BYTES
from adapmixed.ensemble.output_layer import LogitsRoom
from adapmixed.ensemble.vocabulary import begun
from adapmixed.evaluation.diagnostics import Diagnostics
from adapmixed.evaluation.result import Evaluation, ResultFile, Tally, check_result, results
from adapmixed.evaluation.windows import Window, block_of, plan_runs
from adapmixed.limits import DEFAULT_ACTIVE, check_active
from adapmixed.mechanisms import Mechanism, Origin, Rows, shaped
from adapmixed.privacy import Accountant
from adapmixed.privacy.encoding import from_json, to_json
from adapmixed.rng import SecureRandom, SeededRandom

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

SAVE_SECONDS = 10.0
"""Least number of seconds between two writes of a result file, which end a window."""

# Positions per call of a mechanism: enough to share its overhead, few enough to bound its memory.
_POSITIONS_PER_CALL = 64
_PROBED = 8  # positions
_IMPOSSIBLE = -1e9  # stands for log 0, which JSON cannot hold


def evaluate(
    ensemble: "Ensemble",
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
    resume: bool = False,
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
        result: a private file for the state, from which `read_result` restores the results; None to
            keep nothing. It is written at the end and after a window, at most every 10 seconds. If
            the process ends, later answers are lost.
        resume: whether to continue from that file if it exists. With a seed, the same memory limit
            and the same number of threads, the result equals that of an uninterrupted run in every
            bit. Without a seed the rest is answered with new randomness.
        diagnostics: whether to add a :class:`Diagnosis` of every mechanism. It is private; nothing
            else changes.
        active: K ≥ 2, number of the public model's likeliest tokens about which members speak;
            None, or V and more, for all.

    Returns:
        one :class:`Evaluation` per mechanism, in their order. Among several processes, only the
        main one gets them; the others get an empty list.

    Raises:
        ValueError: if there are no mechanisms, or too few tokens for one query.
        ValueError: if `block`, `stride`, `queries` or `runs` is out of range.
        ValueError: if an accountant with these settings does not take a mechanism.
        ValueError: if the result file exists without `resume`, belongs to another evaluation, is
            being written by another process or is corrupted.
    """
    if not mechanisms:
        raise ValueError("mechanisms must name at least one mechanism, got none")
    check_active(active)
    ranks = ensemble.ranks
    if ranks.alone or result is None:  # else told to all ranks at the first write
        check_result(result, resume=resume)
    window = ensemble.longest_text
    windows, total = plan_runs(tokens, window, block, queries, runs=runs, stride=stride)
    budgets = dict(epsilon) if isinstance(epsilon, Mapping) else dict.fromkeys(mechanisms, epsilon)
    if unknown := sorted(budgets.keys() - mechanisms.keys()):
        raise ValueError(f"epsilon must name mechanisms of this evaluation, got {unknown!r}")
    if not ranks.alone:
        ranks.agree(
            {
                "the mechanisms": dict(mechanisms),
                "the budgets": budgets,
                "the tokens": list(tokens),
                "the settings of the evaluation": (windows, adjacency, memory_bytes, active),
                "whether a result file is kept": result is not None,
            }
        )
    session = Session(
        ensemble, tokens, windows, dict(mechanisms), delta, budgets, adjacency, rng, memory_bytes,
        active, diagnostics, progress,
    )  # fmt: skip
    for one in session.methods(0):  # raises before the models run if no accountant takes one
        one.tally.accountant.check_left(one.mechanism, total)
    if result is None:
        session.tell()
        while not session.complete:
            session.step()
    else:
        file = ResultFile(result, session.description(block_of(window, block), stride))
        _answer_and_keep(session, file, resume)
    return session.results()


def _answer_and_keep(session: "Session", file: ResultFile, resume: bool) -> None:
    """Answer all windows; the main process keeps the file and tells the others where to start."""
    ranks = session.ensemble.ranks

    def begin() -> Tensor:
        state = file.begin(resume=resume)
        if state is not None:
            session.restore(state)
        else:
            file.save(session.state(), complete=False)  # raises if it cannot be written
        return torch.tensor([session.place])

    with file.held() if ranks.is_main else nullcontext():
        place = ranks.tell(begin, (1,), torch.int64, torch.device("cpu"))
        session.go_to(int(place))
        saved = time.monotonic()
        session.tell()
        while not session.complete:
            session.step()
            if ranks.is_main and (session.complete or time.monotonic() - saved >= SAVE_SECONDS):
                file.save(session.state(), complete=session.complete)
                saved = time.monotonic()


@dataclass
class Method:
    """One mechanism in one run: its source of randomness, and its totals so far."""

    mechanism: Mechanism
    rng: SecureRandom | SeededRandom
    tally: Tally


@dataclass
class Session:
    """An evaluation in progress: arguments of `evaluate`, the next window, and all totals so far.

    Attributes:
        windows: those of each run.
        place: number of windows answered, over all runs.
    """

    ensemble: "Ensemble"
    tokens: Sequence[int]
    windows: Sequence[Sequence[Window]]
    mechanisms: Mapping[str, Mechanism]
    delta: float
    budgets: Mapping[str, float | None]
    adjacency: str
    rng: SecureRandom | SeededRandom
    memory_bytes: int
    active: int | None
    diagnostics: bool
    progress: Callable[[int, int], None] | None

    def __post_init__(self) -> None:
        self.place = 0
        self._order = [(run, one) for run, windows in enumerate(self.windows) for one in windows]
        self._total = sum(one.queries for _, one in self._order)
        self._done = 0
        self._origin = Origin.of(self.ensemble, self.active)
        self._runs: list[list[Method]] = []
        self._forward_seconds: list[float] = []
        self._room = LogitsRoom()

    @property
    def complete(self) -> bool:
        """Whether every window of every run is answered."""
        return self.place == len(self._order)

    def methods(self, run: int) -> list[Method]:
        """Return the mechanisms of a run, before its first answer."""
        source = self.rng if run == 0 else self.rng.child(f"run {run}")
        found, origin = [], self._origin
        bound = self.ensemble.num_models, origin.ensemble, origin.active_tokens, origin.unit
        for name, mechanism in self.mechanisms.items():
            epsilon = self.budgets.get(name)
            accountant = Accountant(self.delta, epsilon=epsilon, adjacency=self.adjacency)
            accountant.bind(mechanism, *bound)
            tally = Tally(name, accountant, Diagnostics() if self.diagnostics else None)
            found.append(Method(mechanism, source.child(mechanism.name), tally))
        return found

    def tell(self) -> None:
        """Tell how many queries are done, in the main process."""
        if self.progress is not None and self.ensemble.ranks.is_main:
            self.progress(self._done, self._total)

    def step(self) -> None:
        """Answer the next window."""
        run, window = self._order[self.place]
        self._begin(run)
        start = time.perf_counter()
        text = self.tokens[window.start : window.stop]
        parts = scored_parts(
            self.ensemble, text, window.queries, memory_bytes=self.memory_bytes,
            active=self.active, room=self._room,
        )  # fmt: skip
        for private, public, tokens, targets in parts:
            rows = shaped(private, public, active=self._origin.active_tokens, tokens=tokens)
            whole = self.ensemble.ranks.gather(rows.private)
            self._forward_seconds[run] += time.perf_counter() - start
            if whole is not None:  # in the main process
                rows = replace(rows, private=whole)
                for method in self._runs[run]:
                    self._answer(method, rows, targets)
            self._done += len(targets)
            self.tell()
            del private, public, tokens, rows, whole  # the next chunk takes their memory
            start = time.perf_counter()
        self.place += 1

    def _begin(self, run: int) -> None:
        """Begin the runs up to this one."""
        while len(self._runs) <= run:
            self._runs.append(self.methods(len(self._runs)))
            self._forward_seconds.append(0.0)

    def _answer(self, method: Method, rows: Rows, targets: Tensor) -> None:
        """Answer, charge and count B queries, whose (B,) int64 targets are scored."""
        start = time.perf_counter()
        ticket = method.mechanism.propose_rows(
            rows, targets=targets, rng=method.rng, origin=self._origin
        )
        method.tally.accountant.charge(ticket)
        answer = ticket.release()
        method.tally.seconds += time.perf_counter() - start
        method.tally.add(ticket, answer, targets)

    def results(self) -> list[Evaluation]:
        """Return the results of all mechanisms; an empty list off the main process."""
        if not self.ensemble.ranks.is_main:
            return []
        tallies = [[method.tally for method in methods] for methods in self._runs]
        return results(tallies, self._forward_seconds)

    def state(self) -> dict[str, Any]:
        """Return the private state to continue from, as strict JSON values."""
        return {
            "place": self.place,
            "forward_seconds": list(self._forward_seconds),
            "runs": [
                [
                    {"tally": to_json(one.tally), "counter": getattr(one.rng, "position", None)}
                    for one in methods
                ]
                for methods in self._runs
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state()` of a session with the same settings."""
        self._begin(len(state["runs"]) - 1)
        for methods, written in zip(self._runs, state["runs"], strict=True):
            for method, one in zip(methods, written, strict=True):
                method.tally = from_json(Tally, one["tally"])
                if isinstance(method.rng, SeededRandom):
                    method.rng.skip_to(one["counter"])
        self._forward_seconds = list(state["forward_seconds"])
        self.place = state["place"]

    def go_to(self, place: int) -> None:
        """Continue after this number of windows, as the main process does."""
        self.place = place
        self._done = sum(one.queries for _, one in self._order[:place])

    def description(self, block: int, stride: int | None) -> dict[str, Any]:
        """Return strict JSON values, private, that are equal only if results are."""
        ensemble, rng = self.ensemble, self.rng
        return {
            "text": {"tokens": len(self.tokens), "sha256": _digest(self.tokens)},
            "ensemble": {
                "num_models": ensemble.num_models,
                "vocab_size": ensemble.vocab_size,
                "max_positions": ensemble.max_positions,
                "beginning": list(ensemble.beginning),
                "unverified": list(ensemble.unverified),
                "fingerprint": ensemble.fingerprint,
            },
            "block": block,
            "stride": stride,
            "runs": len(self.windows),
            "queries": sum(one.queries for one in self.windows[0]),
            "active": self._origin.active_tokens,
            "delta": self.delta,
            "adjacency": self.adjacency,
            # Nothing of a key is written.
            "randomness": {"seed": rng.seed, "label": rng.label}
            if isinstance(rng, SeededRandom)
            else "system",
            "diagnostics": self.diagnostics,
            "order": list(self.mechanisms),
            "methods": {
                name: {"mechanism": repr(mechanism), "epsilon": self.budgets.get(name)}
                for name, mechanism in self.mechanisms.items()
            },
            "probe": self._probe(),
        }

    def _probe(self) -> list[float]:
        """Return each model's mean log-probability of the first tokens, the public model's last."""
        ensemble, window = self.ensemble, self.windows[0][0]
        text = self.tokens[window.start : min(window.stop, window.start + _PROBED + 1)]
        queries = len(begun(ensemble.beginning, text)) - 1
        sums: Any = 0.0
        parts = scored_parts(ensemble, text, queries, memory_bytes=self.memory_bytes, active=None)
        for private, public, _, targets in parts:
            rows = torch.cat([private, public[None]]).double().log_softmax(-1)
            found = rows.gather(-1, targets.expand(len(rows), -1)[..., None])[..., 0]
            sums = sums + found.clamp_min(_IMPOSSIBLE).sum(-1)
        members = ensemble.ranks.gather(sums[:-1])
        if members is None:  # only the main process keeps the file
            return []
        return [float(value) for value in torch.cat([members, sums[-1:]]) / queries]


def _digest(tokens: Sequence[int]) -> str:
    digest, step = hashlib.sha256(), 1 << 12  # in parts, to avoid a copy of the whole text
    for start in range(0, len(tokens), step):
        digest.update(np.asarray(tokens[start : start + step], dtype="<i8").tobytes())
    return digest.hexdigest()


def scored_parts(
    ensemble: "Ensemble",
    text: Sequence[int],
    queries: int,
    *,
    memory_bytes: int,
    active: int | None,
    room: LogitsRoom | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Read a text, and yield the logits that score its last tokens, a few positions at a time.

    Args:
        ensemble: the models.
        text: token ids, without those that begin a text.
        queries: how many of its last tokens are scored.
        memory_bytes: limit in bytes for one chunk's logits and activations.
        active: as in `iter_logits`.
        room: as in `iter_logits`.

    Yields:
        private (n, B, K), public (B, V), the tokens (B, K) of the private columns or None, and the
        scored tokens (B,).
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
            yield (
                private[:, 0, part],
                public[0, part],
                None if tokens is None else tokens[0, part],
                targets[part],
            )
        del private, public, tokens
