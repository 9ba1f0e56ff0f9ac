"""HTTP: OpenAI's paths for one model, for those who may ask, and nothing else.

`Service` is the application, `Listener` the server of its connections.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from adapmixed.errors import BudgetSpentError, LedgerError
from adapmixed.serving.admission import ANYONE, Admission, Key
from adapmixed.serving.answers import Reply, Scheduler
from adapmixed.serving.engine import MOST_WAITING, Engine
from adapmixed.serving.errors import (
    NO_RETRY,
    RequestError,
    internal,
    json_response,
    loggable,
    queue_full,
    stopping,
)
from adapmixed.serving.fields import Query, ServedModel, query_of
from adapmixed.serving.metrics import Metrics

MAX_BODY = 1 << 20
"""Largest body of a request, in bytes."""

CLIENT_SECONDS = 60.0
"""Seconds that a client may take to send a header, to send a body, and to read more of an answer,
where the system can tell."""

STOP_SECONDS = 30.0
"""Seconds that running answers have after a signal."""

LAST_SECONDS = 5
"""Seconds for the last bytes of all responses, once no answer goes on."""

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
        self._turn, self._unread = asyncio.Lock(), 0
        self._handlers: dict[str, tuple[str, Callable[[Request, Key], Awaitable[Any]]]] = {
            "/v1/completions": ("POST", partial(self._answer, chat=False)),
            "/v1/chat/completions": ("POST", partial(self._answer, chat=True)),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. WebSockets and other protocols are not served."""
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
        except ClientDisconnect:
            pass
        except Exception as error:
            _LOG.error("a request has failed: %s", loggable(error))
            if not status:
                await internal().response()(scope, receive, counted)
        finally:
            status = status or 499  # the client left before
            self.metrics.requests.labels(path, status).inc()
            _ACCESS.info("%s %s %d", scope["method"], path, status)

    def _key(self, scope: Scope) -> Key:
        """Return the key of who sends a request.

        Without keys a page of another site, in a browser on this machine, could spend the budget.
        So neither the host nor the origin may then be another machine.

        Raises:
            RequestError: 401: there is no key, or it is unknown; 403: another host or origin.
        """
        headers, clients = Headers(scope=scope), self.admission.clients
        if clients is None and scope["path"] != "/health":
            named, local = [f"//{headers.get('host', '')}"], False
            named.append(headers.get("origin", "//localhost"))
            with suppress(ValueError):
                local = all(is_loopback(urlsplit(address).hostname or "") for address in named)
            if not local:
                message = "a server without keys answers requests of its own machine alone"
                raise RequestError(403, message, "not_local")
        if clients is None or scope["path"] == "/health":
            return ANYONE
        key = clients.find(headers.get("authorization"))
        if key is None:
            message = "the header Authorization must be 'Bearer KEY' with a key of this server"
            challenge = {"www-authenticate": "Bearer"}
            raise RequestError(401, message, "invalid_api_key", headers=challenge)
        return key

    async def _answer(self, request: Request, key: Key, *, chat: bool) -> Reply:
        """Return the answer to a query, which is an ASGI application.

        Requests are read and admitted one at a time, so that what was checked holds.

        Raises:
            RequestError: 400 for a fault of the request; 503 if the queue is full, the server
                stops, or others have reserved the tokens that are left; 429 if the client asks too
                often, or if the plan or the key has too few tokens left. Nothing is reserved then.
        """
        body = await _body(request)
        if self._unread >= MOST_WAITING:
            raise queue_full()
        self._unread += 1
        try:
            async with self._turn:
                query = await asyncio.to_thread(self._admitted, body, key, chat)
                try:
                    answer = Reply(query, self.admission, self.metrics, self._model)
                    self.scheduler.submit(answer)
                except BaseException:
                    self.admission.free(query.tokens, key.name)
                    raise
                return answer
        finally:
            self._unread -= 1

    def _admitted(self, body: bytes, key: Key, chat: bool) -> Query:
        """Return a query that can be paid for, and whose tokens are reserved."""
        query = query_of(body, self._model, key, chat=chat)
        self.scheduler.check_room(len(query.prompts))
        try:
            self.admission.reserve(query.tokens, key)
            return query
        except BudgetSpentError:
            if self._then_public:
                return query.of_public()
        except LedgerError:  # no later answer could be counted either
            self.scheduler.fail("the tokens of a key could not be counted durably")
            raise stopping() from None
        left = self.admission.unspent
        message = "the ensemble's budget does not pay for max_tokens of every prompt"
        message += "" if left is None else f": {left} tokens are left of its plan"
        raise RequestError(429, message, "insufficient_quota", headers=NO_RETRY)

    async def _models(self, request: Request, key: Key) -> Response:
        """Answer /v1/models."""
        model = {"id": self._model.name, "object": "model", "created": self._created}
        model["owned_by"] = "adapmixed"
        return json_response({"object": "list", "data": [model]})

    async def _health(self, request: Request, key: Key) -> Response:
        """Answer /health."""
        if self.scheduler.stopped:
            raise stopping()
        body: dict[str, Any] = {"status": "ok"}
        if self._then_public:
            left = self.admission.unspent or 0
            body |= {"answers": "ensemble" if left else "public model", "plan_tokens_left": left}
        return json_response(body)


