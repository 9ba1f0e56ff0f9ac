"""Answers over HTTP: bodies, streams, errors and their order, figures, and what never leaves."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from processes import until
from serving_cases import (
    ASK,
    CHAT,
    CHATS,
    COMPLETIONS,
    Served,
    asks,
    check_error,
    clients_of,
    served,
    stoppable,
)
from stub_engine import TEXT, StubEngine

from adapmixed.errors import LedgerWriteError
from adapmixed.serving import answers
from adapmixed.serving.admission import Key, add_key
from adapmixed.serving.app import bound
from adapmixed.serving.fields import prompts_of
from adapmixed.serving.metrics import Metrics


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found


def events(text: str) -> list[Any]:
    """Return the events of a stream; "[DONE]" as a string."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    found = []
    for part in parts:
        assert part.startswith("data: ")
        found.append(part[6:] if part == "data: [DONE]" else json.loads(part[6:]))
    return found


def test_a_completion(server: Served) -> None:
    before = server.engine.accountant.queries
    answer = server.client().post(COMPLETIONS, json=ASK | {"prompt": ["a", "bc"]})
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", body.pop("id"))
    assert abs(body.pop("created") - time.time()) < 5
    text = TEXT.encode()[:8].decode()
    choice = {"text": text, "logprobs": None, "finish_reason": "length"}
    assert body == {
        "object": "text_completion",
        "model": "demo",
        "choices": [{"index": index, **choice} for index in (0, 1)],
        "usage": {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19},
    }
    assert server.engine.accountant.queries == before + 16
    chat = server.client().post(CHATS, json=CHAT).json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", chat["id"])
    assert chat["object"] == "chat.completion"
    message = {"role": "assistant", "content": choice.pop("text"), "refusal": None}
    assert chat["choices"] == [{"index": 0, "message": message, **choice}]


