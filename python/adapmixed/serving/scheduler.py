"""One thread that runs an engine: answers join and leave the batch between tokens."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adapmixed.errors import LedgerError
from adapmixed.generation.text import AnswerText
from adapmixed.serving.admission import Reservation
from adapmixed.serving.engine import Engine, Piece, Prompt, Query, StoppedError
from adapmixed.serving.errors import queue_full, stopping

_LOG = logging.getLogger(__name__)
Deliver = Callable[[Piece | Exception], None]
"""Takes the pieces of an answer in the engine's thread. An exception is the last thing it gets."""


@dataclass(eq=False)
class _Run:
    """One prompt of a query on its way through the engine."""

    answer: ServedAnswer
    index: int
    prompt: Prompt
    text: AnswerText
    ends: frozenset[int]
    released: int = 0


class ServedAnswer:
    """A query that was submitted."""

    def __init__(self, scheduler: Scheduler, reservation: Reservation, deliver: Deliver) -> None:
        self._scheduler, self._reservation, self._deliver = scheduler, reservation, deliver
        self._cancelled = False
        self._open = 0  # prompts that have not ended

    def cancel(self) -> None:
        """End the answer: no more tokens are drawn or delivered. Any thread may call this."""
        self._cancelled = True
        self._scheduler._wake()


