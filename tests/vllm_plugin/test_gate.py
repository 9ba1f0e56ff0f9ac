"""The gate before a stand-in for vLLM: order of the checks, and what is forwarded."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from transformers import AutoTokenizer
from vllm_cases import BASE, POOL

from adapmixed.mechanisms import ClippedLogPool, Origin
from adapmixed.privacy import Accountant
from adapmixed.serving.clients import Clients
from adapmixed.serving.fields import Defaults
from adapmixed.serving.keys import add_key, read_keys
from adapmixed.serving.usage import Usage, read_usage
from adapmixed.vllm.gate import Front, Gate
from adapmixed.vllm.malformed import answer_malformed
from adapmixed.vllm.options import Options

ORIGIN = Origin("ab" * 32, ())
LAST = {"choices": [], "usage": {"completion_tokens": 3}}


def chunk(tokens: int, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    """Return an event as vLLM sends it, after so many tokens of an answer."""
    choice = {"index": index, "text": "x", "finish_reason": finish}
    return {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}}


class Behind:
    """Stands in the place of vLLM's application, and keeps what was forwarded."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.inside = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()
        self.events: list[Any] = [chunk(1), chunk(3, finish="stop"), LAST]
        self.stays = False  # whether a stream goes on after its events
        self.fault: Response | Exception | None = None

    async def stream(self) -> AsyncIterator[str]:
        for one in self.events:
            yield f"data: {json.dumps(one)}\n\n"
        if self.stays:
            await asyncio.sleep(60)
        yield "data: [DONE]\n\n"

    async def complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.inside.release()
        await asyncio.to_thread(self.go_on.wait, 30)
        if isinstance(self.fault, Exception):
            raise self.fault
        if self.fault is not None:
            return self.fault
        if self.bodies[-1]["stream"]:
            return StreamingResponse(self.stream())
        if self.stays:
            assert (await request.receive())["type"] == "http.disconnect"
            return JSONResponse(None)
        used = sum(map(len, self.bodies[-1].get("prompt", [[0]])))
        return JSONResponse({"choices": [], "usage": {"completion_tokens": used}})

    async def anything(self, request: Request) -> Response:
        return JSONResponse({"path": request.url.path})


class Case:
    """A gate with a ledger, and its clients."""

    def __init__(self, folder: Path, *, queries: int, charged: int = 0, **front: Any) -> None:
        self.ledger, self.behind = folder / "ledger", Behind()
        mechanism = ClippedLogPool(POOL.lower, POOL.upper, POOL.scale, queries)
        self.accountant = Accountant(1e-5, path=self.ledger)
        self.charge: Callable[[int], None] = lambda count: self.accountant.charge_ahead(
            mechanism, 3, count, ORIGIN
        )
        if charged:
            self.charge(charged)
        options = Options.of(
            mechanism,
            ensemble="/e",
            ledger=str(self.ledger),
            tokens=8,
            max_tokens=100,
            waiting=1,
            keys=str(folder / "keys"),
        )
        keys = folder / "keys"
        self.key = add_key(keys, "a")
        self.other = add_key(keys, "b", tokens=20)
        self.usage = folder / "usage"
        self.counts = Usage(self.usage)
        clients = Clients(read_keys(keys), self.counts)
        self.sent: list[str] = []
        tokenizer = AutoTokenizer.from_pretrained(BASE)
        defaults = Defaults("m", options.tokens, options.max_tokens, vocab=2048)
        whole = {
            "window": 256,
            "sequences": 1,
            "mark": "secret",
            "clients": clients,
        } | front
        self.front = Front(options, defaults, tokenizer, **whole)
        app = Starlette(
            routes=[
                Route("/v1/completions", self.behind.complete, methods=["POST"]),
                Route("/{path:path}", self.behind.anything, methods=["GET", "POST"]),
            ],
            middleware=[Middleware(Gate, front=lambda state: self.front)],
        )
        self.client = TestClient(app)

    def ask(self, key: str | None = "", **fields: Any) -> Any:
        key = self.key if key == "" else key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = {"model": "m", "prompt": "The", **fields}
        return self.client.post("/v1/completions?x=1", json=body, headers=headers)

    def leave(self, *, events: int, slow: bool = False, sends: bool = True, **fields: Any) -> int:
        """Ask, and leave after so many events; return the tokens that the key has then used.

        Without `sends` the client leaves before it has sent its body.
        """
        before = read_usage(self.usage).get("a", 0)
        body = json.dumps({"model": "m", "prompt": "The", **fields}).encode()
        headers = [(b"authorization", b"Bearer " + self.key.encode())]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
            "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "",
            "client": None, "server": None,
        }  # fmt: skip
        got, given = 0, False

        async def receive() -> Any:
            nonlocal given
            if sends and not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            while got < events:
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal got
            if slow and message.get("body"):
                await asyncio.sleep(0.2)
            got += message.get("body", b"").count(b"data: ")

        asyncio.run(self.client.app(scope, receive, send))
        assert got >= events
        return read_usage(self.usage).get("a", 0) - before