def test_a_stream(server: Served) -> None:
    fields = {"stream": True, "max_tokens": 70, "prompt": ["a", "b"]}
    answer = server.client().post(COMPLETIONS, json=ASK | fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    assert chunks.pop() == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    whole = TEXT.encode()
    expected = (whole + whole)[:70].decode()
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == expected
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("usage", [False, True])
def test_a_chat_stream(server: Served, usage: bool) -> None:
    body = CHAT | {"stream": True, "stop": "naïve", "max_tokens": 60}
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = events(server.client().post(CHATS, json=body | options).text)
    assert chunks.pop() == "[DONE]"
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        stopped = len(TEXT[: TEXT.index("naïve") + 5].encode())
        assert last["usage"]["completion_tokens"] == stopped
        assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "stop"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Grüße: the "


def test_models_and_health(server: Served) -> None:
    client = server.client()
    (model,) = client.get("/v1/models").json()["data"]
    assert set(model) == {"id", "object", "created", "owned_by"} and model["id"] == "demo"
    assert client.get("/health").json() == {"status": "ok"}


CLOSED = {
    404: ("GET /", "POST /invocations", "POST /tokenize", "GET /metrics", "GET /docs",
          "POST /v1/embeddings", "GET /v1/completions/", "GET /v1/models/", "GET /v1/models/demo",
          "GET /v1/models/a%0Ab%F0%9F", "GET /openapi.json", "POST /v1/responses",
          "POST //v1/completions", "POST /v1/completions/"),
    405: (f"GET {COMPLETIONS}", f"PUT {CHATS}", "POST /v1/models", "DELETE /v1/models",
          "POST /health", "BREW /health", f"OPTIONS {COMPLETIONS}"),
}  # fmt: skip


@pytest.mark.parametrize("status", CLOSED)
def test_closed_paths(server: Served, status: int) -> None:
    for words in CLOSED[status]:
        answer = server.client().request(*words.split())
        assert answer.status_code == status, words
        check_error(answer.json(), status)


def test_large_bodies(server: Served) -> None:
    client = server.client()
    large = b'{"model": "' + b"x" * (1 << 20)
    assert check_error(client.post(COMPLETIONS, content=large).json(), 413)["code"] == "too_large"
    parts = (large[start : start + 1000] for start in range(0, len(large), 1000))
    assert client.post(COMPLETIONS, content=parts).status_code == 413


def test_a_page_of_another_site_cannot_spend_the_budget(server: Served) -> None:
    client = server.client()
    for headers in (
        {"origin": "http://evil.example"}, {"origin": "null"}, {"host": "evil.example"},
        {"host": ""}, {"origin": "http://["}, {"host": "127.0.0.1.evil.example:80"},
        {"host": "192.168.0.1"}, {"host": "0.0.0.0:8000"},
    ):  # fmt: skip
        answer = client.post(COMPLETIONS, json=ASK, headers=headers)
        assert answer.status_code == 403, headers
        check_error(answer.json(), 403)
    for headers in (
        {"origin": "http://localhost:3000"}, {"host": "127.0.0.1:8000"}, {"host": "[::1]:80"},
        {"host": "127.0.0.2:8000", "origin": "http://127.0.0.2:8000"},
    ):  # fmt: skip
        assert client.post(COMPLETIONS, json=ASK, headers=headers).status_code == 200


def test_the_order_of_checks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has the faults of all later checks, too."""
    file = tmp_path / "keys.json"
    secret = add_key(file, "a", requests_per_minute=2)
    poor = add_key(file, "poor", tokens=10)
    engine = StubEngine(queries=20)
    clients = clients_of(tmp_path)
    monkeypatch.setattr(answers, "MOST_WAITING", 2)
    with served(engine, clients=clients) as server:
        engine.go.clear()
        client = server.client()
        mine = {"authorization": f"Bearer {secret}"}
        huge = b"x" * (2 << 20)
        assert client.post("/nowhere", content=huge).status_code == 401
        assert client.post("/nowhere", content=huge, headers=mine).status_code == 404
        assert client.put(COMPLETIONS, content=huge, headers=mine).status_code == 405
        assert client.post(COMPLETIONS, content=huge, headers=mine).status_code == 413
        wrong = {"model": "other", "seed": 1, "prompt": ""}
        assert client.post(COMPLETIONS, json=wrong, headers=mine).status_code == 404
        wrong |= {"model": "demo"}
        assert client.post(COMPLETIONS, json=wrong, headers=mine).status_code == 400
        # One sequence runs and two wait, so a request that the plan does not pay for gets 503.
        fine = ASK | {"max_tokens": 2}
        with ThreadPoolExecutor() as pool:
            for count, waiting in ((1, 0), (2, 2)):
                ask = {"json": fine | {"prompt": ["a"] * count}, "headers": mine}
                pool.submit(client.post, COMPLETIONS, **ask)
                until(lambda: server.scheduler.running == 1)
                until(lambda waiting=waiting: server.scheduler.waiting == waiting)
            full = client.post(COMPLETIONS, json=fine | {"max_tokens": 200}, headers=mine)
            assert full.status_code == 503 and full.headers["retry-after"] == "1"
            assert check_error(full.json(), 503)["code"] == "queue_full"
            engine.go.set()
        assert server.settled() and engine.accountant.queries == 6
        fast = client.post(COMPLETIONS, json=fine | {"max_tokens": 200}, headers=mine)
        assert fast.status_code == 429
        assert check_error(fast.json(), 429)["code"] == "rate_limit_exceeded"
        assert 1 <= int(fast.headers["retry-after"]) <= 60
        mine = {"authorization": f"Bearer {poor}"}
        spent = client.post(COMPLETIONS, json=fine | {"max_tokens": 200}, headers=mine)
        assert "14 tokens are left of its plan" in check_error(spent.json(), 429)["message"]
        spent = client.post(COMPLETIONS, json=fine | {"max_tokens": 11}, headers=mine)
        assert "10 tokens left" in check_error(spent.json(), 429)["message"]
        assert spent.headers["x-should-retry"] == "false"
        assert server.admission.left == 14  # nothing stays reserved
        assert client.post(COMPLETIONS, json=fine | {"max_tokens": 10}, headers=mine).is_success


PRIVATE = "private_logits[3, 0] must not be NaN"


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError(PRIVATE), "ValueError"), (SystemExit(PRIVATE), "SystemExit"),
     (type("PanicException", (BaseException,), {})(PRIVATE), "PanicException"),
     (LedgerWriteError("the disk is full"), "LedgerWriteError: the disk is full")],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails(
    error: BaseException, said: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer that runs and the one that waits end with an error; then the server ends."""
    engine, body = StubEngine(batch=1), ASK | {"stream": stream}
    with served(engine) as server, stoppable(server.app) as (_, thread, port):
        with ThreadPoolExecutor() as pool:
            engine.go.clear()
            asked = []
            for count in (1, 2):
                asked.append(pool.submit(asks, port, body))
                until(lambda n=count: server.scheduler.running + server.scheduler.waiting == n)
            engine.fail = error
            engine.go.set()
            for status, text in (future.result() for future in asked):
                assert status == (200 if stream else 503) and "private" not in text
                (event,) = events(text) if stream else [json.loads(text)]
                assert check_error(event, 503)["code"] == "stopping"
        client = server.client()
        assert server.settled() and server.scheduler.failed
        assert check_error(client.get("/health").json(), 503)["code"] == "stopping"
        assert client.post(COMPLETIONS, json=ASK).status_code == 503
        assert client.get("/v1/models").is_success
        thread.join(5.0)
        assert not thread.is_alive()  # so that whoever watches it starts it again
    assert said in caplog.text and "private" not in caplog.text


def test_a_fault_of_the_server_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("PRIVATE")

    with served() as server:
        monkeypatch.setattr("adapmixed.serving.fields.prompts_of", fails)
        answer = server.client().post(COMPLETIONS, json=ASK)
        assert answer.status_code == 500
        assert check_error(answer.json(), 500)["message"] == "the server has made an error"
        monkeypatch.setattr("adapmixed.serving.fields.prompts_of", prompts_of)
        monkeypatch.setattr("adapmixed.serving.answers.Reply._bodies", fails)
        (event,) = events(server.client().post(COMPLETIONS, json=ASK | {"stream": True}).text)
        check_error(event, 500)
        assert server.settled()
    assert "RuntimeError" in caplog.text and "PRIVATE" not in caplog.text


def test_prompts_and_keys_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with served(clients=clients_of(tmp_path, Key("a", "0" * 64))) as server:
        client = server.client(headers={"authorization": "Bearer SECRET"})
        client.post(COMPLETIONS + "?prompt=SECRET", json=ASK | {"prompt": "SECRET"})
        client.get("/SECRET")
    with served() as server:
        client = server.client()
        assert client.post(COMPLETIONS + "?x=SECRET", json=ASK | {"prompt": "SECRET"}).is_success
        assert client.post(COMPLETIONS, json=ASK | {"seed": "SECRET"}).status_code == 400
        client.get("/v1/models/SECRET")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("adapmixed")]
    assert "POST /v1/completions 200" in ours and "GET other 401" in ours
    assert not any("SECRET" in text for text in ours)


