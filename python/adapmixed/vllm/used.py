"""Counts the tokens of an answer in what vLLM sends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Send

from adapmixed.serving.errors import RequestError, encoded
from adapmixed.serving.fields import Asked

_EVENT = b"data: "
_MOST = 1 << 24  # bytes of an answer that is not streamed
_SLOW_SECONDS = 0.1  # a client that takes longer for an event lags behind the engine


class UsedTokens:
    """Passes a response on, and reads its number of tokens.

    vLLM is asked to tell this number in every event of a stream and at its end. A client gets it at
    the end alone, if it has asked for it. Errors of vLLM are not passed on.

    Args:
        send: sends to the client.
        asked: the request.
        block: tokens of an answer that the engine may draw before a client's end reaches it.
        fault: returns the error that a client gets in a stream in the place of vLLM's own.

    Attributes:
        status: the status of vLLM's response; 0 before it has begun.
    """

    def __init__(
        self, send: Send, asked: Asked, block: int, fault: Callable[[], RequestError]
    ) -> None:
        self._send, self._asked, self._block, self._fault = send, asked, block, fault
        self._kept = bytearray()
        self._total: int | None = None
        self._seen = dict.fromkeys(range(len(asked.query.prompts)), 0)
        self._ended: set[int] = set()
        self._slow = False
        self.status = 0

    @property
    def most(self) -> int:
        """The largest number of tokens that the answers can have used so far.

        An answer that goes on may have a block more than what was told. A client that did not read
        in time, or whose answer is no stream, may have been given all tokens that it asked for.
        """
        if self._total is not None:
            return self._total
        if not self._asked.stream or self._slow:
            return self._asked.tokens
        each, block = self._asked.query.max_tokens, self._block
        return sum(
            min(each, seen + (0 if index in self._ended else block))
            for index, seen in self._seen.items()
        )

    async def send(self, message: Message) -> None:
        """Send a message of the response, unless it is an error."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        if self.status >= 400:
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._asked.stream:
            body = self._events(body, last=not more)
        elif len(self._kept) + len(body) <= _MOST:
            self._kept += body
            if not more:
                self._read(bytes(self._kept))
        begun, self._slow = time.monotonic(), True  # also if this ends while it waits
        await self._send({**message, "body": body})
        self._slow = time.monotonic() - begun > _SLOW_SECONDS

    def _events(self, body: bytes, *, last: bool) -> bytes:
        """Return the whole events so far, without the numbers that nobody asked for."""
        self._kept += body
        *events, rest = bytes(self._kept).split(b"\n\n")
        self._kept = bytearray(rest)
        return b"".join(map(self._told, events)) + (rest if last else b"")

    def _told(self, event: bytes) -> bytes:
        """Return the event for the client, with its end; "" for none."""
        whole = self._read(event[len(_EVENT) :]) if event.startswith(_EVENT) else None
        if whole is None:
            return event + b"\n\n"
        if "error" in whole:
            whole = self._fault().body
        elif whole.get("choices") != []:
            whole.pop("usage", None)
        elif not self._asked.include_usage:
            return b""
        return _EVENT + encoded(whole) + b"\n\n"

    def _read(self, text: bytes) -> dict[str, Any] | None:
        """Count the tokens that a JSON object tells, and return it; None if it is no object."""
        try:
            whole = json.loads(text)
            if not isinstance(whole, dict):
                return None
            choices, usage = whole.get("choices"), whole.get("usage")
            count = None if usage is None else int(usage["completion_tokens"])
            if count is not None and (choices == [] or not self._asked.stream):
                self._total = count
            elif choices:
                index = choices[0]["index"]
                self._seen[index] = max(self._seen.get(index, 0), count or 0)
                if choices[0].get("finish_reason") is not None:
                    self._ended.add(index)
            return whole
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
