"""Counts the tokens of an answer in what vLLM sends."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Message, Send

from adapmixed.serving.fields import Asked

_EVENT = b"data: "
_MOST = 1 << 24  # bytes of an answer that is not streamed


class UsedTokens:
    """Passes a response on, and reads its number of tokens.

    vLLM is asked to end every stream with this number. A client that did not ask for it does not
    get it.

    Args:
        send: sends to the client.
        asked: the request.
        shown: whether the client has asked for the number in a stream.

    Attributes:
        count: the number of tokens of the whole answer; None if it was not told.
    """

    def __init__(self, send: Send, asked: Asked, *, shown: bool) -> None:
        self._send, self._stream, self._shown = send, asked.stream, shown
        self._kept = bytearray()
        self.count: int | None = None

    async def send(self, message: Message) -> None:
        """Send a message of the response."""
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._stream:
            body = self._events(body, last=not more)
        elif len(self._kept) + len(body) <= _MOST:
            self._kept += body
            if not more:
                self._read(bytes(self._kept))
        await self._send({**message, "body": body})

    def _events(self, body: bytes, *, last: bool) -> bytes:
        """Return the whole events so far, without the one that tells the number."""
        self._kept += body
        *events, rest = bytes(self._kept).split(b"\n\n")
        self._kept = bytearray(rest)
        told = [event + b"\n\n" for event in events if self._is_told(event)]
        return b"".join(told) + (rest if last else b"")

    def _is_told(self, event: bytes) -> bool:
        if event.startswith(_EVENT) and b'"usage"' in event:
            found = self._read(event[len(_EVENT) :])
            return self._shown or not found
        return True

    def _read(self, text: bytes) -> bool:
        """Read the number of tokens from a JSON object; return whether it is that alone."""
        try:
            whole: Any = json.loads(text)
            usage = whole.get("usage")
            if usage is None:
                return False
            self.count = int(usage["completion_tokens"])
            return bool(whole.get("choices") == [])
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
