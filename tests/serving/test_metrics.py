"""The operator's figures: right, not private, and on the loopback interface alone."""

from __future__ import annotations

import re
import socket
import urllib.request
from threading import Thread
from typing import Any

import pytest
from processes import until
from serving_cases import ASK, served
from stub_engine import StubEngine

from adapmixed.serving.listener import bound
from adapmixed.serving.metrics import Metrics

NAMES = {
    "adapmixed_requests", "adapmixed_released_tokens", "adapmixed_first_token_seconds",
    "adapmixed_between_tokens_seconds", "adapmixed_running_sequences",
    "adapmixed_waiting_sequences", "adapmixed_plan_tokens_left",
}  # fmt: skip


def value(metrics: Metrics, name: str, **labels: str) -> Any:
    return metrics.registry.get_sample_value(f"adapmixed_{name}", labels)


def test_the_figures() -> None:
    engine = StubEngine(queries=100)
    with served(engine) as server:
        client, metrics = server.client(), server.metrics
        for body in (ASK, ASK | {"prompt": ["a", "b"], "stream": True}, ASK | {"seed": 1}):
            client.post("/v1/completions?q=secret", json=body)
        client.get("/secret")
        client.get("/v1/models/secret")
        assert server.settled()
        assert value(metrics, "requests_total", path="/v1/completions", status="200") == 2
        assert value(metrics, "requests_total", path="/v1/completions", status="400") == 1
        assert value(metrics, "requests_total", path="other", status="404") == 1
        assert value(metrics, "requests_total", path="/v1/models/...", status="404") == 1
        assert value(metrics, "released_tokens_total") == 24 == engine.released
        assert value(metrics, "first_token_seconds_count") == 3
        assert value(metrics, "between_tokens_seconds_count") == 21
        assert value(metrics, "plan_tokens_left") == 76
        engine.go.clear()
        assert value(metrics, "running_sequences") == 0
        thread = Thread(target=client.post, args=("/v1/completions",), kwargs={"json": ASK})
        thread.start()
        until(lambda: value(metrics, "running_sequences") == 1)
        assert value(metrics, "plan_tokens_left") == 68  # reserved, not yet charged
        engine.go.set()
        thread.join()


def test_the_listener() -> None:
    with bound("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    with served() as server:
        close = server.metrics.serve(port)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                text = answer.read().decode()
            found = set(re.findall(r"^# TYPE (\w+?)(?:_total|_created)? ", text, re.MULTILINE))
            assert found == NAMES
            with pytest.raises(OSError):
                server.metrics.serve(port)
            with socket.socket() as other:  # a loopback address that it does not listen at
                other.settimeout(2.0)
                with pytest.raises(OSError):
                    other.connect(("127.0.0.2", port))
        finally:
            close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")
