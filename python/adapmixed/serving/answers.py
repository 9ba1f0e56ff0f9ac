"""Send the answer to one request, while its client reads and the engine goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from adapmixed.serving.engine import StoppedError
from adapmixed.serving.errors import JsonResponse, internal, stopping
from adapmixed.serving.running import ClientLeftError, Running
from adapmixed.serving.wire import Writer, event

SEND_SECONDS = 60.0
"""Seconds that a client may take until it reads more of a stream."""

_LOG = logging.getLogger(__name__)
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


@asynccontextmanager
async def watched(running: Running, receive: Receive) -> AsyncIterator[None]:
    """End the answer when the block ends, and tell it if the client leaves."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        running.leave()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        running.end()
        watcher.cancel()


class Whole:
    """The response with a whole answer, as an ASGI application."""

    def __init__(self, running: Running, writer: Writer) -> None:
        self._running, self._writer = running, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the whole answer and send it.

        Raises:
            RequestError: the engine has stopped.
        """
        running = self._running
        count = len(running.query.prompts)
        texts: list[list[str]] = [[] for _ in range(count)]
        finishes: list[str | None] = [None] * count
        try:
            async with watched(running, receive):
                async for piece in running.pieces():
                    texts[piece.index].append(piece.text)
                    finishes[piece.index] = piece.finish
        except ClientLeftError:
            return
        except StoppedError:
            raise stopping(charged=running.released > 0) from None
        body = self._writer.whole(["".join(parts) for parts in texts], finishes, running.released)
        await JsonResponse(body)(scope, receive, send)


class Stream:
    """The response with server-sent events, as an ASGI application."""

    def __init__(self, running: Running, writer: Writer) -> None:
        self._running, self._writer = running, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every piece as it is released, until the client leaves or stops reading.

        An error is an event, too, and the stream then ends without "[DONE]".
        """
        async with watched(self._running, receive):
            try:
                await _sent(send, type="http.response.start", status=200, headers=_STREAM)
                async for part in self._events():
                    await _sent(send, type="http.response.body", body=part, more_body=True)
                await _sent(send, type="http.response.body", body=b"", more_body=False)
            except TimeoutError:
                _LOG.info("a client has not read its stream for %g seconds", SEND_SECONDS)
            except (ClientLeftError, OSError):
                pass

    async def _events(self) -> AsyncIterator[bytes]:
        running, writer = self._running, self._writer
        for part in writer.opening():
            yield part
        try:
            async for piece in running.pieces():
                for part in writer.piece(piece):
                    yield part
        except StoppedError:
            yield event(stopping(charged=True).body)
        except ClientLeftError:
            raise
        except Exception as error:
            _LOG.error("a stream has failed: %s", type(error).__name__)
            yield event(internal().body)
        else:
            for part in writer.ending(running.released):
                yield part


async def _sent(send: Send, **message: object) -> None:
    async with asyncio.timeout(SEND_SECONDS):
        await send(message)
