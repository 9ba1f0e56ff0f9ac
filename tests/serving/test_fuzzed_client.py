"""A client that sends anything: no 500, no error in another form, and nothing hangs or leaks."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections import Counter
from typing import Any

import pytest
from serving_cases import ASK, CHAT, CHATS, COMPLETIONS, check_error, listening, served
from stub_engine import StubEngine

from adapmixed.serving.fields import REFUSED, SERVED

SEED = 23
WARM = 500  # requests before the first look at open files
FIELDS = sorted(SERVED[True] | SERVED[False] | set(REFUSED))
LITERALS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 1.5, 0.7, 10**20, -(10**400), 1e308, "", "x", "demo", "é🙂",
    "\ud800", "\x00", "<|end|>", "a" * 3000, [], {}, [1], [[1, 2], [3]], ["a", "b"], [None], [[]],
    {"include_usage": True}, {"type": "text"}, [{"role": "user", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [256], [300], "stop",
]  # fmt: skip
PATHS = [COMPLETIONS, CHATS]
OTHER_PATHS = [
    "/", "/v1", "/v1/models", "/health", "/v1/%ff", "/a?b=c", "/x" * 999
]  # fmt: skip
METHODS = ["POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "X"]


def body_of(rng: random.Random, chat: bool) -> bytes:
    fields = dict(CHAT if chat else ASK)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        fields[rng.choice(FIELDS)] = rng.choice(LITERALS)
    if rng.random() < 0.1:
        fields.pop(rng.choice(list(fields)))
    if rng.random() < 0.3:
        fields["stream"] = True
    text = json.dumps(fields).encode()
    kind = rng.random()
    if kind < 0.1:  # a changed byte
        at = rng.randrange(len(text))
        text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    elif kind < 0.15:
        text = text[: rng.randrange(len(text))]
    elif kind < 0.18:
        text = rng.randbytes(rng.randrange(200))
    elif kind < 0.2:
        long = b"x" * rng.choice([10**4, 10**6, 2 * 10**6])
        text = b'{"model": "demo", "prompt": "' + long + b'"}'
    elif kind < 0.22:
        text = b"[" * rng.randrange(20000) + text
    return text


def request_of(rng: random.Random) -> tuple[str, bytes]:
    """Return a method and a whole request."""
    chat = rng.random() < 0.5
    path, method = PATHS[chat], "POST"
    if rng.random() < 0.1:
        path = rng.choice([*OTHER_PATHS, *PATHS])
        method = rng.choice(METHODS)
    body = body_of(rng, chat)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if rng.random() < 0.2:
        cut = rng.randrange(1, max(2, len(body)))
        parts = [part for part in (body[:cut], body[cut:]) if part]
        sent = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        return method, (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + sent
    return method, (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body


def read(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:  # it refused a body that was still being sent
        pass
    return b"".join(parts)


def check_answer(method: str, answer: bytes) -> int:
    """Assert that an answer has the form of its kind, and return its status."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status < 500, answer
    if b"text/event-stream" in head:
        data = b"".join(body.split(b"\r\n")[1::2])  # without the lengths of chunks
        for event in data.split(b"\n\n")[:-1]:
            assert event.startswith(b"data: ")
        assert data.endswith(b"data: [DONE]\n\n") and status == 200
    elif method != "HEAD":
        found = json.loads(body)
        if status >= 400:
            check_error(found, status)
    return status


@pytest.mark.slow
def test_a_thousand_requests() -> None:
    rng, engine = random.Random(SEED), StubEngine(queries=10**6)
    statuses, files = Counter[int](), list[int]()

    def look() -> None:
        assert server.settled()
        if os.path.isdir("/proc/self/fd"):
            files.append(len(os.listdir("/proc/self/fd")))

    with served(engine) as server, listening(server.app) as port:
        for number in range(1000):
            if number == WARM:
                look()
            method, sent = request_of(rng)
            with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
                try:
                    connection.sendall(sent)
                except (BrokenPipeError, ConnectionResetError):
                    continue  # 413 came first
                if rng.random() < 0.1:
                    time.sleep(rng.random() * 0.005)
                    continue  # the client leaves
                if answer := read(connection):
                    statuses[check_answer(method, answer)] += 1
        look()
        assert engine.accountant.queries == engine.released
        assert server.admission.left == 10**6 - engine.released
    assert statuses[200] > 200 and statuses[400] > 200
    assert statuses[404] and statuses[405] and statuses[413] and files[:1] == files[1:]
