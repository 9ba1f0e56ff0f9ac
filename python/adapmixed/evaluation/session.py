"""An evaluation in progress: the next window, and every mechanism's totals so far."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from adapmixed.ensemble.room import LogitsRoom
from adapmixed.ensemble.vocabulary import begun
from adapmixed.evaluation.methods import Method
from adapmixed.evaluation.result import Runs
from adapmixed.evaluation.windows import Window

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

# Positions per call of a mechanism: enough to share its overhead, few enough to bound its memory.
_POSITIONS_PER_CALL = 64


class Session:
    """The runs of an evaluation, one after the other.

    Args:
        ensemble: the models.
        tokens: the token stream.
        windows: the windows of every run.
        methods: makes the methods of a run, before its first answer.
        memory_bytes: limit in bytes for one chunk's logits and activations.
        active: K of the active vocabulary; None for all tokens.
        progress: called with (queries done, queries in all), counted over all runs; or None.
    """

    def __init__(
        self,
        ensemble: "Ensemble",
        tokens: Sequence[int],
        windows: list[list[Window]],
        methods: Callable[[int], list[Method]],
        memory_bytes: int,
        active: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._ensemble, self._tokens, self._windows = ensemble, tokens, windows
        self._methods, self._memory_bytes, self._progress = methods, memory_bytes, progress
        self._active = active
        self._total = sum(one.queries for run in windows for one in run)
        self._done = 0
        self._run = self._window = 0  # the next ones
        self._begun: list[list[Method]] = []
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
        found = [
            [method.result(seconds) for method in methods]
            for methods, seconds in zip(self._begun, self._forward_seconds, strict=True)
        ]
        return [Runs(one[0].name, tuple(one)) for one in zip(*found, strict=True)]

    def state(self) -> dict[str, Any]:
        """Return the private state to continue from, as strict JSON values."""
        return {
            "run": self._run,
            "window": self._window,
            "forward_seconds": list(self._forward_seconds),
            "runs": [[method.state() for method in methods] for methods in self._begun],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the `state()` of a session with the same arguments.

        Raises:
            ValueError: if it is no such state.
        """
        try:
            self._run, self._window = state["run"], state["window"]
            for run, written in enumerate(state["runs"]):
                self._begin()
                for method, one in zip(self._begun[run], written, strict=True):
                    method.restore(one)
            self._forward_seconds = [float(seconds) for seconds in state["forward_seconds"]]
            answered = self._windows[: self._run]
            if self._window:
                answered = [*answered, self._windows[self._run][: self._window]]
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"the state must be that of this evaluation: {error!r}") from error
        queries = [sum(one.queries for one in windows) for windows in answered]
        for expected, methods in zip(queries, self._begun, strict=True):
            for method in methods:
                if method.tally.accountant.queries != expected:
                    raise ValueError(
                        f"the state of {method.tally.name!r} must hold {expected} queries, got "
                        f"{method.tally.accountant.queries}"
                    )
        self._done = sum(queries)

    def follow(self, run: int, window: int) -> None:
        """Continue at the `place` of the main process, which keeps all accounts."""
        for _ in range(run):  # the current run begins with its next step
            self._begin()
        self._run, self._window = run, window

    def _begin(self) -> None:
        self._begun.append(self._methods(len(self._begun)))
        self._forward_seconds.append(0.0)

    def _answer(self, window: Window) -> None:
        read = begun(self._ensemble.beginning, self._tokens[window.start : window.stop])
        inputs = torch.tensor([read[:-1]], device=self._ensemble.device)
        labels = torch.tensor(read[1:], device=self._ensemble.device)
        context = len(labels) - window.queries  # what begins a text, what another window scores
        start = time.perf_counter()
        chunks = self._ensemble.iter_logits(
            inputs, memory_bytes=self._memory_bytes, room=self._room, active=self._active
        )
        for where, private, public, tokens in chunks:
            self._forward_seconds[self._run] += time.perf_counter() - start
            targets, skipped = labels[where], max(0, context - where.start)
            for first in range(skipped, len(targets), _POSITIONS_PER_CALL):
                part = slice(first, first + _POSITIONS_PER_CALL)
                for method in self._begun[self._run]:
                    chosen = None if tokens is None else tokens[0, part]
                    method.answer(private[:, 0, part], public[0, part], chosen, targets[part])
                self._done += len(targets[part])
                self.tell()
            del private, public, tokens  # their place is the next chunk's
            start = time.perf_counter()
