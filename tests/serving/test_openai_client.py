"""The `openai` package against a real server: blocking, streaming, and the errors it acts on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import until
from serving_cases import ASK, CHAT, a_client, listening, served
from stub_engine import TEXT, StubEngine

EXPECTED = TEXT.encode()[:20].decode()


@pytest.fixture(scope="module")
def openai() -> Any:
    """Return the package, whose import takes two seconds."""
    return pytest.importorskip("openai")


def client_of(openai: Any, port: int, key: str = "any") -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key)


def test_answers(openai: Any, tmp_path: Path) -> None:
    """Blocking and streaming, of both paths, with a key."""
    clients, _, headers = a_client(tmp_path)
    with served(clients=clients) as server, listening(server.app) as port:
        with pytest.raises(openai.AuthenticationError, match="Bearer KEY"):
            client_of(openai, port).models.list()
        with client_of(openai, port, headers["authorization"].split()[1]) as client:
            assert [model.id for model in client.models.list()] == ["demo"]
            ask = partial(client.completions.create, **ASK | {"max_tokens": 20})
            done = ask(prompt=["a", "b"], n=1)
            assert [choice.text for choice in done.choices] == [EXPECTED] * 2
            assert done.usage.completion_tokens == 40
            assert "".join(part.choices[0].text for part in ask(stream=True)) == EXPECTED
            with pytest.raises(openai.BadRequestError, match="seed must be null") as raised:
                ask(seed=1)
            assert raised.value.param == "seed" and raised.value.code == "unsupported_parameter"
            ask = partial(client.chat.completions.create, **CHAT | {"max_tokens": 20})
            done = ask(user="me", temperature=0.7)
            assert done.choices[0].message.content == EXPECTED
            assert done.choices[0].finish_reason == "length"
            *parts, last = ask(stream=True, stream_options={"include_usage": True})
            assert last.usage.completion_tokens == 20 and not last.choices
            deltas = [part.choices[0].delta for part in parts]
            assert deltas[0].role == "assistant"
            assert "".join(delta.content or "" for delta in deltas) == EXPECTED


def test_a_spent_plan_is_not_asked_again(openai: Any) -> None:
    with served(StubEngine(queries=10)) as server, listening(server.app) as port:
        with client_of(openai, port) as client:
            client.completions.create(**ASK)
            with pytest.raises(openai.RateLimitError, match="2 tokens are left"):
                client.completions.create(**ASK)
        labels = {"path": "/v1/completions", "status": "429"}
        counted = partial(server.metrics.registry.get_sample_value, "adapmixed_requests_total")
        until(lambda: counted(labels))  # once the response was sent
        assert counted(labels) == 1  # x-should-retry kept the client from asking twice more


def test_an_error_in_the_middle_of_a_stream(openai: Any) -> None:
    with served(StubEngine(seconds=0.005)) as server, listening(server.app) as port:
        with client_of(openai, port) as client:
            stream = client.completions.create(**ASK | {"max_tokens": 200, "stream": True})
            assert next(stream).choices[0].text == "G"
            server.scheduler.stop()
            with pytest.raises(openai.APIError, match="stopping"):
                list(stream)
