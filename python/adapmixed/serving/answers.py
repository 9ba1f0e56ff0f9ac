"""Answers in OpenAI's form, sent while their clients read and the engine goes on."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapmixed.serving.engine import Piece
from adapmixed.serving.errors import RequestError, encoded, internal, json_response
from adapmixed.serving.scheduler import Running

PUBLIC = "public-model"
"""`system_fingerprint` of an answer that the public model gave alone."""
_LOG = logging.getLogger(__name__)
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class Reply:
    """The response to a query, whole or as server-sent events, as an ASGI application.

    Args:
        running: the query on its way.
        model: name of the served model.
    """

    def __init__(self, running: Running, model: str) -> None:
        self._running, self._query = running, running.query
        chat = self._query.chat
        kind = "chat.completion.chunk" if self._query.stream else "chat.completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(16)}",
            "object": kind if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        if self._query.public:
            self._head["system_fingerprint"] = PUBLIC

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and end it if the client leaves or stops reading.

        Raises:
            RequestError: the engine has stopped before a whole answer was complete.
        """

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answer = self._stream(send) if self._query.stream else self._whole()
        answering, leaving = asyncio.create_task(answer), asyncio.create_task(left())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._running.cancelled = True
            leaving.cancel()
            gone = answering.cancel()
        if not gone and (whole := answering.result()) is not None:
            await whole(scope, receive, send)

    async def _whole(self) -> Response:
        """Wait for the whole answer and return it."""
        texts = [""] * len(self._query.prompts)
        finishes: list[str | None] = [None] * len(texts)
        async for piece in self._running.pieces():
            texts[piece.index] += piece.text
            finishes[piece.index] = piece.finish
        choices = []
        for index, text in enumerate(texts):
            message = {"role": "assistant", "content": text, "refusal": None}
            body = {"message": message} if self._query.chat else {"text": text}
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
            if self._query.chat:
                yield self._event(0, {"delta": {"role": "assistant", "content": ""}}, None)
            async for piece in self._running.pieces():
                for body, finish in self._bodies(piece):
                    yield self._event(piece.index, body, finish)
            if self._query.include_usage:
                yield event({**self._head, "choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except RequestError as error:
            yield event(error.body)
        except Exception as error:
            _LOG.error("a stream has failed: %s", type(error).__name__)
            yield event(internal().body)

    def _bodies(self, piece: Piece) -> list[tuple[dict[str, Any], str | None]]:
        """Return what the events for a piece tell; none if it has no text and ends nothing."""
        if not self._query.chat:
            return [({"text": piece.text}, piece.finish)] if piece.text or piece.finish else []
        found: list[tuple[dict[str, Any], str | None]] = []
        if piece.text:
            found.append(({"delta": {"content": piece.text}}, None))
        return [*found, ({"delta": {}}, piece.finish)] if piece.finish else found

    def _event(self, index: int, body: dict[str, Any], finish: str | None) -> bytes:
        usage = {"usage": None} if self._query.include_usage else {}
        return event({**self._head, "choices": [_choice(index, body, finish)], **usage})

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(one.tokens) for one in self._query.prompts)
        released = self._running.released
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
