"""curl, and lm-eval's model for servers, against a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from serving_cases import ASK, listening, served
from stub_engine import TEXT

for package in ("aiohttp", "requests", "tenacity"):
    pytest.importorskip(package)
completions = pytest.importorskip("lm_eval.models.openai_completions")

EXPECTED = TEXT.encode()[:20].decode()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as found, listening(found.app) as port:
        yield f"http://127.0.0.1:{port}/v1/completions"


def request(prompt: str) -> Any:
    """Return a task's question as lm-eval has it."""
    return SimpleNamespace(args=(prompt, {"until": ["zzz"], "temperature": 1, "max_gen_toks": 20}))


def model_of(kind: Any, url: str) -> Any:
    return kind(base_url=url, model="demo", tokenizer_backend=None, max_retries=1)


def test_lm_eval_without_its_seed(url: str) -> None:
    class Unseeded(completions.LocalCompletionsAPI):  # type: ignore[misc]
        """A model that sends no seed: with it, randomness could be undone."""

        def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            payload: dict[str, Any] = super()._create_payload(*args, **kwargs)
            payload.pop("seed")
            return payload

    asked = [request("Once"), request("Twice")]
    found = model_of(Unseeded, url).generate_until(asked, disable_tqdm=True)
    assert found == [EXPECTED] * 2


def test_lm_eval_as_it_is(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its seed gets 400, and the reason stands in its log."""
    with pytest.raises(Exception, match="400|RetryError"):
        model_of(completions.LocalCompletionsAPI, url).generate_until(
            [request("Once")], disable_tqdm=True
        )
    assert "seed must be null" in caplog.text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(url: str) -> None:
    def curl(*options: str, **fields: Any) -> str:
        body = json.dumps(ASK | {"max_tokens": 20} | fields)
        command = ["curl", "--silent", "--show-error", *options, url, "--data", body]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert json.loads(curl())["choices"][0]["text"] == EXPECTED
    events = curl("--no-buffer", stream=True).split("\n\n")
    assert events[-2] == "data: [DONE]"
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]]
    assert "".join(texts) == EXPECTED
    assert curl("--output", "/dev/null", "--write-out", "%{http_code}", logprobs=1) == "400"
