"""One thread that runs an engine: answers join and leave the batch between tokens."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from adapmixed.errors import LedgerError
from adapmixed.serving.admission import Reservation
from adapmixed.serving.engine import MOST_WAITING, Engine, Piece, Prompt, Query
from adapmixed.serving.errors import queue_full, stopping
from adapmixed.serving.metrics import Metrics
from adapmixed.text import AnswerText

_LOG = logging.getLogger(__name__)


class Running:
    """A request on its way through the engine. It is made and read in the event loop's thread.

    Attributes:
        query: the request, which says whether the public model answers it alone.
        reservation: its tokens; the scheduler closes it.
        cancelled: whether no more tokens are drawn or delivered.
        released: the number of tokens that were released.
        left: the number of prompts whose answers have not ended.

    Args:
        query: the request.
        reservation: its tokens.
        metrics: the operator's figures.
    """

    def __init__(self, query: Query, reservation: Reservation, metrics: Metrics) -> None:
        self.query, self.reservation, self._metrics = query, reservation, metrics
        self.cancelled, self.released, self.left = False, 0, len(query.prompts)
        self._begun, self._last = time.monotonic(), dict[int, float]()  # by the number of a prompt
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

    def deliver(self, piece: Piece | None) -> None:
        """Take a piece, or None if the engine has stopped, in the engine's thread."""
        if piece is not None:
            now, last = time.monotonic(), self._last.get(piece.index)
            waited = now - (self._begun if last is None else last)
            self._metrics.released(waited, first=last is None)
            self._last[piece.index] = now
        with suppress(RuntimeError):  # the event loop has ended, so nobody waits for this piece
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces of all prompts as they are released.

        Raises:
            RequestError: 503: the engine has stopped. All released tokens were charged.
        """
        left = len(self.query.prompts)
        while left:
            piece = await self._pieces.get()
            if piece is None:
                raise stopping(charged=self.released > 0)
            left -= piece.finish is not None
            yield piece


@dataclass(eq=False)
class _Run:
    """One prompt of a query on its way through the engine."""

    answer: Running
    index: int
    prompt: Prompt
    text: AnswerText


class Scheduler:
    """A queue of answers, and the thread that runs the engine.

    Args:
        engine: used by this thread alone.
        tokenizer: the public model's tokenizer.
        end_tokens: tokens that end an answer; they add no text.
        waiting: largest number of sequences that wait for the engine, ≥ 1.

    Attributes:
        failed: True if the engine has raised an error, so that nothing more can be answered.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        end_tokens: frozenset[int],
        *,
        waiting: int = MOST_WAITING,
    ) -> None:
        self._engine, self._tokenizer, self._end_tokens = engine, tokenizer, end_tokens
        self._limit = waiting
        self._changed = threading.Condition()
        self._waiting: deque[_Run] = deque()
        self._running: dict[Prompt, _Run] = {}
        self._deadline: float | None = None  # set by `stop`
        self._ended = False
        self.failed = False
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

    def check_room(self, sequences: int) -> None:
        """Check that so many more sequences may wait. Any thread may call this.

        Raises:
            RequestError: 503: too many wait already, or no more queries are taken.
        """
        if self.stopped:
            raise stopping()
        if len(self._waiting) + sequences > self._limit:
            raise queue_full()

    def submit(self, answer: Running) -> None:
        """Queue a query that passed `check_room`. Any thread may call this.

        Pieces are delivered until every prompt has one with `finish`, or until a None: the engine
        has stopped.

        Raises:
            RequestError: 503: no more queries are taken. The reservation is still open.
        """
        query, runs = answer.query, list[_Run]()
        for index, prompt in enumerate(query.prompts):
            ends = query.stop, self._end_tokens | query.stop_tokens, prompt.max_tokens
            text = AnswerText(self._tokenizer, prompt.tokens, *ends)
            runs.append(_Run(answer, index, prompt, text))
        with self._changed:
            if self.stopped:
                raise stopping()
            self._waiting.extend(runs)
            self._changed.notify()

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
            self.failed, self._deadline = True, time.monotonic()
            self._changed.notify()

    def _run(self) -> None:
        """Run the engine until it is stopped or fails; then end every answer."""
        try:
            while self._wait():
                self._drop_cancelled()
                self._admit()
                if self._running:
                    self._step()
        except BaseException as error:  # also what would end the thread alone, without a word
            self.failed = True
            _LOG.error("the engine has failed and answers no more: %s", _reason(error))
        finally:
            with self._changed:
                self._ended = True
                left = [*self._running.values(), *self._waiting]
                self._waiting.clear()
            self._running.clear()
            for answer in dict.fromkeys(run.answer for run in left):
                answer.reservation.close()
                if not answer.cancelled:
                    answer.deliver(None)

    def _wait(self) -> bool:
        """Wait until there is something to do. Return False once the engine must stop."""
        with self._changed:
            while not (self._running or self._waiting or self._deadline is not None):
                self._changed.wait()
            if self._deadline is None:
                return True
            busy = bool(self._running or self._waiting)
            return busy and time.monotonic() < self._deadline

    def _drop_cancelled(self) -> None:
        """Let the sequences of clients that have left leave the queue and the batch."""
        running = [run for run in self._running.values() if run.answer.cancelled]
        self._leave(running)
        with self._changed:
            waiting = [run for run in self._waiting if run.answer.cancelled]
            for run in waiting:
                self._waiting.remove(run)
        for run in (*running, *waiting):
            self._end(run)

    def _admit(self) -> None:
        """Let waiting sequences join the batch, as many as the engine has room for."""
        with self._changed:
            waiting = [run.prompt for run in self._waiting]
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
                run.answer.reservation.charged()
            run.answer.released += 1
            piece = Piece(run.index, *run.text.add(token))
            if piece.finish is not None:  # a client that sees it may ask for what is free again
                ended.append(run)
                self._end(run)
            if not run.answer.cancelled:
                run.answer.deliver(piece)
        self._leave(ended)

    def _leave(self, runs: list[_Run]) -> None:
        """Let sequences leave the batch."""
        if runs:
            self._engine.leave([run.prompt for run in runs])
            for run in runs:
                del self._running[run.prompt]

    def _end(self, run: _Run) -> None:
        """Close the reservation if this was the last sequence of its answer."""
        run.answer.left -= 1
        if run.answer.left == 0:
            run.answer.reservation.close()


def _reason(error: BaseException) -> str:
    """Return what an operator's log may say of an error; other texts can name private values."""
    name = type(error).__name__
    return f"{name}: {error}" if isinstance(error, LedgerError) else name
