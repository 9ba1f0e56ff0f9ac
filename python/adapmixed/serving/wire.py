"""OpenAI's form of answers: one body, or the events of a stream."""

from __future__ import annotations

import secrets
import time
from typing import Any

from adapmixed.serving.engine import Piece, Query
from adapmixed.serving.errors import encoded

DONE = b"data: [DONE]\n\n"
PUBLIC = "public-model"
"""`system_fingerprint` of an answer that the public model gave alone."""


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

    def opening(self) -> list[bytes]:
        """Return the events before the first token: for chat, the role."""
        if not self._query.chat:
            return []
        return [self._event(0, {"delta": {"role": "assistant", "content": ""}}, None)]

    def piece(self, piece: Piece) -> list[bytes]:
        """Return the events for one piece; none if it has no text and ends nothing."""
        events = []
        if piece.text or (piece.finish and not self._query.chat):
            finish = None if self._query.chat else piece.finish
            body = {"delta": {"content": piece.text}} if self._query.chat else {"text": piece.text}
            events.append(self._event(piece.index, body, finish))
        if piece.finish and self._query.chat:
            events.append(self._event(piece.index, {"delta": {}}, piece.finish))
        return events

    def ending(self, released: int) -> list[bytes]:
        """Return the events after the last token."""
        events = [DONE]
        if self._query.include_usage:
            body = {**self._chunk(), "choices": [], "usage": self._usage(released)}
            events.insert(0, event(body))
        return events

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
