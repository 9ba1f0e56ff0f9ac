"""One request's way through the engine: submitted, delivered, and ended exactly once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future

from adapmixed.serving.clients import Client
from adapmixed.serving.engine import Piece, Query
from adapmixed.serving.metrics import Metrics
from adapmixed.serving.scheduler import ServedAnswer

_LOG = logging.getLogger(__name__)


class ClientLeftError(Exception):
    """The client has closed its connection."""


class Running:
    """A request that was submitted. All methods but `deliver` are for the event loop's thread.

    Attributes:
        query: the request, which says whether the public model answers it alone.
        answer: what the scheduler returned.
        released: the number of tokens that were released.
    """

    answer: ServedAnswer

    def __init__(self, query: Query, client: Client, counted: int, metrics: Metrics) -> None:
        self.query = query
        self._client, self._counted = client, counted
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._timers = [metrics.timer() for _ in query.prompts]
        self._left = len(self._timers)  # prompts whose answer has not ended
        self.released = 0
        self._failed = self._gone = self._ended = False

    def deliver(self, item: Piece | Exception) -> None:
        """Take a piece, or the exception that ends the answer, in the engine's thread."""
        if isinstance(item, Piece):
            self.released += 1
            self._left -= item.finish is not None
            self._timers[item.index].token()
        else:
            self._failed = True
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            pass  # the event loop has ended, so nobody waits for this piece

    @property
    def stopped_before_start(self) -> bool:
        """True if the engine had stopped when the request was submitted."""
        return self._failed and not self.released

    def leave(self) -> None:
        """Tell that the client has closed its connection."""
        self._gone = True
        self._items.put_nowait(ClientLeftError())

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces of all prompts as they are released.

        Raises:
            ClientLeftError: the client has closed its connection.
            StoppedError: the engine has stopped.
        """
        left = len(self._timers)
        while left:
            item = await self._items.get()
            if self._gone:
                raise ClientLeftError
            if isinstance(item, Exception):
                raise item
            left -= item.finish is not None
            yield item

    def end(self) -> None:
        """End the answer if it goes on, and give back what it did not use. Repeats do nothing."""
        if self._ended:
            return
        self._ended = True
        self.answer.cancel()
        # The engine may release one more token of each sequence before it sees the end.
        used = self._left + self.released  # in this order: a piece may be delivered between them
        unused = max(0, self._counted - (0 if self.stopped_before_start else used))
        future = self._loop.run_in_executor(None, self._client.give_back, unused)
        future.add_done_callback(_report)


def _report(future: Future[None] | asyncio.Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        _LOG.error("tokens of a key could not be given back: %s", type(error).__name__)
