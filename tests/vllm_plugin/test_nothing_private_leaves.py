"""Swap the members inside vLLM and force the tokens: no byte that leaves the server may differ."""

from __future__ import annotations

import http.client
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vllm is not installed: `make test-vllm` has it")

from served import Server, free_port  # noqa: E402
from vllm_cases import write_base, write_ensemble  # noqa: E402

FORCED = Path(__file__).parent / "forced"
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "The function", "max_tokens": 6}),
    ("completions", {"prompt": ["A", "An object is"], "max_tokens": 4, "temperature": 0.7}),
    ("completions", {"prompt": "Return the", "max_tokens": 20, "top_k": 5}),
    ("completions", {"prompt": "If the name", "max_tokens": 30, "stop": "e"}),
    ("completions", {"prompt": "The", "max_tokens": 8, "stream": True}),
    ("completions", {"prompt": "The", "max_tokens": 1, "stream": True, "n": 1}),
    ("completions", {"prompt": "The", "logprobs": 1}),
    ("completions", {"prompt": "The", "max_tokens": 201}),
    ("completions", {"prompt": "x " * 300, "max_tokens": 1}),
    ("completions", {"prompt": [[1 << 20]], "max_tokens": 1}),
    ("chat/completions", {"messages": [{"role": "user", "content": "This"}], "max_tokens": 5}),
    ("chat/completions", {"messages": "no list"}),
]
ENDED = [("completions", {"prompt": ["The"] * 4, "max_tokens": 150})]  # beyond the plan
OF_TIME = [  # what differs from run to run, whoever the members are
    (rb'"id":"[a-z]+-[0-9a-f-]+"', b'"id":"?"'),
    (rb'"created":\d+', b'"created":0'),
]


def without_time(body: bytes) -> bytes:
    for pattern, text in OF_TIME:
        body = re.sub(pattern, text, body)
    return body


def answer(server: Server, method: str, path: str, body: Any = None) -> Any:
    """Return the status, every header and every byte of an answer, without times."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    given = None if body is None else json.dumps(body)
    connection.request(method, path, given, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    headers = [(name.lower(), value) for name, value in reply.getheaders()]
    whole = without_time(reply.read())
    connection.close()
    kept = [one for one in headers if one[0] != "date"]
    if b"data: " in whole:  # how many tokens one event tells depends on the time
        events = [
            json.loads(line[6:]) for line in whole.split(b"\n") if line.startswith(b"data: {")
        ]
        text = "".join(one["choices"][0].pop("text") for one in events)
        return reply.status, kept, text, sorted({json.dumps(one) for one in events})
    return reply.status, kept, whole


FIGURES = re.compile(  # vLLM's own line of public figures, every few seconds
    r".*Engine 000: Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: [\d.]+ "
    r"tokens/s, Running: \d+ reqs, Waiting: \d+ reqs, CPU KV cache usage: [\d.]+%, "
    r"Prefix cache hit rate: [\d.]+%"
)


NOT_FREED = re.compile(  # nanobind's list of other libraries' objects when Python ends
    r"nanobind: leaked \d+ (instances|types|functions|keep_alive records)!"
    r"| - leaked (instance|type|function|keep_alive record) .*| - \.\.\. skipped remainder"
    r"|nanobind: this is likely caused by a reference counting issue in the binding code\."
    r"|See https://nanobind\.readthedocs\.io/\S*"
)


ENGINE_FIRST = re.compile(  # the front may see that the engine has ended, before it ends itself
    r"\(APIServer pid=\d+\) ERROR [\d-]+ [\d:]+ \[async_llm\.py:\d+\] ?"
    r"(AsyncLLM output_handler failed\.|Traceback \(most recent call last\):| {2,}.*"
    r"|vllm\.v1\.engine\.exceptions\.EngineDeadError: .*)"
)


def lines(log: str, *without: re.Pattern[str]) -> list[str]:
    """Return the lines of a log without times, process ids, random names and ports of clients.

    They are sorted, because several processes write them.
    """
    found = []
    for line in log.splitlines():
        if any(one.fullmatch(line) for one in without):
            continue
        line = re.sub(r"\d\d-\d\d \d\d:\d\d:\d\d", "", line)
        line = re.sub(r"pid=\d+|process \[\d+\]", "pid", line)
        line = re.sub(r"/tmp/vllm_dist_[0-9a-f]{32}", "/tmp/vllm_dist_?", line)
        line = re.sub(r"127\.0\.0\.1:\d+ ", "", line)
        found.append(line)
    return sorted(found)


def seen(folder: Path, port: int) -> tuple[list[Any], list[str], list[str], list[str]]:
    """Return the answers, and the logs of the start, of the answers and of the end."""
    server = Server(folder, queries=600, port=port, path=FORCED)
    try:
        start = len(server.log.read_text())
        answers = [
            answer(server, "POST", f"/v1/{path}", {"model": "m", **body})
            for path, body in (*ASKED, *ASKED, *ENDED)
        ]
        answers += [answer(server, "GET", path) for path in ("/v1/models", "/health", "/metrics")]
        end = len(server.log.read_text())
        assert server.stop() == 0
    finally:
        server.clear()
    log = server.log.read_text()
    server.log.unlink()
    ended = lines(log[end:], FIGURES, NOT_FREED, ENGINE_FIRST)
    return answers, lines(log[:start]), lines(log[start:end], FIGURES), ended


def test_members_change_nothing_but_the_tokens(tmp_path: Path) -> None:
    folder, port = tmp_path / "server", free_port()
    folder.mkdir()
    base = write_base(folder / "base")
    results = []
    for seed in (1, 2):
        shutil.rmtree(folder / "ensemble", ignore_errors=True)
        for file in folder.glob("ledger*"):
            file.unlink()
        write_ensemble(folder / "ensemble", base=base, seed=seed)
        results.append(seen(folder, port))
    (first, start, running, end), (second, other_start, other_running, other_end) = results
    for one, other in zip(first, second, strict=True):
        assert one == other
    assert {one[0] for one in first} == {200, 400, 404, 429}
    assert running == other_running
    assert end and end == other_end
    assert start and without_figures(start) == without_figures(other_start)


TIMED = re.compile(r"\d+\.\d+|seconds|secs|GiB|pid")


def without_figures(start: list[str]) -> list[str]:
    """Return the lines of a start; those that tell times or memory are without their numbers."""
    blank = (re.sub(r"\d+(\.\d+)?", "#", line) if TIMED.search(line) else line for line in start)
    return sorted(blank)