async def _body(request: Request) -> bytes:
    """Return the whole body.

    Raises:
        RequestError: 413: it is too large; 408: it did not come in time.
        ClientDisconnect: the client has left.
    """
    too_large = RequestError(413, f"the body must have at most {MAX_BODY} bytes", "too_large")
    parts = bytearray()
    try:
        async with asyncio.timeout(CLIENT_SECONDS):
            async for part in request.stream():
                parts += part
                if len(parts) > MAX_BODY:
                    raise too_large
    except TimeoutError:
        message = f"the body must come within {CLIENT_SECONDS:g} seconds"
        raise RequestError(408, message, headers={"connection": "close"}) from None
    return bytes(parts)


def is_loopback(host: str) -> bool:
    """Return whether an address belongs to this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address, and does not listen yet.

    So clients are refused until the server is ready. Accepted connections inherit its settings: the
    system closes those whose clients do not read.

    Raises:
        OSError: the address is not of this machine, or the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # With the protocol, asyncio sends every token at once (TCP_NODELAY).
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{error.strerror}: {host} port {port}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * CLIENT_SECONDS))
    return sock


class _Protocol(H11Protocol):
    """uvicorn's protocol, with an error in OpenAI's form for what is no HTTP."""

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP, unless a response has begun, and close. uvicorn calls this."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = RequestError(400, "the request must be valid HTTP/1.1").response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(response.body))):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Listener(uvicorn.Server):
    """A server that answers until SIGINT or SIGTERM, and then stops gracefully.

    After a signal new queries get 503, and running answers have some time to end. A second signal
    cuts them at once. It also ends if the engine fails. The application logs requests itself, since
    uvicorn would log what follows "?" in an address.

    Args:
        service: the application. Its scheduler is stopped before the last connections are closed.
        tls: files of a certificate and its private key; None without TLS.
    """

    def __init__(self, service: Service, *, tls: Sequence[Path] | None = None) -> None:
        certificate, key = tls or (None, None)
        config = uvicorn.Config(
            service,
            loop="asyncio",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_SECONDS,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        super().__init__(config)
        self._scheduler = service.scheduler
        self._silent: dict[Any, float] = {}  # connections without a request, since when

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end. uvicorn calls this ten times a second."""
        if counter % 10 == 0:
            self._close_silent()
        return await super().on_tick(counter) or self._scheduler.ended

    def _close_silent(self) -> None:
        """Close connections that have not sent a whole request in time."""
        now = time.monotonic()
        conns: Any = self.server_state.connections
        silent = [conn for conn in conns if conn.cycle is None or conn.cycle.response_complete]
        self._silent = {conn: self._silent.get(conn, now) for conn in silent}
        for conn, since in self._silent.items():
            if now - since > CLIENT_SECONDS:
                conn.transport.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. uvicorn calls this for a signal."""
        self._scheduler.finish(0.0 if self._scheduler.stopped else STOP_SECONDS)