def test_what_is_forwarded(tmp_path: Path) -> None:
    case = Case(tmp_path, queries=1000)
    assert case.ask(user="me", top_p=1, n=1, temperature=0.5, top_k=3, stop="x").status_code == 200
    assert case.ask(case.other, max_tokens=4).status_code == 200
    first, second = case.behind.bodies
    salts = first.pop("cache_salt"), second["cache_salt"]
    assert len({*salts}) == 2 and all(re.fullmatch("secret[0-9a-f]{64}", one) for one in salts)
    tokens = case.front.tokenizer("The")["input_ids"]
    assert first == {
        "model": "m", "prompt": [tokens], "max_tokens": 8, "temperature": 0.5, "top_k": 3,
        "stop": ["x"], "stop_token_ids": [], "stream": False,
    }  # fmt: skip
    assert second["max_tokens"] == 4
    assert case.ask(stop=["<|endoftext|>", "x"], stop_token_ids=[299, 7, 7]).status_code == 200
    third = case.behind.bodies[2]
    assert third["stop"] == ["<|endoftext|>", "x"] and third["stop_token_ids"] == [0, 7, 299]
    for bad in ({"stop": "<|endoftext|>\n"}, {"stop_token_ids": [2048]}, {"stop_token_ids": [-1]}):
        reply = case.ask(**bad)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == [*bad][0]
    assert len(case.behind.bodies) == 3
    for headers in case.behind.headers:
        assert headers.keys() == {"host", "content-type", "content-length"}


def test_the_order_of_the_checks(tmp_path: Path) -> None:
    case = Case(tmp_path, queries=50, charged=40)
    bad, much = {"logprobs": 1}, {"max_tokens": 11}
    assert case.ask(None, **bad, **much).status_code == 401
    assert case.ask(**bad, **much).status_code == 400
    reply = case.ask(**much)
    assert reply.status_code == 429 and reply.json()["error"]["code"] == "insufficient_quota"
    assert case.ask(prompt=["The", "An"], max_tokens=6).status_code == 429
    assert case.behind.bodies == []
    for _ in range(3):  # what was reserved and not charged is free again
        assert case.ask(max_tokens=10).status_code == 200
    case.charge(9)
    assert case.ask(max_tokens=2).status_code == 429  # the ledger was read again
    assert case.ask(max_tokens=1).status_code == 200


