"""Answers in OpenAI's form, sent while their clients read and the engine goes on."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapmixed.serving.admission import Reservation
from adapmixed.serving.errors import RequestError, encoded, internal, json_response, stopping
from adapmixed.serving.fields import Query
from adapmixed.serving.metrics import Metrics

PUBLIC = "public-model"
"""`system_fingerprint` of an answer that the public model gave alone."""
_LOG = logging.getLogger(__name__)
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


@dataclass(frozen=True)
class Piece:
    """Text that one released token adds to an answer.

    Attributes:
        index: number of the prompt that is answered.
        text: the text; "" if the token ends inside a character, or may begin a stop string.
        finish: "stop" or "length" with the last piece of this prompt, else None.
    """

    index: int
    text: str
    finish: str | None = None


class Reply:
    """The answer to a query, whole or as server-sent events, as an ASGI application.

    The scheduler delivers its pieces in the engine's thread. The rest is the event loop's.

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
        model: name of the served model.
    """

    def __init__(
        self, query: Query, reservation: Reservation, metrics: Metrics, model: str
    ) -> None:
        self.query, self.reservation, self._metrics = query, reservation, metrics
        self.cancelled, self.released, self.left = False, 0, len(query.prompts)
        self._begun, self._last = time.monotonic(), dict[int, float]()  # by the number of a prompt
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        kind = "chat.completion.chunk" if query.stream else "chat.completion"
        self._head = {
            "id": f"{'chatcmpl' if query.chat else 'cmpl'}-{secrets.token_hex(16)}",
            "object": kind if query.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        if query.public:
            self._head["system_fingerprint"] = PUBLIC

    def deliver(self, piece: Piece | None) -> None:
        """Take a piece, or None if the engine has stopped, in the engine's thread."""
        if piece is not None:
            now, last = time.monotonic(), self._last.get(piece.index)
            waited = now - (self._begun if last is None else last)
            self._metrics.released(waited, first=last is None)
            self._last[piece.index] = now
        with suppress(RuntimeError):  # the event loop has ended, so nobody waits for this piece
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def _delivered(self) -> AsyncIterator[Piece]:
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and end it if the client leaves or stops reading.

        Raises:
            RequestError: the engine has stopped before a whole answer was complete.
        """

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answer = self._stream(send) if self.query.stream else self._whole()
        answering, leaving = asyncio.create_task(answer), asyncio.create_task(left())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.cancelled = True
            leaving.cancel()
            gone = answering.cancel()
        if not gone and (whole := answering.result()) is not None:
            await whole(scope, receive, send)

    async def _whole(self) -> Response:
        """Wait for the whole answer and return it."""
        texts = [""] * len(self.query.prompts)
        finishes: list[str | None] = [None] * len(texts)
        async for piece in self._delivered():
            texts[piece.index] += piece.text
            finishes[piece.index] = piece.finish
        choices = []
        for index, text in enumerate(texts):
            message = {"role": "assistant", "content": text, "refusal": None}
            body = {"message": message} if self.query.chat else {"text": text}
            choices.append(_choice(index, body, finishes[index]))
        return json_response({**self._head, "choices": choices, "usage": self._usage()})

    async def _stream(self, send: Send) -> None:
        """Send every piece as it is released.

        An error is an event, too, and the stream then ends without "[DONE]".
        """
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        async for part in self._events():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            if self.query.chat:
                yield self._event(0, {"delta": {"role": "assistant", "content": ""}}, None)
            async for piece in self._delivered():
                for body, finish in self._bodies(piece):
                    yield self._event(piece.index, body, finish)
            if self.query.include_usage:
                yield event({**self._head, "choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            yield event(error.body)
        except Exception as error:
            _LOG.error("a stream has failed: %s", type(error).__name__)
            yield event(internal().body)

    def _bodies(self, piece: Piece) -> list[tuple[dict[str, Any], str | None]]:
        """Return what the events for a piece tell; none if it has no text and ends nothing."""
        if not self.query.chat:
            return [({"text": piece.text}, piece.finish)] if piece.text or piece.finish else []
        found: list[tuple[dict[str, Any], str | None]] = []
        if piece.text:
            found.append(({"delta": {"content": piece.text}}, None))
        return [*found, ({"delta": {}}, piece.finish)] if piece.finish else found

    def _event(self, index: int, body: dict[str, Any], finish: str | None) -> bytes:
        usage = {"usage": None} if self.query.include_usage else {}
        return event({**self._head, "choices": [_choice(index, body, finish)], **usage})

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(one.tokens) for one in self.query.prompts)
        released = self.released
        return {
            "prompt_tokens": prompt,
            "completion_tokens": released,
            "total_tokens": prompt + released,
        }


def _choice(index: int, body: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": index, **body, "logprobs": None, "finish_reason": finish}


def event(content: Any) -> bytes:
    """Return a server-sent event with a value as JSON."""
    return b"data: " + encoded(content) + b"\n\n"
