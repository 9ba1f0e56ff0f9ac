"""Listen for requests, and stop gracefully on a signal."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from adapmixed.serving.app import Service
from adapmixed.serving.errors import bad_request, encoded

HEADER_SECONDS = 60.0
"""Seconds that a connection may take until its first request has come."""

SEND_SECONDS = 60.0
"""Seconds that a client may take until it reads more of an answer, where the system can tell."""

STOP_SECONDS = 30.0
"""Seconds that running answers have after a signal."""

LAST_SECONDS = 5
"""Seconds for the last bytes of all responses, once no answer goes on."""


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
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        raise OSError(error.errno, f"{error.strerror}: {host} port {port}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_SECONDS))
    return found


def url_of(listening: socket.socket, *, tls: bool) -> str:
    """Return the address that clients use, for an OpenAI client's `base_url`."""
    host, port = listening.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"http{'s' if tls else ''}://{host}:{port}/v1"


def raise_file_limit() -> None:
    """Allow as many open connections as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Protocol(H11Protocol):
    """uvicorn's protocol, with an error in OpenAI's form for what is no HTTP."""

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP, unless a response has begun, and close. uvicorn calls this."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encoded(bad_request(None, "the request must be valid HTTP/1.1").body)
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=body)):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Listener(uvicorn.Server):
    """A server that answers until SIGINT or SIGTERM, and then stops gracefully.

    After a signal new queries get 503, and running answers have some time to end. A second signal
    cuts them at once. It also ends if the engine fails. The application logs requests itself, since
    uvicorn would log what follows "?" in an address.

    Args:
        service: the application. Its scheduler is stopped before the last connections are closed.
        ready: called once clients can connect.
        tls: files of a certificate and its private key; None without TLS.
    """

    def __init__(
        self,
        service: Service,
        ready: Callable[[], None] = lambda: None,
        *,
        tls: Sequence[Path] | None = None,
    ) -> None:
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
        self._scheduler, self._ready = service.scheduler, ready
        self._signals = 0
        self._silent: dict[Any, float] = {}  # connections without a request, since when

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen. uvicorn calls this."""
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end. uvicorn calls this ten times a second."""
        if counter % 10 == 0:
            self._close_silent()
        return await super().on_tick(counter) or self._scheduler.failed

    def _close_silent(self) -> None:
        """Close connections that have not sent a whole request in time."""
        now = time.monotonic()
        connections: Any = self.server_state.connections
        silent = [one for one in connections if one.cycle is None or one.cycle.response_complete]
        self._silent = {one: self._silent.get(one, now) for one in silent}
        for one, since in self._silent.items():
            if now - since > HEADER_SECONDS:
                one.transport.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. uvicorn calls this for a signal."""
        self._signals += 1
        seconds = STOP_SECONDS if self._signals == 1 else 0.0
        threading.Thread(target=self._stop, args=(seconds,)).start()

    def _stop(self, seconds: float) -> None:
        self._scheduler.stop(seconds)
        self.should_exit = True