class Scheduler:
    """A queue of answers, and the thread that runs the engine.

    Args:
        engine: used by this thread alone, except for its `check`.
        tokenizer: the public model's tokenizer.
        end_tokens: tokens that end an answer; they add no text.
        waiting: largest number of sequences that wait for the engine, ≥ 1.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, end_tokens: frozenset[int], *, waiting: int = 64
    ) -> None:
        self._engine, self._tokenizer, self._end_tokens = engine, tokenizer, end_tokens
        self._limit = waiting
        self._changed = threading.Condition()
        self._waiting: deque[_Run] = deque()
        self._running: dict[Prompt, _Run] = {}
        self._deadline: float | None = None  # set by `stop`
        self._ended = self._failed = False
        self._thread = threading.Thread(target=self._run, name="adapmixed-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Number of sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences in the queue."""
        return len(self._waiting)

    @property
    def stopped(self) -> bool:
        """True if no more queries are taken."""
        return self._ended or self._deadline is not None

    @property
    def failed(self) -> bool:
        """True if the engine has raised an error, so that nothing more can be answered."""
        return self._failed

    def check(self, query: Query) -> None:
        """Raise ValueError if the query could not be answered, even alone. Any thread may call it.

        A query of more prompts than may wait could not be.
        """
        if not 1 <= len(query.prompts) <= self._limit:
            raise ValueError(f"prompts must be 1 to {self._limit}, got {len(query.prompts)}")
        for prompt in query.prompts:
            self._engine.check(prompt)

    def check_room(self, sequences: int) -> None:
        """Check that so many more sequences may wait. Any thread may call this.

        Raises:
            RequestError: 503: too many wait already, or no more queries are taken.
        """
        if self.stopped:
            raise stopping()
        if len(self._waiting) + sequences > self._limit:
            raise queue_full()

    def submit(self, query: Query, reservation: Reservation, deliver: Deliver) -> ServedAnswer:
        """Queue a query that passed `check` and `check_room`. Any thread may call this.

        The scheduler closes the reservation. Pieces are delivered until every prompt has one with
        `finish`, or until an exception: StoppedError if the engine has stopped.
        """
        answer = ServedAnswer(self, reservation, deliver)
        ends = self._end_tokens | query.stop_tokens
        runs = [
            _Run(
                answer, index, prompt, AnswerText(self._tokenizer, prompt.tokens, query.stop), ends
            )
            for index, prompt in enumerate(query.prompts)
        ]
        answer._open = len(runs)
        with self._changed:
            if not self.stopped:
                self._waiting.extend(runs)
                self._changed.notify()
                return answer
        reservation.close()
        deliver(StoppedError("the server is stopping"))
        return answer

    def stop(self, deadline: float) -> None:
        """Take no more queries, finish those that were taken for up to `deadline` seconds.

        It returns when the engine's thread has ended. To stop twice is allowed, and the earlier
        deadline holds.
        """
        at = time.monotonic() + deadline
        with self._changed:
            self._deadline = at if self._deadline is None else min(at, self._deadline)
            self._changed.notify()
        self._thread.join()

    def fail(self, reason: str) -> None:
        """End the engine because something else has failed; every answer ends with an error."""
        _LOG.error("the server answers no more: %s", reason)
        with self._changed:
            self._failed, self._deadline = True, time.monotonic()
            self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        """Run the engine until it is stopped or fails; then end every answer."""
        try:
            while self._wait():
                gone = [run for run in self._running.values() if run.answer._cancelled]
                self._leave(gone)
                for run in gone:
                    self._end(run)
                self._admit()
                if self._running:
                    self._step()
        except BaseException as error:  # also what would end the thread alone, without a word
            self._failed = True
            _LOG.error("the engine has failed and answers no more: %s", _reason(error))
        finally:
            with self._changed:
                self._ended = True
                left = [*self._running.values(), *self._waiting]
                self._waiting.clear()
            self._running.clear()
            for answer in dict.fromkeys(run.answer for run in left):
                answer._reservation.close()
                if not answer._cancelled:
                    answer._deliver(StoppedError("the engine has stopped"))

    def _wait(self) -> bool:
        """Wait until there is something to do. Return False once the engine must stop."""
        with self._changed:
            while not (self._running or self._waiting or self._deadline is not None):
                self._changed.wait()
            if self._deadline is None:
                return True
            busy = bool(self._running or self._waiting)
            return busy and time.monotonic() < self._deadline

    def _admit(self) -> None:
        """Let waiting sequences join the batch, as many as the engine has room for."""
        with self._changed:
            gone = [run for run in self._waiting if run.answer._cancelled]
            for run in gone:
                self._waiting.remove(run)
            waiting = [run.prompt for run in self._waiting]
        for run in gone:
            self._end(run)
        room = self._engine.room(waiting) if waiting else 0
        if waiting and not room and not self._running:
            raise RuntimeError("the engine has no room for a sequence that it could answer alone")
        if not room:
            return
        with self._changed:
            joining = [self._waiting.popleft() for _ in range(room)]
            self._running.update((run.prompt, run) for run in joining)
        self._engine.admit([run.prompt for run in joining])

    def _step(self) -> None:
        """Release one token of every sequence, and let those leave that end with it."""
        ended = []
        for prompt, token in self._engine.step():
            run = self._running[prompt]
            if not prompt.public:
                run.answer._reservation.charged()
            piece = self._piece(run, token)
            if piece.finish is not None:  # a client that sees it may ask for what is free again
                ended.append(run)
                self._end(run)
            if not run.answer._cancelled:
                run.answer._deliver(piece)
        self._leave(ended)

    def _piece(self, run: _Run, token: int) -> Piece:
        run.released += 1
        stopped = token in run.ends
        text = ""
        if not stopped:
            text, stopped = run.text.add(token)
            if stopped:
                return Piece(run.index, text, "stop")
        last = run.released == run.prompt.max_tokens
        if stopped or last:
            rest, found = run.text.rest()
            return Piece(run.index, text + rest, "stop" if stopped or found else "length")
        return Piece(run.index, text)

    def _leave(self, runs: list[_Run]) -> None:
        """Let sequences leave the batch."""
        if runs:
            self._engine.leave([run.prompt for run in runs])
            for run in runs:
                del self._running[run.prompt]

    def _end(self, run: _Run) -> None:
        """Close the reservation if this was the last sequence of its answer."""
        run.answer._open -= 1
        if run.answer._open == 0:
            run.answer._reservation.close()


def _reason(error: BaseException) -> str:
    """Return what an operator's log may say of an error; other texts can name private values."""
    name = type(error).__name__
    return f"{name}: {error}" if isinstance(error, LedgerError) else name