NAMES = {
    "adapmixed_requests", "adapmixed_released_tokens", "adapmixed_running_sequences",
    "adapmixed_waiting_sequences", "adapmixed_plan_tokens_left",
}  # fmt: skip


def value(metrics: Metrics, name: str, **labels: str) -> Any:
    return metrics.registry.get_sample_value(f"adapmixed_{name}", labels)


def test_the_figures() -> None:
    """Of requests and tokens alone, for this machine alone."""
    engine = StubEngine(queries=100)
    with bound("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    with served(engine) as server:
        client, metrics = server.client(), server.metrics
        for body in (ASK, ASK | {"prompt": ["a", "b"], "stream": True}, ASK | {"seed": 1}):
            client.post("/v1/completions?q=secret", json=body)
        client.get("/secret")
        assert server.settled()
        assert value(metrics, "requests_total", path="/v1/completions", status="200") == 2
        assert value(metrics, "requests_total", path="/v1/completions", status="400") == 1
        assert value(metrics, "requests_total", path="other", status="404") == 1
        assert value(metrics, "released_tokens_total") == 24 == engine.released
        assert value(metrics, "plan_tokens_left") == 76
        engine.go.clear()
        assert value(metrics, "running_sequences") == 0
        thread = Thread(target=client.post, args=("/v1/completions",), kwargs={"json": ASK})
        thread.start()
        until(lambda: value(metrics, "running_sequences") == 1)
        assert value(metrics, "plan_tokens_left") == 68  # reserved, not yet charged
        engine.go.set()
        thread.join()
        with ExitStack() as stack:
            stack.callback(metrics.serve(port))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                text = answer.read().decode()
            names = re.findall(r"^# TYPE (\w+?)(?:_total|_created)? ", text, re.MULTILINE)
            assert set(names) == NAMES
            with pytest.raises(OSError):
                metrics.serve(port)
            with socket.socket() as other:  # a loopback address that it does not listen at
                other.settimeout(2.0)
                with pytest.raises(OSError):
                    other.connect(("127.0.0.2", port))
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")
