"""The HTTP application: OpenAI's paths for one model, for those who may ask, and nothing else."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from adapmixed.errors import BudgetSpentError, LedgerError
from adapmixed.serving.admission import ANYONE, Admission, Key, Reservation
from adapmixed.serving.answers import Reply, Scheduler
from adapmixed.serving.engine import Engine
from adapmixed.serving.errors import (
    RequestError,
    internal,
    json_response,
    queue_full,
    spent,
    stopping,
)
from adapmixed.serving.fields import Query, ServedModel, parsed, query_of
from adapmixed.serving.metrics import Metrics

MAX_BODY = 1 << 20
"""Largest body of a request, in bytes."""

BODY_SECONDS = 60.0
"""Seconds that a client may take to send its body."""

READERS, UNREAD = 2, 64
"""Number of requests that are tokenized at the same time, and that may wait for it."""

OPEN_PATH = "/health"
"""The path that needs no key."""

_LOG = logging.getLogger(__name__)
_ACCESS = logging.getLogger("adapmixed.serving.access")


class Service:
    """The ASGI application, for one event loop, with the parts that it answers with.

    It counts and logs every request. The log has method, path and status alone. A path that is not
    served is logged as "other", for a client may have put anything there.

    Args:
        engine: answers queries, in a thread that this starts.
        model: the served model.
        admission: the tokens of the mechanism's plan, and the keys.
        then_public: whether the public model answers what the plan does not pay for.
    """

    def __init__(
        self, engine: Engine, model: ServedModel, admission: Admission, *, then_public: bool = False
    ) -> None:
        self.admission, self._model, self._then_public = admission, model, then_public
        self.scheduler = Scheduler(engine)
        self.metrics = Metrics(self.scheduler, admission)
        self._created = int(time.time())
        self._readers, self._unread = asyncio.Semaphore(READERS), 0
        self._turn = asyncio.Lock()
        self._handlers: dict[str, tuple[str, Callable[[Request, Key], Awaitable[Any]]]] = {
            "/v1/completions": ("POST", partial(self._answer, chat=False)),
            "/v1/chat/completions": ("POST", partial(self._answer, chat=True)),
            "/v1/models": ("GET", self._models),
            OPEN_PATH: ("GET", self._health),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. WebSockets and other protocols are not served."""
        if scope["type"] != "http":
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"] if scope["path"] in self._handlers else "other"
        try:
            try:
                key = self._key(scope)
                if path == "other":
                    raise RequestError(404, "this path is not served")
                method, handler = self._handlers[path]
                if scope["method"] not in (method, "HEAD" if method == "GET" else method):
                    message, allowed = "this path does not take this method", {"allow": method}
                    raise RequestError(405, message, headers=allowed)
                response = await handler(Request(scope, receive), key)
                await response(scope, receive, counted)
            except RequestError as error:
                await error.response()(scope, receive, counted)
        except Exception as error:
            _LOG.error("a request has failed: %s", _place(error))
            if not status:
                await internal().response()(scope, receive, counted)
        finally:
            self.metrics.requested(path, status or 499)  # 499: the client left before
            _ACCESS.info("%s %s %d", scope["method"], path, status or 499)

    def _key(self, scope: Scope) -> Key:
        """Return the key of who sends a request.

        Raises:
            RequestError: 401: there is none, or it is unknown; 403: as `_check_local`.
        """
        headers = Headers(scope=scope)
        if scope["path"] == OPEN_PATH:
            return ANYONE
        if self.admission.clients is None:
            _check_local(headers)
            return ANYONE
        key = self.admission.clients.find(headers.get("authorization"))
        if key is None:
            message = "the header Authorization must be 'Bearer KEY' with a key of this server"
            given = {"www-authenticate": "Bearer"}
            raise RequestError(401, message, "invalid_api_key", headers=given)
        return key

    async def _answer(self, request: Request, key: Key, *, chat: bool) -> Any:
        """Return the response to a query, which is an ASGI application."""
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if self._unread >= UNREAD:
            raise queue_full()
        self._unread += 1
        try:
            async with self._readers:  # reading may take long, so not in the event loop's thread
                query = await asyncio.to_thread(
                    lambda: query_of(parsed(body), self._model, key, chat=chat)
                )
        finally:
            self._unread -= 1
        return await self._begin(query, key)

    async def _begin(self, query: Query, key: Key) -> Reply:
        """Reserve, count and submit a request; one at a time, so that what was checked holds.

        Raises:
            RequestError: 503 if the queue is full, the server stops, or others have reserved the
                tokens that are left; 429 if the client asks too often, or if the plan or the key
                has too few tokens left. Nothing is reserved then.
        """
        async with self._turn:
            self.scheduler.check_room(len(query.prompts))
            query, reservation = await asyncio.to_thread(self._reserved, query, key)
            try:
                answer = Reply(query, reservation, self.metrics, self._model)
                self.scheduler.submit(answer)
            except BaseException:
                reservation.close()
                raise
        return answer

    def _reserved(self, query: Query, key: Key) -> tuple[Query, Reservation]:
        """Return a query that can be paid for, with its tokens."""
        try:
            return query, self.admission.reserve(query.tokens, key)
        except BudgetSpentError:
            if self._then_public:
                return query.of_public(), Reservation(self.admission, 0)
        except LedgerError:  # no later answer could be counted either
            self.scheduler.fail("the tokens of a key could not be counted durably")
            raise stopping() from None
        left = self.admission.unspent
        rest = "" if left is None else f": {left} tokens are left of its plan"
        raise spent(f"the ensemble's budget does not pay for max_tokens of every prompt{rest}")

    async def _models(self, request: Request, key: Key) -> Response:
        """Answer /v1/models."""
        model = {"id": self._model.name, "object": "model", "created": self._created}
        model["owned_by"] = "adapmixed"
        return json_response({"object": "list", "data": [model]})

    async def _health(self, request: Request, key: Key) -> Response:
        """Answer /health."""
        if self.scheduler.stopped:
            raise stopping()
        told: dict[str, Any] = {"status": "ok"}
        if self._then_public:
            left = self.admission.unspent or 0
            told |= {"answers": "ensemble" if left else "public model", "plan_tokens_left": left}
        return json_response(told)


async def _body(request: Request) -> bytes:
    """Return the whole body.

    Raises:
        RequestError: 413: it is too large; 408: it did not come in time.
        ClientDisconnect: the client has left.
    """
    too_large = RequestError(413, f"the body must have at most {MAX_BODY} bytes", "too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 12 or int(length) > MAX_BODY):
        raise too_large
    parts = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts += part
                if len(parts) > MAX_BODY:
                    raise too_large
    except TimeoutError:
        message = f"the body must come within {BODY_SECONDS:g} seconds"
        raise RequestError(408, message, headers={"connection": "close"}) from None
    return bytes(parts)


def _check_local(headers: Headers) -> None:
    """Check that a request was not sent by a page of another site in a browser on this machine.

    Such a page could spend the budget of a server without keys.

    Raises:
        RequestError: 403: the request names another host, or comes from a page of another host.
    """
    addresses = f"//{headers.get('host', '')}", headers.get("origin", "//localhost")
    try:
        local = all(is_loopback(urlsplit(address).hostname or "") for address in addresses)
    except ValueError:
        local = False
    if not local:
        message = "a server without keys answers requests of its own machine alone"
        raise RequestError(403, message, "not_local")


def is_loopback(host: str) -> bool:
    """Return whether an address belongs to this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _place(error: Exception) -> str:
    """Return an error's type and place. Its text could hold a prompt or a private value."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
