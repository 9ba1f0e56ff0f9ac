"""A server over the stub engine or a real one: Starlette's test client, or uvicorn."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from processes import until
from starlette.testclient import TestClient
from stub_engine import END, VOCAB, ByteTokenizer, StubEngine

from adapmixed.ensemble import Ensemble
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import Accountant
from adapmixed.privacy.ledger import looked_at
from adapmixed.serving.admission import Admission, Clients, Key, _write, add_key, read_keys
from adapmixed.serving.app import Listener, Service, bound
from adapmixed.serving.batch import BatchEngine
from adapmixed.serving.fields import ServedModel

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


def clients_of(folder: Path, *keys: Key) -> Clients:
    """Return the clients of `keys.json`, in which these keys are written, of a new ledger."""
    if keys:
        _write(folder / "keys.json", keys)
    Accountant(1e-5, path=folder / "usage").close()
    return Clients(folder / "keys.json", folder / "usage")


def a_client(folder: Path, **key: int) -> tuple[Clients, Key, dict[str, str]]:
    """Return clients with one key "alice", the key, and the header with it."""
    secret = add_key(folder / "keys.json", "alice", **key)
    clients, (alice,) = clients_of(folder), read_keys(folder / "keys.json")
    return clients, alice, {"authorization": f"Bearer {secret}"}


def usage(ledger: Path | str) -> dict[str, int]:
    """Return the tokens that each key has used."""
    with looked_at(ledger) as connection:
        return dict(connection.execute("SELECT name, tokens FROM used"))


def used(clients: Clients, key: Key) -> int:
    """Return the tokens that a key has used."""
    return usage(clients._path).get(key.name, 0)


@dataclass
class Served:
    """A service over an engine."""

    engine: Any
    accountant: Accountant
    app: Service

    def __post_init__(self) -> None:
        app = self.app
        self.scheduler, self.admission, self.metrics = app.scheduler, app.admission, app.metrics

    def client(self, **options: Any) -> TestClient:
        """Return a client in this process, whose requests run in threads of their own."""
        options = {"base_url": "http://localhost", "raise_server_exceptions": False} | options
        return TestClient(self.app, **options)

    def settled(self, seconds: float = 20.0) -> bool:
        """Wait until nothing runs, waits or is reserved; fail if it does not come to that."""
        scheduler, admission = self.scheduler, self.admission
        busy = lambda: scheduler.running or scheduler.waiting or admission.reserved  # noqa: E731
        until(lambda: not busy(), seconds=seconds)
        return True


@contextlib.contextmanager
def served(
    engine: Any = None,
    charged: tuple[Accountant, Mechanism] | None = None,
    *,
    clients: Clients | None = None,
    then_public: bool = False,
    **model: Any,
) -> Iterator[Served]:
    """Yield a service, by default over a stub engine, and stop its engine's thread at the end."""
    engine = engine or StubEngine()
    accountant, mechanism = charged or (engine.accountant, engine.mechanism)
    of_model = {
        "name": MODEL, "tokenizer": ByteTokenizer(), "end_tokens": frozenset({END}),
        "vocab": VOCAB, "max_tokens": 300,
    } | model  # fmt: skip
    admission = Admission(accountant, mechanism, clients)
    served_model = ServedModel(window=engine.window, **of_model)
    service = Service(engine, served_model, admission, then_public=then_public)
    try:
        yield Served(engine, accountant, service)
    finally:
        if isinstance(engine, StubEngine):
            engine.go.set()
        service.scheduler.stop()


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
        }  # fmt: skip
        context = served(engine, (accountant, mechanism), **(of_base | settings))
        yield stack.enter_context(context)


@contextlib.contextmanager
def stoppable(
    app: Service, *, send_buffer: int | None = None, tls: Sequence[Path] | None = None
) -> Iterator[tuple[Listener, threading.Thread, int]]:
    """Serve as the command does, in a thread; yield the listener, its thread and its port.

    Args:
        app: the application.
        send_buffer: bytes that the system holds for a client that does not read.
        tls: certificate and key.
    """
    listener = Listener(app, tls=tls)
    with bound("127.0.0.1", 0) as address:
        if send_buffer is not None:
            address.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        thread = threading.Thread(target=listener.run, args=([address],))
        thread.start()
        try:
            while not listener.started:
                time.sleep(0.005)
                assert thread.is_alive()
            yield listener, thread, address.getsockname()[1]
        finally:
            listener.should_exit = True
            thread.join()


@contextlib.contextmanager
def listening(app: Service, **settings: Any) -> Iterator[int]:
    """Serve as :func:`stoppable`, and yield the port."""
    with stoppable(app, **settings) as (*_, port):
        yield port


def opened(port: int, body: dict[str, Any], **headers: str) -> socket.socket:
    """Ask for a completion on a new connection, and return it unread."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    fields = {"host": "localhost", "content-length": str(len(content)), **headers}
    lines = [f"POST {COMPLETIONS} HTTP/1.1", *(f"{key}: {fields[key]}" for key in fields), "", ""]
    connection.sendall("\r\n".join(lines).encode() + content)
    return connection


def asks(port: int, body: dict[str, Any], **headers: str) -> tuple[int, str]:
    """Ask for a completion over a real connection; return the status and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", COMPLETIONS, json.dumps(body), headers)
    answer = connection.getresponse()
    reply = answer.status, answer.read().decode()
    connection.close()
    return reply


def check_error(body: Any, status: int) -> dict[str, Any]:
    """Assert that a body is an error in OpenAI's form, and return the error."""
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    if status == 429:
        assert error["type"] in ("insufficient_quota", "rate_limit_exceeded")
        assert error["type"] == error["code"]
    else:
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error
