"""Errors in OpenAI's form. All but a stop and a fault are raised before anything is charged."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from adapmixed.errors import LedgerError

NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}


class RequestError(Exception):
    """A request that is not answered.

    Args:
        status: HTTP status. OpenAI's class of the error follows from it.
        message: what is wrong, for the client. It holds nothing private.
        code: OpenAI's name of the error.
        param: name of the field that is wrong.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = code if status == 429 and code else kind
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """Return the response for a client."""
        return json_response(self.body, self.status, self.headers)


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with a value as its body."""
    return Response(encoded(content), status, headers, "application/json")


def encoded(content: Any) -> bytes:
    """Return a value as JSON in ASCII, so that no string in it can fail to be encoded."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def queue_full() -> RequestError:
    """Return the error for a server that has too many answers to give."""
    message = "too many answers wait already; try again later"
    return RequestError(503, message, "queue_full", headers={"retry-after": "1"})


def stopping(*, charged: bool = False) -> RequestError:
    """Return the error for a server that stops.

    Args:
        charged: whether tokens of this answer were charged, so that a retry would pay again.
    """
    message = "the server is stopping, so this answer is not given"
    headers = NO_RETRY if charged else {"retry-after": "10"}
    return RequestError(503, message, "stopping", headers=headers)


def internal() -> RequestError:
    """Return the error for a fault of the server. It says nothing about the cause."""
    message = "the server has made an error"
    return RequestError(500, message, "internal_error", headers=NO_RETRY)


def loggable(error: BaseException) -> str:
    """Return what a log may say of an error. Its text could hold a prompt or a private value."""
    name = type(error).__name__
    if isinstance(error, LedgerError):
        return f"{name}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{name} in {frames[-1].name}, line {frames[-1].lineno}" if frames else name


def shortened(value: object) -> str:
    """Return a value from JSON for a message to the client that sent it."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
