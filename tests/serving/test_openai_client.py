"""The `openai` package against a real server: blocking and streaming."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from processes import until
from serving_cases import Served, clients_of, listening, served
from stub_engine import TEXT, StubEngine

from adapmixed.serving.admission import add_key

MESSAGES = [{"role": "user", "content": "Once"}]
EXPECTED = TEXT.encode()[:20].decode()


@pytest.fixture(scope="module")
def openai() -> Any:
    """Return the package, whose import takes two seconds."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str, str]]:
    folder = tmp_path_factory.mktemp("keys")
    secret = add_key(folder / "keys.json", "client")
    with served(clients=clients_of(folder)) as found, listening(found.app) as port:
        yield found, f"http://127.0.0.1:{port}/v1", secret


def test_answers(openai: Any, server: tuple[Served, str, str]) -> None:
    """Blocking and streaming, of both paths."""
    _, url, secret = server
    with openai.OpenAI(base_url=url, api_key=secret) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        ask = partial(client.completions.create, model="demo", max_tokens=20)
        done = ask(prompt=["a", "b"], n=1)
        assert [choice.text for choice in done.choices] == [EXPECTED] * 2
        assert done.usage.completion_tokens == 40
        assert "".join(part.choices[0].text for part in ask(prompt="a", stream=True)) == EXPECTED
        ask = partial(client.chat.completions.create, model="demo", messages=MESSAGES, user="me")
        done = ask(max_completion_tokens=20, temperature=0.7)
        assert done.choices[0].message.content == EXPECTED
        assert done.choices[0].finish_reason == "length"
        *parts, last = ask(max_tokens=20, stream=True, stream_options={"include_usage": True})
        assert last.usage.completion_tokens == 20 and not last.choices
        deltas = [part.choices[0].delta for part in parts]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == EXPECTED


def test_errors(openai: Any, server: tuple[Served, str, str]) -> None:
    _, url, secret = server
    with openai.OpenAI(base_url=url, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="Bearer KEY"):
            client.models.list()
    with openai.OpenAI(base_url=url, api_key=secret) as client:
        with pytest.raises(openai.BadRequestError, match="seed must be null") as raised:
            client.completions.create(model="demo", prompt="a", seed=1)
        assert raised.value.param == "seed" and raised.value.code == "unsupported_parameter"
        with pytest.raises(openai.NotFoundError, match="not served"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="demo", input="a")


def test_a_spent_plan_is_not_asked_again(openai: Any) -> None:
    with served(StubEngine(queries=10)) as found, listening(found.app) as port:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any") as client:
            client.completions.create(model="demo", prompt="a", max_tokens=8)
            with pytest.raises(openai.RateLimitError, match="2 tokens are left"):
                client.completions.create(model="demo", prompt="a", max_tokens=8)
        labels = {"path": "/v1/completions", "status": "429"}
        counted = partial(found.metrics.registry.get_sample_value, "adapmixed_requests_total")
        until(lambda: counted(labels))  # once the response was sent
        assert counted(labels) == 1  # x-should-retry kept the client from asking twice more


def test_an_error_in_the_middle_of_a_stream(openai: Any) -> None:
    with served(StubEngine(seconds=0.005)) as found, listening(found.app) as port:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any") as client:
            stream = client.completions.create(
                model="demo", prompt="a", max_tokens=200, stream=True
            )
            seen = [next(stream)]
            found.scheduler.stop(0.0)
            with pytest.raises(openai.APIError, match="stopping"):
                seen += list(stream)
            assert seen[0].choices[0].text == "G"
