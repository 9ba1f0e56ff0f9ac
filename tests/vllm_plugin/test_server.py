"""Through HTTP: what is served, what is refused, and what survives kills."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed: `make test-vllm` has it")

from served import Load, Reply, Server  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from vllm_cases import BASE  # noqa: E402

from adapmixed.serving.keys import add_key  # noqa: E402

QUERIES = 3000


@contextmanager
def knocking(server: Server) -> Iterator[set[int]]:
    """Send short requests all the time; yield the set of the statuses so far."""
    statuses: set[int] = set()
    ended = threading.Event()

    def knock() -> None:
        while not ended.is_set():
            try:
                statuses.add(server.ask(max_tokens=3).status)
            except (OSError, http.client.HTTPException):
                ended.wait(0.05)

    threads = [threading.Thread(target=knock) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        for thread in threads:
            thread.join(150)


def used(reply: Reply) -> int:
    """Return the number of tokens of an answer."""
    return int(reply.json["usage"]["completion_tokens"])


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    keys["a"] = add_key(folder / "keys", "a")
    keys["small"] = add_key(folder / "keys", "small", tokens=50, max_tokens=30)
    server = Server(folder, queries=QUERIES, keys=folder / "keys")
    yield server
    server.stop()


def test_completions(server: Server, keys: dict[str, str]) -> None:
    reply = server.ask(keys["a"], prompt=["A function", "The"], max_tokens=7)
    assert reply.status == 200 and 2 <= used(reply) <= 14  # an end token may be drawn
    assert [one["index"] for one in reply.json["choices"]] == [0, 1]
    assert all(one["logprobs"] is None for one in reply.json["choices"])
    reply = server.ask(keys["a"])  # without max_tokens: the server's default
    assert 1 <= used(reply) <= 16
    neutral = {
        "n": 1,
        "top_p": 1,
        "presence_penalty": 0,
        "seed": None,
        "logprobs": None,
        "user": "x",
    }
    assert server.ask(keys["a"], max_tokens=3, temperature=0.7, top_k=5, **neutral).status == 200
    assert server.ask(keys["a"], prompt=[5, 6, 7], max_tokens=3, stop=["e"]).status == 200
    assert server.ask(keys["a"], max_tokens=3, top_k=10**30).status == 200


def test_chat(server: Server, keys: dict[str, str]) -> None:
    messages = [{"role": "user", "content": "A function that returns"}]
    reply = server.ask(keys["a"], "chat/completions", messages=messages, max_completion_tokens=5)
    assert reply.status == 200 and 1 <= used(reply) <= 5
    assert reply.json["choices"][0]["message"]["role"] == "assistant"
    # vLLM gets the messages as they were checked: other forms would be another prompt to it.
    parts = [{"type": "text", "text": text} for text in ("A function", " that returns")]
    messages = [{"role": "user", "content": parts, "name": None}]
    again = server.ask(keys["a"], "chat/completions", messages=messages, max_tokens=5)
    assert again.status == 200
    assert again.json["usage"]["prompt_tokens"] == reply.json["usage"]["prompt_tokens"]


def test_a_stop_token_ends_an_answer(server: Server, keys: dict[str, str]) -> None:
    """With top_k = 1 the tokens are the likeliest public ones, so the stop surely comes."""
    base = AutoModelForCausalLM.from_pretrained(BASE)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    asked = {"prompt": "If the name", "top_k": 1, "max_tokens": 20}
    ids = tokenizer(asked["prompt"], return_tensors="pt")["input_ids"]
    *shown, end = base.generate(ids, do_sample=False, max_new_tokens=3)[0, ids.shape[1] :].tolist()
    assert end not in shown
    charged = server.charged()
    for stream in (False, True):
        reply = server.ask(
            keys["a"], stop_token_ids=[end], stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}), **asked,
        )  # fmt: skip
        if stream:
            *pieces, last, done = reply.events
            choices, usage = [one["choices"][0] for one in pieces], last["usage"]
        else:
            choices, usage = reply.json["choices"], reply.json["usage"]
        assert "".join(one["text"] for one in choices) == tokenizer.decode(shown)
        assert choices[-1]["finish_reason"] == "stop"
        assert usage["completion_tokens"] == 3
    assert server.charged() - charged <= 2 * 3 + 16  # a block may be left over


def test_an_openai_client(server: Server, keys: dict[str, str]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key=keys["a"], max_retries=0
    )
    assert [one.id for one in client.models.list()] == ["m"]
    answer = client.completions.create(model="m", prompt="The", max_tokens=4)
    assert 1 <= answer.usage.completion_tokens <= 4
    pieces = list(client.completions.create(model="m", prompt="The", max_tokens=4, stream=True))
    assert pieces[-1].choices[0].finish_reason in ("length", "stop")
    with pytest.raises(openai.BadRequestError, match="seed"):
        client.completions.create(model="m", prompt="The", seed=1)


@pytest.mark.parametrize(
    "path",
    ["/invocations", "/tokenize", "/metrics", "/openapi.json", "/v1/responses", "/v1/embeddings",
     "//v1/completions", "/v1/completions/", "/v1/models/../completions"],
)  # fmt: skip
def test_other_paths_are_closed(server: Server, keys: dict[str, str], path: str) -> None:
    before = server.charged()
    for method in ("GET", "POST"):
        reply = server.send(method, path, {"model": "m", "prompt": "The"}, keys["a"])
        assert reply.status == 404, (method, path, reply)
        assert reply.json["error"]["type"] == "invalid_request_error"
        assert server.send(method, path, None).status == 401
    assert server.charged() == before


def test_a_key_is_needed(server: Server) -> None:
    for key in (None, "", "adapmixed-wrong"):
        reply = server.ask(key, max_tokens=2)
        assert reply.status == 401 and reply.json["error"]["code"] == "invalid_api_key"
    assert server.get("/health").status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0}, {"prompt_logprobs": 1}, {"echo": True}, {"seed": 1}, {"n": 2},
        {"temperature": 0}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 3}}, {"min_tokens": 2}, {"structured_outputs": {"regex": "a+"}},
        {"response_format": {"type": "json_object"}}, {"use_beam_search": True},
        {"vllm_xargs": {"adapmixed": "x"}}, {"cache_salt": "x"}, {"ignore_eos": True},
        {"prompt_embeds": "x"}, {"unknown": 1}, {"max_tokens": 201}, {"prompt": []},
        {"prompt": "x " * 300}, {"stop": "a<|endoftext|>"},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)  # fmt: skip
def test_refused_fields(server: Server, keys: dict[str, str], fields: dict[str, Any]) -> None:
    before = server.charged()
    reply = server.ask(keys["a"], **({"max_tokens": 3} | fields))
    assert reply.status == 400, reply
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert server.charged() == before


def test_a_key_has_its_own_tokens(server: Server, keys: dict[str, str]) -> None:
    assert server.ask(keys["small"], max_tokens=31).status == 400
    assert server.ask(keys["small"], prompt=["The", "An"], max_tokens=30).status == 429
    events = server.ask(keys["small"], max_tokens=10, stream=True).events
    counted = len(events) - 1
    while (reply := server.ask(keys["small"], max_tokens=10)).status == 200:
        counted += used(reply)
    assert reply.status == 429 and reply.json["error"]["code"] == "insufficient_quota"
    assert reply.headers["x-should-retry"] == "false"
    assert 30 < counted <= 50


def test_malformed_http_and_head(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        reply = b"".join(iter(lambda: connection.recv(1 << 12), b""))
    assert reply.startswith(b"HTTP/1.1 400 ") and b'"type":"invalid_request_error"' in reply
    assert server.get("/health", method="HEAD").status == 200


def test_a_client_that_leaves_is_not_charged_further(server: Server, keys: dict[str, str]) -> None:
    before, counted = server.charged(), server.used("a")
    body = json.dumps({"model": "m", "prompt": "The", "max_tokens": 200, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
            b"\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
            % (keys["a"].encode(), len(body), body)
        )
        while b"choices" not in connection.recv(1 << 12):
            pass
    time.sleep(2)
    charged = server.charged()
    assert before < charged < before + 200
    assert 0 < server.used("a") - counted < 200
    time.sleep(2)
    assert server.charged() == charged
    assert server.ask(keys["a"], max_tokens=3).status == 200


def test_the_end_of_the_plan(server: Server, keys: dict[str, str]) -> None:
    """The last test of this server. All prompts of a list are reserved together or not at all."""
    counted = 0
    while True:
        reply = server.ask(keys["a"], prompt=["The"] * 4, max_tokens=150)
        if reply.status == 429:
            break
        counted += used(reply)
        assert counted <= server.charged()
    assert reply.json["error"]["code"] == "insufficient_quota"
    left = QUERIES - server.charged()
    assert 0 <= left < 600
    while left > 0:
        reply = server.ask(keys["a"], max_tokens=min(left, 200))
        assert reply.status == 200, (left, reply)
        left = QUERIES - server.charged()
    for stream in (False, True):
        assert server.ask(keys["a"], max_tokens=1, stream=stream).status == 429
    assert server.charged() == QUERIES
    log = server.log.read_text()
    assert "Traceback" not in log and "The function" not in log


@pytest.mark.parametrize("engine", [True, False], ids=["engine core", "front"])
def test_kill_under_load(tmp_path: Path, engine: bool) -> None:
    """The ledger has at least what clients counted, also after a restart over the same ledger."""
    counted = 0
    for start in range(2):
        server = Server(tmp_path, queries=100_000)
        try:
            before = server.charged()
            assert counted <= before
            load = Load(server, 6)
            load.wait_for(300)
            if start == 0:
                server.kill(engine=engine)
            else:  # answers that have begun are finished, and requests that come late end nothing
                load.going = False
                with knocking(server) as statuses:
                    assert server.stop() == 0
                assert statuses <= {200, 503}
            counted += load.join()
        finally:
            server.clear()
        assert load.counted >= 300 and load.statuses <= {200, 500, 503}
        assert counted <= server.charged()
        print("counted", counted, "charged", server.charged())
