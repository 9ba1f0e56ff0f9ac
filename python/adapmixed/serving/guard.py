"""The outermost layer of the application: keys, local callers, faults, and the log of requests."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import traceback
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapmixed.serving.clients import Client, Clients, unlimited
from adapmixed.serving.errors import RequestError, internal, no_key
from adapmixed.serving.metrics import Metrics

OPEN_PATHS = ("/health",)
"""Paths that need no key."""

_LOG = logging.getLogger(__name__)
_ACCESS = logging.getLogger("adapmixed.serving.access")


class Guard:
    """Lets requests through that may be answered, and counts and logs every request.

    The log has method, path and status alone. A path that is not served is logged as "other", for
    a client may have put anything there.

    Args:
        app: the application behind it. It finds the `Client` in scope["state"]["client"].
        clients: the keys; None if callers of this machine need none.
        metrics: the operator's figures.
        paths: the paths that are served.
    """

    def __init__(
        self, app: ASGIApp, clients: Clients | None, metrics: Metrics, paths: Collection[str]
    ) -> None:
        self._app, self._clients, self._metrics, self._paths = app, clients, metrics, paths
        self._anyone = unlimited()

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

        path = self._label(scope["path"])
        try:
            try:
                scope.setdefault("state", {})["client"] = self._client(scope)
                await self._app(scope, receive, counted)
            except RequestError as error:
                await error.response()(scope, receive, counted)
        except Exception as error:
            _LOG.error("a request has failed: %s", _place(error))
            if not status:
                await internal().response()(scope, receive, counted)
        finally:
            self._metrics.requested(path, status or 499)  # 499: the client left before
            _ACCESS.info("%s %s %d", scope["method"], path, status or 499)

    def _label(self, path: str) -> str:
        if path in self._paths:
            return path
        return "/v1/models/..." if path.startswith("/v1/models/") else "other"

    def _client(self, scope: Scope) -> Client:
        headers = Headers(scope=scope)
        if scope["path"] in OPEN_PATHS:
            return self._anyone
        if self._clients is None:
            _check_local(headers)
            return self._anyone
        client = self._clients.find(headers.get("authorization"))
        if client is None:
            raise no_key()
        return client


def _check_local(headers: Headers) -> None:
    """Check that a request was not sent by a page of another site in a browser on this machine.

    Such a page could spend the budget of a server without keys.

    Raises:
        RequestError: 403: the request names another host, or comes from a page of another host.
    """
    origin = headers.get("origin")
    hosts = [f"//{headers.get('host', '')}"] + ([] if origin is None else [origin])
    if not all(is_loopback(_host(one)) for one in hosts):
        message = "a server without keys answers requests of its own machine alone"
        raise RequestError(403, message, code="not_local")


def is_loopback(host: str) -> bool:
    """Return whether an address belongs to this machine alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _host(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _place(error: Exception) -> str:
    """Return an error's type and place. Its text could hold a prompt or a private value."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
