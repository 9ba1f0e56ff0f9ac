"""Errors in OpenAI's form, each raised before a response starts and before anything is charged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

INVALID = "invalid_request_error"
_NO_RETRY = {"x-should-retry": "false"}
_OF_STARLETTE = {
    404: "this path is not served",
    405: "this path does not take this method",
}


class RequestError(Exception):
    """A request that is not answered.

    Args:
        status: HTTP status.
        message: what is wrong, for the client. It holds nothing private.
        type: OpenAI's class of the error.
        param: name of the field that is wrong.
        code: OpenAI's name of the error.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}

    def response(self) -> Response:
        """Return the response for a client."""
        return JsonResponse(self.body, self.status, self.headers)


class JsonResponse(Response):
    """A JSON body in ASCII, so that no string in it can fail to be encoded."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body's bytes."""
        return encoded(content)


def encoded(content: Any) -> bytes:
    """Return a value as JSON in ASCII."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def bad_request(param: str | None, message: str, code: str | None = None) -> RequestError:
    """Return the error for a field that is wrong."""
    return RequestError(400, message, INVALID, param, code)


def no_key() -> RequestError:
    """Return the error for a missing or unknown key."""
    message = "the header Authorization must be 'Bearer KEY' with a key of this server"
    headers = {"www-authenticate": "Bearer"}
    return RequestError(401, message, INVALID, None, "invalid_api_key", headers)


def no_model(name: str) -> RequestError:
    """Return the error for a model that is not served."""
    message = f"the model {shortened(name)} is not served; GET /v1/models names the one that is"
    return RequestError(404, message, INVALID, "model", "model_not_found")


def too_large(limit: int) -> RequestError:
    """Return the error for a body of too many bytes."""
    return RequestError(
        413, f"the body must have at most {limit} bytes", INVALID, None, "too_large"
    )


def queue_full() -> RequestError:
    """Return the error for a server that has too many answers to give."""
    message = "too many answers wait already; try again later"
    return RequestError(503, message, "server_error", None, "queue_full", {"retry-after": "1"})


def reserved() -> RequestError:
    """Return the error for tokens that running answers have reserved, but may not use."""
    message = (
        "running answers have reserved too many tokens of the ensemble's budget; try again later, "
        "or with fewer max_tokens"
    )
    return RequestError(503, message, "server_error", None, "reserved", {"retry-after": "5"})


def stopping(*, charged: bool = False) -> RequestError:
    """Return the error for a server that stops.

    Args:
        charged: whether tokens of this answer were charged, so that a retry would pay again.
    """
    message = "the server is stopping, so this answer is not given"
    headers = _NO_RETRY if charged else {"retry-after": "10"}
    return RequestError(503, message, "server_error", None, "stopping", headers)


def plan_spent(left: int | None) -> RequestError:
    """Return the error for a plan that has too few tokens left.

    Args:
        left: tokens that are left of a planned mechanism, which are public; None otherwise.
    """
    rest = "" if left is None else f": {max(left, 0)} tokens are left of its plan"
    return _quota(f"the ensemble's budget does not pay for max_tokens of every prompt{rest}")


def key_spent(left: int) -> RequestError:
    """Return the error for a key that has too few tokens left."""
    return _quota(
        f"this key does not pay for max_tokens of every prompt: it has {left} tokens left"
    )


def _quota(message: str) -> RequestError:
    kind = "insufficient_quota"
    return RequestError(429, message, kind, None, kind, _NO_RETRY)


def too_fast(per_minute: int, seconds: float) -> RequestError:
    """Return the error for a key with too many requests; it may ask again in so many seconds."""
    kind = "rate_limit_exceeded"
    headers = {"retry-after": str(max(1, math.ceil(seconds)))}
    message = f"this key may make {per_minute} requests per minute"
    return RequestError(429, message, kind, None, kind, headers)


def internal() -> RequestError:
    """Return the error for a fault of the server. It says nothing about the cause."""
    message = "the server has made an error"
    return RequestError(500, message, "server_error", None, "internal_error", _NO_RETRY)


def of_starlette(error: HTTPException) -> RequestError:
    """Return the error for one that Starlette raises."""
    message = _OF_STARLETTE.get(error.status_code, "the request cannot be answered")
    return RequestError(error.status_code, message, INVALID, None, None, error.headers)


def shortened(value: object) -> str:
    """Return a value from JSON for a message to the client that sent it."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
