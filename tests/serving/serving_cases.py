"""A server over the stub engine or a real one: Starlette's test client, or uvicorn."""

from __future__ import annotations

import contextlib
import http.client
import json
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

from adapmixed.ensemble import Ensemble
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import Accountant
from adapmixed.serving.admission import Admission
from adapmixed.serving.app import Service, application
from adapmixed.serving.batch import BatchEngine
from adapmixed.serving.clients import Clients, Usage
from adapmixed.serving.fields import Defaults
from adapmixed.serving.keys import add_key, read_keys
from adapmixed.serving.listener import Listener, bound, configuration
from adapmixed.serving.metrics import Metrics
from adapmixed.serving.scheduler import Scheduler

MODEL = "demo"
IN_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vllm is not installed: `make test-vllm` has it"
)
ENGINES = ["adapmixed", pytest.param("vllm", marks=IN_VLLM)]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
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


def a_client(folder: Path, **key: int) -> tuple[Clients, Usage, dict[str, str]]:
    """Return clients with one key "alice", their used tokens, and the header with the key."""
    secret, usage = add_key(folder / "keys.json", "alice", **key), new_usage(folder / "usage")
    clients = Clients(read_keys(folder / "keys.json"), usage)
    return clients, usage, {"authorization": f"Bearer {secret}"}


def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait for a condition, and fail if it does not come true in time."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


@dataclass
class Served:
    """A service over an engine, and its parts."""

    engine: Any
    accountant: Accountant
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
    engine: Any = None,
    charged: tuple[Accountant, Mechanism] | None = None,
    *,
    clients: Clients | None = None,
    waiting: int = 64,
    tokenizer: Any = None,
    end_tokens: frozenset[int] = frozenset({END}),
    then_public: bool = False,
    **defaults: Any,
) -> Iterator[Served]:
    """Yield a service, by default over a stub engine, and stop its engine's thread at the end."""
    engine = engine or StubEngine()
    accountant, mechanism = charged or (engine.accountant, engine.mechanism)
    tokenizer = tokenizer or ByteTokenizer()
    scheduler = Scheduler(engine, tokenizer, end_tokens, waiting=waiting)
    admission = Admission(accountant, mechanism, then_public=then_public)
    metrics = Metrics(
        lambda: scheduler.running, lambda: scheduler.waiting, lambda: admission.left or 0
    )
    settings = Defaults(**({"model": MODEL, "tokens": 16, "max_tokens": 256} | defaults))
    service = Service(scheduler, admission, tokenizer, settings, metrics, clients, created=1)
    try:
        yield Served(engine, accountant, scheduler, admission, metrics, application(service))
    finally:
        if isinstance(engine, StubEngine):
            engine.go.set()
        scheduler.stop(0.0)


@contextlib.contextmanager
def answering(
    name: str,
    base: object,
    ensemble: Ensemble,
    mechanism: Mechanism,
    accountant: Accountant,
    **settings: Any,
) -> Iterator[Served]:
    """Yield a service over the ensemble, with our own engine or with vLLM."""
    with contextlib.ExitStack() as stack:
        engine: Any
        if name == "vllm":
            from adapmixed.vllm.engine import VllmEngine

            engine = VllmEngine(
                str(base), ensemble, mechanism, accountant, memory_bytes=1 << 28, enforce_eager=True
            )
            stack.callback(engine.close)
        else:
            engine = BatchEngine(ensemble, mechanism, accountant, memory_bytes=1 << 28)
        of_base = {
            "tokenizer": ensemble.tokenizer, "end_tokens": ensemble.end_tokens,
            "vocab": ensemble.vocab_size,
            "window": getattr(engine, "window", ensemble.max_positions),
        }  # fmt: skip
        given = served(engine, (accountant, mechanism), **(of_base | settings))
        yield stack.enter_context(given)


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


def opened(port: int, body: dict[str, Any], **headers: str) -> socket.socket:
    """Ask for a completion on a new connection, and return it unread."""
    content = json.dumps(body).encode()
    found = socket.create_connection(("127.0.0.1", port))
    fields = {"host": "localhost", "content-length": str(len(content)), **headers}
    lines = [f"POST {COMPLETIONS} HTTP/1.1", *(f"{one}: {fields[one]}" for one in fields), "", ""]
    found.sendall("\r\n".join(lines).encode() + content)
    return found


def asks(port: int, body: dict[str, Any], **headers: str) -> tuple[int, str]:
    """Ask for a completion over a real connection; return the status and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", COMPLETIONS, json.dumps(body), headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


@contextlib.contextmanager
def stoppable(server: Served) -> Iterator[tuple[Listener, threading.Thread, int]]:
    """Serve as the command does; yield the listener, its thread and its port."""
    listener = Listener(configuration(server.app), server.scheduler, 30.0)
    with bound("127.0.0.1", 0) as address, _running(listener, address) as thread:
        yield listener, thread, address.getsockname()[1]


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
