"""An evaluation in progress: the next window, and every mechanism's totals so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adapmixed.ensemble.output_layer import LogitsRoom
from adapmixed.ensemble.vocabulary import begun
from adapmixed.evaluation.methods import EvaluationSettings, MethodRun
from adapmixed.evaluation.result import Runs
from adapmixed.evaluation.tally import runs_of
from adapmixed.evaluation.windows import Window

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

# Positions per call of a mechanism: enough to share its overhead, few enough to bound its memory.
_POSITIONS_PER_CALL = 64


class Session:
    """The runs of an evaluation, one after the other.

    Args:
        settings: the settings of the evaluation.
        progress: called with (queries done, queries in all), counted over all runs; or None.
    """

    def __init__(
        self, settings: EvaluationSettings, progress: Callable[[int, int], None] | None
    ) -> None:
        self._settings, self._ensemble = settings, settings.ensemble
        self._windows, self._progress = settings.windows, progress
        self._total = sum(one.queries for run in self._windows for one in run)
        self._done = 0
        self._run = self._window = 0  # the next ones
        self._begun: list[list[MethodRun]] = []
        self._forward_seconds: list[float] = []
        self._room = LogitsRoom()

    @property
    def complete(self) -> bool:
        """Whether every window of every run is answered."""
        return self._run == len(self._windows)

    @property
    def place(self) -> tuple[int, int]:
        """The next run and window, counted from 0."""
        return self._run, self._window

    def tell(self) -> None:
        """Tell how many queries are done, in the main process."""
        if self._progress is not None and self._ensemble.ranks.is_main:
            self._progress(self._done, self._total)

    def step(self) -> None:
        """Answer the next window."""
        if len(self._begun) == self._run:
            self._begin()
        self._answer(self._windows[self._run][self._window])
        self._window += 1
        if self._window == len(self._windows[self._run]):
            self._run, self._window = self._run + 1, 0

    def results(self) -> list[Runs]:
        """Return the results of all methods in their order; an empty list off the main process."""
        if not self._ensemble.ranks.is_main:
            return []
        tallies = [[method.tally for method in methods] for methods in self._begun]
        return runs_of(tallies, self._forward_seconds)

    def state(self) -> dict[str, Any]:
        """Return the private state to continue from, as strict JSON values."""
        return {
            "run": self._run,
            "window": self._window,
            "forward_seconds": list(self._forward_seconds),
            "runs": [[method.state() for method in methods] for methods in self._begun],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the `state()` of a session with the same settings."""
        self.follow(state["run"], state["window"])
        for run, methods in enumerate(state["runs"]):
            if len(self._begun) == run:
                self._begin()
            for method, one in zip(self._begun[run], methods, strict=True):
                method.restore(one)
        self._forward_seconds = list(state["forward_seconds"])
        answered = [*self._windows[: self._run]]
        if self._window:
            answered.append(self._windows[self._run][: self._window])
        self._done = sum(one.queries for windows in answered for one in windows)

    def follow(self, run: int, window: int) -> None:
        """Continue at the `place` of the main process, which keeps all accounts."""
        for _ in range(run):  # the current run begins with its next step
            self._begin()
        self._run, self._window = run, window

    def _begin(self) -> None:
        self._begun.append(self._settings.methods(len(self._begun)))
        self._forward_seconds.append(0.0)

    def _answer(self, window: Window) -> None:
        settings, start = self._settings, time.perf_counter()
        text = settings.tokens[window.start : window.stop]
        parts = scored_parts(
            self._ensemble, text, window.queries, memory_bytes=settings.memory_bytes,
            active=settings.active, room=self._room,
        )  # fmt: skip
        for private, public, tokens, targets in parts:
            self._forward_seconds[self._run] += time.perf_counter() - start
            for method in self._begun[self._run]:
                method.answer(private, public, tokens, targets)
            self._done += len(targets)
            self.tell()
            del private, public, tokens  # the next chunk takes their memory
            start = time.perf_counter()


def scored_parts(
    ensemble: Ensemble,
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
