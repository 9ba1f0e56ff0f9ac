"""A server over the stub engine: under the test client of Starlette, or under uvicorn."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient
from stub_engine import END, ByteTokenizer, StubEngine

from adapmixed.privacy import Accountant
from adapmixed.serving.admission import Admission
from adapmixed.serving.app import Service, application
from adapmixed.serving.clients import Clients, Usage
from adapmixed.serving.fields import Defaults
from adapmixed.serving.listener import Listener, bound, configuration, url_of
from adapmixed.serving.metrics import Metrics
from adapmixed.serving.scheduler import Scheduler

MODEL = "demo"
IN_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vllm is not installed: `make test-vllm` has it"
)
ASK: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 8}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Once"}],
    "max_tokens": 8,
}


def new_usage(path: Path) -> Usage:
    """Return the used tokens of a new ledger."""
    Accountant(1e-5, path=path).close()
    return Usage(path)


@dataclass
class Served:
    """A service over a stub engine, and its parts."""

    engine: StubEngine
    scheduler: Scheduler
    admission: Admission
    metrics: Metrics
    app: Any

    def client(self, **options: Any) -> TestClient:
        """Return a client in this process, whose requests run in threads of their own."""
        options = {"base_url": "http://localhost", "raise_server_exceptions": False} | options
        return TestClient(self.app, **options)

    def settled(self, seconds: float = 5.0) -> bool:
        """Wait until nothing runs, waits or is reserved; return whether it came to that."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            busy = self.scheduler.running or self.scheduler.waiting or self.admission.reserved
            if not busy:
                return True
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def served(
    engine: StubEngine | None = None,
    *,
    clients: Clients | None = None,
    waiting: int = 64,
    tokenizer: Any = None,
    then_public: bool = False,
    **defaults: Any,
) -> Iterator[Served]:
    """Yield a service, and stop its engine's thread at the end."""
    engine = engine or StubEngine()
    tokenizer = tokenizer or ByteTokenizer()
    scheduler = Scheduler(engine, tokenizer, frozenset({END}), waiting=waiting)
    admission = Admission(engine.accountant, engine.mechanism, then_public=then_public)
    metrics = Metrics(
        lambda: scheduler.running, lambda: scheduler.waiting, lambda: admission.left or 0
    )
    settings = Defaults(**({"model": MODEL, "tokens": 16, "max_tokens": 256} | defaults))
    service = Service(scheduler, admission, tokenizer, settings, metrics, clients)
    try:
        yield Served(engine, scheduler, admission, metrics, application(service))
    finally:
        engine.go.set()
        scheduler.stop(0.0)


@contextlib.contextmanager
def listening(app: Any, *, send_buffer: int | None = None, **tls: Any) -> Iterator[int]:
    """Serve an application with uvicorn in a thread, and yield its port.

    Args:
        app: the application.
        send_buffer: bytes that the system holds for a client that does not read.
        tls: certificate and key, as for `configuration`.
    """
    with bound("127.0.0.1", 0) as address:
        if send_buffer is not None:
            address.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        with _running(uvicorn.Server(configuration(app, **tls)), address):
            yield address.getsockname()[1]


@contextlib.contextmanager
def stoppable(server: Served) -> Iterator[tuple[Listener, threading.Thread, str]]:
    """Serve as the command does; yield the listener, its thread and the address for clients."""
    listener = Listener(configuration(server.app), server.scheduler, 30.0)
    with bound("127.0.0.1", 0) as address, _running(listener, address) as thread:
        yield listener, thread, url_of(address, tls=False)


@contextlib.contextmanager
def _running(server: uvicorn.Server, address: socket.socket) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=server.run, args=([address],))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
            assert thread.is_alive()
        yield thread
    finally:
        server.should_exit = True
        thread.join()


def check_error(body: Any, status: int) -> dict[str, Any]:
    """Assert that a body is an error in OpenAI's form, and return the error."""
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    kinds = {429: ("insufficient_quota", "rate_limit_exceeded")}
    assert error["type"] in kinds.get(
        status, ("server_error",) if status >= 500 else ("invalid_request_error",)
    )
    return error
