"""Fields of a request: served, without effect, or 400 with the reason, each through HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from serving_cases import ASK, CHAT, CHATS, COMPLETIONS, check_error, served
from starlette.testclient import TestClient
from stub_engine import VOCAB, ByteTokenizer, StubEngine

from adapmixed.serving.fields import REFUSED

PATHS = {False: COMPLETIONS, True: CHATS}
BODIES = {False: ASK, True: CHAT}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served() as server:
        yield server.client()


def refused(client: TestClient, chat: bool, **fields: Any) -> dict[str, Any]:
    """Post a body with further fields, and return the error that it gets."""
    body = json.dumps(BODIES[chat] | fields)
    answer = client.post(PATHS[chat], content=body)
    assert answer.status_code == 400, answer.text
    return check_error(answer.json(), 400)


def passes(client: TestClient, chat: bool, **fields: Any) -> dict[str, Any]:
    answer = client.post(PATHS[chat], json=BODIES[chat] | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_every_refused_field_has_its_reason(client: TestClient, chat: bool) -> None:
    assert {"n", "seed", "logprobs", "top_p", "logit_bias", "tools", "echo"} <= set(REFUSED)
    for name, (neutral, reason) in REFUSED.items():
        refused(client, chat, **{name: True})  # which is not 1
        error = refused(client, chat, **{name: "x"})
        assert error["param"] == name and error["message"].startswith(f"{name} must be null")
        assert reason in error["message"]
        for value in (None, *neutral):
            passes(client, chat, max_tokens=1, **{name: value})


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_unknown_fields(client: TestClient, chat: bool) -> None:
    for name in ("Temperature", "", "\ud800", "a" * 300, "prompt" if chat else "messages"):
        error = refused(client, chat, **{name: "x"})
        assert error["param"] == name[:60] and "does not offer it" in error["message"]
        passes(client, chat, **{name: None} if name != "\ud800" else {})


def test_caps(client: TestClient) -> None:
    assert "max_tokens must be <= 300, got 301" in refused(client, False, max_tokens=301)["message"]
    for value in (0, -1, 1.5, "1", 10**400):
        refused(client, False, max_tokens=value)
    assert passes(client, False, max_tokens=None)["usage"]["completion_tokens"] == 256
    chat = passes(client, True, max_tokens=None, max_completion_tokens=3)
    assert chat["usage"]["completion_tokens"] == 3
    assert passes(client, True, max_tokens=3, max_completion_tokens=3)
    error = refused(client, True, max_tokens=3, max_completion_tokens=4)
    assert "must be equal" in error["message"]
    for name, value in [*(("temperature", number) for number in (0, False, 101)), ("top_k", -2)]:
        assert refused(client, False, **{name: value})["param"] == name


def test_prompts(client: TestClient) -> None:
    for prompt, sequences, tokens in (
        ("abc", 1, 3),
        (["abc", "de"], 2, 5),
        ([97, 98], 1, 2),
        ([[97], [98, 99]], 2, 3),
        ([[97], "bc"], 2, 3),
        ("\x00 é 🙂", 1, 9),
    ):
        reply = passes(client, False, prompt=prompt)
        assert len(reply["choices"]) == sequences
        assert reply["usage"]["prompt_tokens"] == tokens
    bad = [None, "", [], [""], [[]], ["a", ""], 3, {}, [None], [[1.0]], [[True]], [True], ["a", 1]]
    for prompt in (*bad, ["a", [[1]]], [1, "a"], "\ud800", "a\udc00"):
        assert refused(client, False, prompt=prompt)["param"] == "prompt", prompt


def test_messages(client: TestClient) -> None:
    parts = [{"type": "text", "text": "On"}, {"type": "text", "text": "ce"}]
    plain = passes(client, True)["usage"]["prompt_tokens"]
    talk = [{"role": "user", "content": parts, "name": None}]
    assert passes(client, True, messages=talk)["usage"]["prompt_tokens"] == plain
    for role in ("system", "developer", "assistant"):
        passes(client, True, messages=[{"role": role, "content": "x"}, *CHAT["messages"]])
    msg = {"role": "user", "content": "x"}
    bad: list[Any] = [
        None, [], "x", {}, [None], ["x"], [{}], [{"role": "user"}], [{"content": "x"}],
        [msg | {"role": "tool"}], [msg | {"role": 1}], [msg | {"role": []}], [msg | {"content": 1}],
        [msg | {"content": None}], [msg | {"content": [1]}],
        [msg | {"content": [{"type": "text"}]}],
        [msg | {"content": [{"type": "image_url", "image_url": {}}]}], [msg | {"tool_calls": []}],
        [msg | {"content": [{"type": "text", "text": 1}]}], [msg | {"content": "\udfff"}], [msg, 1],
    ]  # fmt: skip
    for messages in bad:
        error = refused(client, True, messages=messages)
        assert error["param"].startswith("messages"), messages
    for content in (1, None, "\udfff"):
        error = refused(client, True, messages=[msg, msg | {"content": content}])
        assert error["param"] == "messages[1].content" == error["message"].partition(" ")[0]


@pytest.mark.parametrize("wrong", [TypeError("no"), KeyError("no"), ZeroDivisionError()])
def test_a_template_that_fails(wrong: Exception) -> None:
    class Failing(ByteTokenizer):
        def apply_chat_template(self, messages: Any, **options: object) -> str:
            raise wrong

    with served(tokenizer=Failing()) as server:
        assert refused(server.client(), True)["param"] == "messages"
    plain = ByteTokenizer()
    plain.chat_template = None
    with served(tokenizer=plain) as server:
        assert "use /v1/completions" in refused(server.client(), True)["message"]


def test_stops(client: TestClient) -> None:
    reply = passes(client, False, stop="ß", max_tokens=20)
    assert reply["choices"][0] == {
        "index": 0, "text": "Grü", "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip
    assert reply["usage"]["completion_tokens"] == 6  # ß has two bytes, and is charged
    passes(client, False, stop=["1", "2", "3", "4"])
    held = passes(client, False, stop="ß?", max_tokens=6)["choices"][0]  # held back for its stop
    assert (held["text"], held["finish_reason"]) == ("Grüß", "length")
    passes(client, False, stop=[])
    for stop in ("", [""], ["a"] * 5, [1], {}, "\ud800", "x" * 257):
        assert refused(client, False, stop=stop)["param"] == "stop"


class Special(ByteTokenizer):
    """Byte 1 is a special token with the name "<mid>"."""

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return super().__call__(text.replace("<mid>", "\x01"))

    def decode(self, ids: Sequence[int], **options: object) -> str:
        name = "" if options["skip_special_tokens"] else "<mid>"
        return super().decode(ids).replace("\x01", name)


def test_stop_tokens() -> None:
    engine = StubEngine("one\x01two<mid>.")
    with served(engine, tokenizer=Special()) as server:
        client = server.client()
        for stop, text, used in (
            ({"stop": "<mid>"}, "one", 4),  # before, the text "<mid>" alone ended it: 12
            ({"stop": ["x", "<mid>"], "stream": False}, "one", 4),
            ({"stop_token_ids": [1]}, "one", 4),
            ({"stop_token_ids": [1] * 64, "stop": "n"}, "o", 2),
            ({"stop_token_ids": [VOCAB - 1, ord("w")]}, "onet", 6),
        ):
            for chat in (False, True):
                charged = engine.accountant.queries
                reply = passes(client, chat, max_tokens=20, **stop)
                (choice,) = reply["choices"]
                assert (choice["message"]["content"] if chat else choice["text"]) == text
                assert choice["finish_reason"] == "stop"
                assert reply["usage"]["completion_tokens"] == used
                assert engine.accountant.queries == charged + used
        for free in (None, []):
            passes(client, False, stop_token_ids=free)
        for stop in ("<mid>\n", "a<mid>", "<mid><mid>"):
            error = refused(client, False, stop=["x", stop])
            assert error["param"] == "stop"
            assert "stop must have the special token '<mid>' as a string of its own" in str(error)
        for ids in (1, 0, False, "", "1", {}, ["1"], [True], [1.0], [-1], [VOCAB], [[1]], [1] * 65):
            error = refused(client, False, stop_token_ids=ids)
            assert error["param"] == "stop_token_ids"
            assert "must be a list of at most 64 tokens in [0, 257), got" in error["message"]
    # The models have no such token, so it is a text as any other.
    with served(engine, tokenizer=Special(), vocab=1) as server:
        assert passes(server.client(), False, prompt=[0], stop="<mid>", max_tokens=20)["usage"]


def test_stream_options(client: TestClient) -> None:
    for options in ({}, {"include_usage": True}, {"include_usage": None}):
        assert refused(client, False, stream_options=options)["param"] == "stream_options"
        body = ASK | {"stream": True, "stream_options": options}
        assert client.post(PATHS[False], json=body).status_code == 200
    for options in ([], {"x": 1}, {"include_usage": 1}, {"include_obfuscation": True}, "x"):
        refused(client, False, stream=True, stream_options=options)


def test_fields_that_are_ignored(client: TestClient) -> None:
    harmless = {"user": "u", "metadata": {"a": ["b"]}, "store": False, "service_tier": "auto"}
    for chat in (False, True):
        passes(client, chat, **harmless, safety_identifier="x")


def test_models(client: TestClient) -> None:
    answer = client.post(PATHS[False], json=ASK | {"model": "gpt-5"})
    assert answer.status_code == 404
    assert check_error(answer.json(), 404)["code"] == "model_not_found"
    for model in (None, 1, ["demo"], "\ud800"):
        assert refused(client, False, model=model)["param"] == "model"


BODIES_THAT_ARE_NONE = [
    b"", b"{", b"[]", b"null", b"1", b'"a"', b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"model": "demo",}',
    b"{" + b"1" * 5000 + b"}",
    b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 100_000, b"\x00" * 100,
    '{"model": "demo"}'.encode("utf-16"),
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES_THAT_ARE_NONE, ids=range(len(BODIES_THAT_ARE_NONE)))
def test_bodies_that_are_no_request(client: TestClient, body: bytes) -> None:
    answer = client.post(PATHS[False], content=body)
    assert answer.status_code == 400, answer.text
    check_error(answer.json(), 400)


def test_the_window(client: TestClient) -> None:
    error = refused(client, False, prompt="x" * 5000)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    error = refused(client, False, prompt="x" * 4090, max_tokens=100)
    assert error["param"] == "max_tokens"
    assert error["message"].startswith("max_tokens must be <= ")
    assert refused(client, False, prompt=["x"] * 65)["param"] == "prompt"


def test_tokens_outside_the_vocabulary_are_not_too_long(client: TestClient) -> None:
    for prompt in ([-1], [257], [[1, 2], [3, 10**30]]):
        error = refused(client, False, prompt=prompt)
        assert error["code"] is None and error["param"] == "prompt"
        assert error["message"].startswith("prompt must hold tokens in [0, ")