def test_a_full_queue_comes_before_a_spent_plan(tmp_path: Path) -> None:
    case = Case(tmp_path, queries=30)
    case.behind.go_on.clear()
    running = [threading.Thread(target=case.ask, kwargs={"max_tokens": 10}) for _ in range(2)]
    for thread in running:
        thread.start()
        assert case.behind.inside.acquire(timeout=30)
    assert case.ask(max_tokens=100).status_code == 503
    assert case.ask(max_tokens=101).status_code == 400
    for temperature in (0.0099, 2.5):  # vLLM would raise the one, and refuse the other silently
        reply = case.ask(temperature=temperature)
        assert reply.status_code == 400 and "temperature must be" in reply.text
    case.behind.go_on.set()
    for thread in running:
        thread.join()
    assert case.ask(max_tokens=100).status_code == 429
    assert case.ask(max_tokens=30).status_code == 200


def test_reserved_tokens_are_not_spent(tmp_path: Path) -> None:
    case = Case(tmp_path, queries=30, sequences=2)
    case.behind.go_on.clear()
    running = threading.Thread(target=case.ask, kwargs={"max_tokens": 25})
    running.start()
    assert case.behind.inside.acquire(timeout=30)
    case.charge(4)  # of the running answer
    reply = case.ask(max_tokens=20)
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "reserved"
    assert int(reply.headers["retry-after"]) >= 1
    reply = case.ask(max_tokens=27)
    assert reply.status_code == 429 and "26 tokens are left" in reply.json()["error"]["message"]
    case.behind.go_on.set()
    running.join()
    assert case.ask(max_tokens=26).status_code == 200


def test_a_server_that_stops_begins_no_answer(tmp_path: Path) -> None:
    case, told = Case(tmp_path, queries=1000), []
    engine = SimpleNamespace(shutdown=lambda timeout: told.append(timeout))
    config = SimpleNamespace(timeout_graceful_shutdown=None)
    case.client.app.state.engine_client = engine
    case.client.app.state.server = SimpleNamespace(config=config)
    assert case.ask().status_code == 200
    engine.shutdown(timeout=30)
    reply = case.ask()
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "stopping"
    assert told == [30] and config.timeout_graceful_shutdown is not None
    assert case.client.get("/health").status_code == 200


def test_a_stream_hides_the_usage_that_nobody_asked_for(tmp_path: Path) -> None:
    case = Case(tmp_path, queries=1000)
    text = case.ask(stream=True).text
    assert text.count("choices") == 2 and "usage" not in text
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert case.behind.bodies[-1]["stream_options"] == options
    asked = case.ask(stream=True, stream_options={"include_usage": True}).text
    assert asked.count("usage") == 1 and '"completion_tokens":3' in asked
    assert asked.endswith("data: [DONE]\n\n")


def test_a_key_gets_back_what_it_did_not_use(tmp_path: Path) -> None:
    case = Case(tmp_path, queries=1000)
    used = len(case.front.tokenizer("The")["input_ids"])  # as the stand-in answers
    assert case.ask(case.other, max_tokens=20).status_code == 200
    assert case.ask(case.other, max_tokens=21).status_code == 429
    assert case.ask(case.other, max_tokens=20 - used).status_code == 200
    assert case.ask(case.other, max_tokens=20).status_code == 429


def test_a_client_that_leaves_pays_what_may_have_been_drawn(tmp_path: Path) -> None:
    case = Case(tmp_path, queries=1000, sequences=2)
    block = case.front.options.block
    case.behind.stays = True
    case.behind.events = [chunk(1), chunk(4), chunk(7)]
    assert case.leave(events=3, stream=True, max_tokens=100) == 7 + block
    assert case.leave(events=3, stream=True, max_tokens=10) == 10
    two = {"prompt": ["The", "An"], "stream": True, "max_tokens": 90}
    case.behind.events = [chunk(2), chunk(5, 1, "stop")]
    assert case.leave(events=2, **two) == 2 + block + 5
    assert case.leave(events=2, slow=True, **two) == 180  # the engine may be far ahead
    assert case.leave(events=0, max_tokens=9) == 9  # no stream: nothing tells how much was drawn


