"""Answers in OpenAI's form, sent while their clients read and the engine goes on."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Receive, Scope, Send

from adapmixed.serving.engine import Piece, Query, StoppedError
from adapmixed.serving.errors import JsonResponse, encoded, internal, stopping
from adapmixed.serving.running import ClientLeftError, Running

SEND_SECONDS = 60.0
"""Seconds that a client may take until it reads more of a stream."""

DONE = b"data: [DONE]\n\n"
PUBLIC = "public-model"
"""`system_fingerprint` of an answer that the public model gave alone."""
_LOG = logging.getLogger(__name__)
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class Reply:
    """The response to a query, whole or as server-sent events, as an ASGI application."""

    def __init__(self, running: Running, writer: Writer) -> None:
        self._running, self._writer = running, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and end it if the client leaves or stops reading.

        Raises:
            RequestError: the engine has stopped before a whole answer was complete.
        """
        running = self._running

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            running.leave()

        watcher, whole = asyncio.create_task(watch()), None
        try:
            if running.query.stream:
                await self._stream(send)
            else:
                whole = await self._whole()
        except ClientLeftError:
            pass
        finally:
            running.end()
            watcher.cancel()
        if whole is not None:
            await whole(scope, receive, send)

    async def _whole(self) -> JsonResponse:
        """Wait for the whole answer and return it."""
        running = self._running
        count = len(running.query.prompts)
        texts: list[list[str]] = [[] for _ in range(count)]
        finishes: list[str | None] = [None] * count
        try:
            async for piece in running.pieces():
                texts[piece.index].append(piece.text)
                finishes[piece.index] = piece.finish
        except StoppedError:
            raise stopping(charged=running.released > 0) from None
        joined = ["".join(parts) for parts in texts]
        return JsonResponse(self._writer.whole(joined, finishes, running.released))

    async def _stream(self, send: Send) -> None:
        """Send every piece as it is released.

        An error is an event, too, and the stream then ends without "[DONE]".
        """
        try:
            await _sent(send, type="http.response.start", status=200, headers=_STREAM)
            async for part in self._events():
                if part:
                    await _sent(send, type="http.response.body", body=part, more_body=True)
            await _sent(send, type="http.response.body", body=b"", more_body=False)
        except TimeoutError:
            _LOG.info("a client has not read its stream for %g seconds", SEND_SECONDS)
        except OSError:
            pass

    async def _events(self) -> AsyncIterator[bytes]:
        running, writer = self._running, self._writer
        yield writer.opening()
        try:
            async for piece in running.pieces():
                yield writer.piece(piece)
        except StoppedError:
            yield event(stopping(charged=True).body)
        except ClientLeftError:
            raise
        except Exception as error:
            _LOG.error("a stream has failed: %s", type(error).__name__)
            yield event(internal().body)
        else:
            yield writer.ending(running.released)


async def _sent(send: Send, **message: object) -> None:
    async with asyncio.timeout(SEND_SECONDS):
        await send(message)


class Writer:
    """Writes the answer to one request.

    Args:
        query: the request.
        model: name of the served model.
    """

    def __init__(self, query: Query, model: str) -> None:
        self._query = query
        kind, name = ("chatcmpl", "chat.completion") if query.chat else ("cmpl", "text_completion")
        self._head = {
            "id": f"{kind}-{secrets.token_hex(16)}",
            "object": name,
            "created": int(time.time()),
            "model": model,
        }
        if query.public:
            self._head["system_fingerprint"] = PUBLIC

    def whole(self, texts: list[str], finishes: list[str | None], released: int) -> dict[str, Any]:
        """Return the body of an answer.

        Args:
            texts: the text that answers each prompt.
            finishes: why each text ended.
            released: number of released tokens.
        """
        choices = [
            {"index": index, **self._text(text), "logprobs": None, "finish_reason": finish}
            for index, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        return {**self._head, "choices": choices, "usage": self._usage(released)}

    def opening(self) -> bytes:
        """Return the events before the first token: for chat, the role."""
        if not self._query.chat:
            return b""
        return self._event(0, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, piece: Piece) -> bytes:
        """Return the events for one piece; none if it has no text and ends nothing."""
        events = b""
        if piece.text or (piece.finish and not self._query.chat):
            finish = None if self._query.chat else piece.finish
            body = {"delta": {"content": piece.text}} if self._query.chat else {"text": piece.text}
            events += self._event(piece.index, body, finish)
        if piece.finish and self._query.chat:
            events += self._event(piece.index, {"delta": {}}, piece.finish)
        return events

    def ending(self, released: int) -> bytes:
        """Return the events after the last token."""
        if not self._query.include_usage:
            return DONE
        return event({**self._chunk(), "choices": [], "usage": self._usage(released)}) + DONE

    def _event(self, index: int, body: dict[str, Any], finish: str | None) -> bytes:
        choice = {"index": index, **body, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self._query.include_usage else {}
        return event({**self._chunk(), "choices": [choice], **usage})

    def _chunk(self) -> dict[str, Any]:
        suffix = ".chunk" if self._query.chat else ""
        return {**self._head, "object": f"{self._head['object']}{suffix}"}

    def _text(self, text: str) -> dict[str, Any]:
        if self._query.chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"text": text}

    def _usage(self, released: int) -> dict[str, int]:
        prompt = self._query.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": released,
            "total_tokens": prompt + released,
        }


def event(content: Any) -> bytes:
    """Return a server-sent event with a value as JSON."""
    return b"data: " + encoded(content) + b"\n\n"
