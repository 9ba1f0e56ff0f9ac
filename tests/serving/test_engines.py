"""Through HTTP, over our own engine and over vLLM: what is answered, refused, charged and told."""

from __future__ import annotations

import http.client
import json
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from head_ensembles import write_base, write_ensemble
from serving_cases import IN_VLLM, MODEL, check_error, listening
from transformers import AutoModelForCausalLM

from adapmixed.ensemble import Ensemble
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy.register import entered, register_of
from adapmixed.serving.admission import Admission
from adapmixed.serving.app import Service, application
from adapmixed.serving.batch import BatchEngine
from adapmixed.serving.clients import Clients, Usage
from adapmixed.serving.fields import Defaults
from adapmixed.serving.keys import add_key, read_keys
from adapmixed.serving.metrics import Metrics
from adapmixed.serving.scheduler import Scheduler

ENGINES = ["adapmixed", pytest.param("vllm", marks=IN_VLLM)]
QUERIES, MEMORY = 3000, 1 << 28


@dataclass
class Reply:
    """What a client got: the status, and the JSON body or the events of a stream."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        lines = [line[6:] for line in self.text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Server:
    """A server in this process, over the built-in base and random heads."""

    port: int
    ledger: Path
    admission: Admission
    scheduler: Scheduler
    keys: dict[str, str]

    @property
    def charged(self) -> int:
        return read_ledger(self.ledger, whole=False).account.planned

    def settled(self) -> int:
        """Wait until nothing runs; return what was charged."""
        ends = time.monotonic() + 20
        while self.scheduler.running or self.scheduler.waiting or self.admission.reserved:
            assert time.monotonic() < ends
            time.sleep(0.01)
        return self.charged

    def ask(self, key: str | None = "a", path: str = "completions", **fields: Any) -> Reply:
        body = {"model": MODEL, **({"prompt": "The"} if path == "completions" else {}), **fields}
        return self.send("POST", f"/v1/{path}", body, key)

    def send(self, method: str, path: str, body: Any = None, key: str | None = None) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {} if key is None else {"Authorization": f"Bearer {self.keys.get(key, key)}"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return Reply(response.status, response.read().decode())
        finally:
            connection.close()


@pytest.fixture(scope="module", params=ENGINES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("engines")
    with running(request.param, folder, QUERIES) as found:
        yield found


class running(ExitStack):
    """Runs a server with two keys: one has a share of the plan and short answers."""

    def __init__(self, name: str, folder: Path, queries: int, then_public: bool = False) -> None:
        super().__init__()
        self._settings = name, folder, queries, then_public

    def __enter__(self) -> Server:  # type: ignore[override]
        name, folder, queries, then_public = self._settings
        base = write_base(folder / "base")
        members = write_ensemble(folder / "ensemble", 8, base=base)
        ensemble = Ensemble.from_pretrained(str(base), members)
        keys = {one: add_key(folder / "keys", one) for one in ("a", "b")}
        keys["small"] = add_key(folder / "keys", "small", tokens=50, max_tokens=30)
        mechanism = ClippedLogPool(-1.0, 1.0, 4.0, queries=queries)
        accountant = self.enter_context(Accountant(1e-5, path=folder / "ledger"))
        engine: Any
        if name == "vllm":
            from adapmixed.vllm.engine import VllmEngine

            engine = VllmEngine(
                str(base), ensemble, mechanism, accountant, memory_bytes=MEMORY, enforce_eager=True
            )
            self.callback(engine.close)
        else:
            engine = BatchEngine(ensemble, mechanism, accountant, memory_bytes=MEMORY)
        window = getattr(engine, "window", ensemble.max_positions)
        scheduler = Scheduler(engine, ensemble.tokenizer, ensemble.end_tokens)
        self.callback(scheduler.stop, 0.0)
        usage = Usage(folder / "ledger")
        self.callback(usage.close)
        admission = Admission(accountant, mechanism, then_public=then_public)
        defaults = Defaults(MODEL, 16, 200, window, ensemble.vocab_size)
        metrics = Metrics(lambda: scheduler.running, lambda: scheduler.waiting)
        clients = Clients(read_keys(folder / "keys"), usage)
        service = Service(scheduler, admission, ensemble.tokenizer, defaults, metrics, clients)
        port = self.enter_context(listening(application(service)))
        return Server(port, folder / "ledger", admission, scheduler, keys)


def used(reply: Reply) -> int:
    """Return the number of tokens of an answer."""
    assert reply.status == 200, reply
    return int(reply.json["usage"]["completion_tokens"])


def test_completions(server: Server) -> None:
    before = server.settled()
    reply = server.ask(prompt=["A function", "The"], max_tokens=7)
    register = entered(register_of(server.ledger.parent / "ensemble"))
    assert read_ledger(server.ledger).identity in register  # or sums over ledgers would lack it
    assert 2 <= used(reply) <= 14  # an end token may be drawn
    assert [one["index"] for one in reply.json["choices"]] == [0, 1]
    assert all(one["logprobs"] is None for one in reply.json["choices"])
    total = used(reply) + used(server.ask())  # without max_tokens: the server's default
    assert total - used(reply) <= 16
    neutral = {"n": 1, "top_p": 1, "presence_penalty": 0, "seed": None, "user": "x"}
    for fields in (
        {"temperature": 0.7, "top_k": 5, **neutral}, {"prompt": [5, 6, 7], "stop": ["e"]},
        {"top_k": 10**30}, {"temperature": 100}, {"temperature": 0.01},
    ):  # fmt: skip
        total += used(server.ask(max_tokens=3, **fields))
    assert server.settled() - before == total  # all that was released, and nothing else


def test_chat(server: Server) -> None:
    parts = [{"type": "text", "text": text} for text in ("A function", " that returns")]
    read = set()
    for content in ("A function that returns", parts):
        messages = [{"role": "user", "content": content}]
        reply = server.ask(path="chat/completions", messages=messages, max_completion_tokens=5)
        assert 1 <= used(reply) <= 5
        assert reply.json["choices"][0]["message"]["role"] == "assistant"
        read.add(reply.json["usage"]["prompt_tokens"])
    assert len(read) == 1


def test_a_stop_token_ends_an_answer(server: Server) -> None:
    """With top_k = 1 the tokens are the likeliest public ones, so the stop surely comes."""
    base = AutoModelForCausalLM.from_pretrained(server.ledger.parent / "base")
    tokenizer = Ensemble.from_pretrained(
        str(server.ledger.parent / "base"), server.ledger.parent / "ensemble"
    ).tokenizer
    asked = {"prompt": "If the name", "top_k": 1, "max_tokens": 20}
    ids = tokenizer(asked["prompt"], return_tensors="pt")["input_ids"]
    *shown, end = base.generate(ids, do_sample=False, max_new_tokens=3)[0, ids.shape[1] :].tolist()
    assert end not in shown
    before = server.settled()
    reply = server.ask(stop_token_ids=[end], **asked)
    assert reply.json["choices"][0]["text"] == tokenizer.decode(shown)
    assert reply.json["choices"][0]["finish_reason"] == "stop" and used(reply) == 3
    events = server.ask(
        stop_token_ids=[end], stream=True, stream_options={"include_usage": True}, **asked
    ).events
    *pieces, last, done = events
    assert done == "[DONE]" and last["usage"]["completion_tokens"] == 3
    assert "".join(one["choices"][0]["text"] for one in pieces) == tokenizer.decode(shown)
    assert server.settled() - before == 6


@pytest.mark.parametrize(
    "path",
    ["/invocations", "/tokenize", "/metrics", "/openapi.json", "/v1/responses", "/v1/embeddings",
     "//v1/completions", "/v1/completions/"],
)  # fmt: skip
def test_other_paths_are_closed(server: Server, path: str) -> None:
    for method in ("GET", "POST"):
        reply = server.send(method, path, {"model": MODEL, "prompt": "The"}, "a")
        assert reply.status == 404, (method, path, reply)
        check_error(reply.json, 404)
        assert server.send(method, path).status == 401


def test_a_key_is_needed(server: Server) -> None:
    for key in (None, "", "adapmixed-wrong"):
        reply = server.ask(key, max_tokens=2)
        assert check_error(reply.json, 401)["code"] == "invalid_api_key" and reply.status == 401
    assert server.send("GET", "/health").status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0}, {"prompt_logprobs": 1}, {"echo": True}, {"seed": 1}, {"n": 2},
        {"temperature": 0}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 3}}, {"min_tokens": 2}, {"structured_outputs": {"regex": "a+"}},
        {"response_format": {"type": "json_object"}}, {"use_beam_search": True},
        {"vllm_xargs": {"adapmixed": "x"}}, {"cache_salt": "x"}, {"ignore_eos": True},
        {"prompt_embeds": "x"}, {"unknown": 1}, {"max_tokens": 201}, {"prompt": []},
        {"prompt": "x " * 300}, {"stop": "a<|endoftext|>"}, {"prompt": [[1 << 20]]},
        {"prompt": [1] * 200, "max_tokens": 100},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)  # fmt: skip
def test_refused_fields(server: Server, fields: dict[str, Any]) -> None:
    before = server.settled()
    reply = server.ask(**({"max_tokens": 3} | fields))
    assert reply.status == 400, reply
    named = check_error(reply.json, 400)["param"]
    assert named in fields or named == "max_tokens"
    assert server.settled() == before


def test_a_key_has_its_own_tokens(server: Server) -> None:
    assert server.ask("small", max_tokens=31).status == 400
    assert server.ask("small", prompt=["The", "An"], max_tokens=30).status == 429
    counted = 0
    while (reply := server.ask("small", max_tokens=10)).status == 200:
        counted += used(reply)
    assert check_error(reply.json, reply.status)["code"] == "insufficient_quota"
    assert reply.status == 429 and 30 < counted <= 50


def test_malformed_http(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        reply = b"".join(iter(lambda: connection.recv(1 << 12), b""))
    assert reply.startswith(b"HTTP/1.1 400 ") and b'"type":"invalid_request_error"' in reply


def test_a_client_that_leaves_is_not_charged_further(server: Server) -> None:
    before = server.settled()
    body = {"model": MODEL, "prompt": "The", "max_tokens": 200, "stream": True, "top_k": 40}
    content = json.dumps(body).encode()
    head = f"Authorization: Bearer {server.keys['a']}\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        request = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}".encode()
        connection.sendall(request + content)
        while b"choices" not in connection.recv(1 << 12):
            pass
    charged = server.settled()
    assert before < charged < before + 200
    time.sleep(0.3)
    assert server.charged == charged


def test_the_end_of_the_plan(server: Server) -> None:
    """The last test of this server. All prompts of a list are reserved together or not at all."""
    while (reply := server.ask(prompt=["The"] * 4, max_tokens=150)).status == 200:
        server.settled()
    assert check_error(reply.json, 429)["code"] == "insufficient_quota" and reply.status == 429
    while (left := QUERIES - server.settled()) > 0:
        assert left < 600
        assert server.ask(max_tokens=min(left, 200)).status == 200
    for stream in (False, True):
        assert server.ask(max_tokens=1, stream=stream).status == 429
    assert server.settled() == QUERIES


@pytest.mark.parametrize("name", ENGINES)
def test_the_public_model_answers_beyond_the_plan(name: str, tmp_path: Path) -> None:
    with running(name, tmp_path, 5, then_public=True) as server:
        assert server.ask(max_tokens=9).json["system_fingerprint"] == "public-model"
        while left := 5 - server.settled():
            assert "system_fingerprint" not in server.ask(max_tokens=left).json
        assert server.ask(max_tokens=4).json["system_fingerprint"] == "public-model"
        assert server.settled() == 5