def test_faults_of_vllm_cost_nothing_and_have_our_form(tmp_path: Path) -> None:
    case = Case(tmp_path, queries=1000)
    refused = JSONResponse({"error": {"message": "secret", "code": 422}}, 422)
    failed = JSONResponse({"detail": "secret"}, 500)
    for fault, status in ((refused, 422), (failed, 500), (RuntimeError("secret"), 500)):
        case.behind.fault = fault
        for stream in (False, True):
            reply = case.ask(case.other, max_tokens=20, stream=stream)
            assert reply.status_code == status and "secret" not in reply.text
            assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
            assert read_usage(case.usage)["b"] == 0
    case.behind.fault = None
    case.behind.events = [chunk(2), {"error": {"message": "secret", "code": 500}}]
    text = case.ask(case.other, max_tokens=20, stream=True).text
    assert "secret" not in text and '"code":"internal_error"' in text
    assert read_usage(case.usage)["b"] == 2 + case.front.options.block


def test_other_paths(tmp_path: Path) -> None:
    case = Case(tmp_path, queries=1000)
    headers = {"Authorization": f"Bearer {case.key}"}
    for path in ("/invocations", "/v1/responses", "/metrics", "/v1/completions/"):
        assert case.client.get(path, headers=headers).status_code == 404
        assert case.client.get(path).status_code == 401
    assert case.client.get("/v1/completions", headers=headers).status_code == 405
    assert case.client.get("/health").json() == {"path": "/health"}
    assert case.client.head("/health").status_code == 200
    assert case.client.head("/v1/models", headers=headers).status_code == 200
    assert case.client.get("/v1/models", headers=headers).json()["data"][0]["id"] == "m"
    assert case.client.get("/v1/models/m", headers=headers).json()["id"] == "m"
    assert case.client.get("/v1/models/x", headers=headers).status_code == 404


def test_a_server_that_cannot_be_checked_answers_nothing(tmp_path: Path) -> None:
    behind = Behind()
    app = Starlette(routes=[Route("/{path:path}", behind.anything)], middleware=[Middleware(Gate)])
    client = TestClient(app, raise_server_exceptions=False)
    reply = client.get("/health")
    assert reply.status_code == 500 and "path" not in reply.text


def test_keys_are_read_again_after_sighup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(tmp_path, queries=1000)
    path, new = tmp_path / "keys", ""

    async def receive() -> Any:
        if not case.sent:
            return {"type": "lifespan.startup"}
        nonlocal new
        new = add_key(path, "c", tokens=5)
        for text in (None, "bad"):  # a bad file leaves the keys as they are
            if text is not None:
                path.write_text(text)
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.1)
        return {"type": "lifespan.shutdown"}

    async def send(message: Any) -> None:
        case.sent.append(message["type"])

    before = signal.getsignal(signal.SIGHUP)
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    try:
        asyncio.run(case.client.app(scope, receive, send))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert case.sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    told = capsys.readouterr().err
    assert "were read again: 3" in told and "The old keys stay" in told
    assert case.ask(new, max_tokens=5).status_code == 200
    assert case.ask(new, max_tokens=9).status_code == 429


def test_tokens_that_cannot_be_counted_end_the_server(tmp_path: Path) -> None:
    case = Case(tmp_path, queries=1000)
    server = SimpleNamespace(config=SimpleNamespace(), should_exit=False)
    case.client.app.state.server = server
    case.counts.close()
    for key in (case.other, case.key):
        reply = case.ask(key)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "stopping"
    assert server.should_exit and case.behind.bodies == []


def test_malformed_http_gets_our_form() -> None:
    written: list[bytes] = []
    transport = SimpleNamespace(write=written.append, close=lambda: written.append(b"closed"))
    config = SimpleNamespace(http_protocol_class=SimpleNamespace)
    answer_malformed(SimpleNamespace(server=SimpleNamespace(config=config)))
    config.http_protocol_class(transport=transport).send_400_response("Invalid")
    head, _, body = written[0].partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head and written[1:] == [b"closed"]
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
