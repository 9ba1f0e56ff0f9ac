"""One thread that runs an engine: answers join and leave the batch between tokens."""

from __future__ import annotations

from collections.abc import Callable

from adapmixed.serving.admission import Reservation
from adapmixed.serving.engine import Engine
from adapmixed.serving.query import Piece, Query

Deliver = Callable[[Piece | Exception], None]
"""Takes the pieces of an answer in the engine's thread. An exception is the last thing it gets."""


class Answer:
    """A query that was submitted."""

    def cancel(self) -> None:
        """End the answer: nothing more is drawn or delivered. Any thread may call this."""
        raise NotImplementedError


class Scheduler:
    """A queue of answers, and the thread that runs the engine.

    Args:
        engine: used by this thread alone, except for its `check`.
        tokenizer: the public model's tokenizer.
        end_tokens: tokens that end an answer; they add no text.
        waiting: largest number of sequences that wait for the engine, ≥ 1.
    """

    def __init__(
        self, engine: Engine, tokenizer: object, end_tokens: frozenset[int], *, waiting: int = 64
    ) -> None:
        raise NotImplementedError

    def check(self, query: Query) -> None:
        """Raise ValueError if the query could not be answered, even alone. Any thread."""
        raise NotImplementedError

    def check_room(self, sequences: int) -> None:
        """Raise QueueFullError if so many more sequences cannot wait, StoppedError after a stop."""
        raise NotImplementedError

    def submit(self, query: Query, reservation: Reservation, deliver: Deliver) -> Answer:
        """Queue a query that passed `check` and `check_room`. The scheduler closes the reservation.

        `deliver` gets pieces until every prompt has a piece with `finish`, or an exception:
        StoppedError if the engine has stopped.
        """
        raise NotImplementedError

    def stop(self, deadline: float) -> None:
        """Take no more queries, finish the running ones for up to `deadline` seconds, end the rest.

        It returns when the engine's thread has ended. To stop twice is allowed.
        """
        raise NotImplementedError
