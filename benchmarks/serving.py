"""Time a server: tokens a second of all streams, and the time between two tokens of one.

    python -m benchmarks.serving [--quick] [--folder DISK] [--out PREFIX]
    python -m benchmarks.serving --url http://127.0.0.1:8000/v1 --model NAME    # a running server

1, 8 and 64 clients stream completions, one after the other. Without --url they ask `adapmixed
serve` with the built-in ensemble, which runs in a process of its own. With --url they ask any
server of OpenAI's protocol, such as `adapmixed serve --device vllm` or vLLM alone.

Tokens are those of the server's usage, since a client gets an event only for a token that adds
text. They are counted while all streams go on. What the clients see between two events of one
stream is reported in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from adapmixed.data import demo_base
from adapmixed.training.demo import train_demo
from benchmarks.harness import Neighbours, Report, headline, machine

STREAMS = (1, 8, 64)
SECONDS = 20.0
TOKENS = 128
PROMPT = "The try statement executes the first clause"
MODEL = "demo"
MECHANISM = "clipped-log-pool lower=-0.25 upper=1 scale=2 queries=1000000000"


@dataclass(frozen=True)
class Seen:
    """Figures of the clients of one run.

    Attributes:
        tokens_per_second: of all streams together, by the server's usage.
        tokens_per_answer: their mean, by the server's usage.
        p50: seconds between two events of one stream that half of them do not exceed.
        p95: as p50, for 95 %.
        p99: as p50, for 99 %.
        first: median of the seconds to the first event.
    """

    tokens_per_second: float
    tokens_per_answer: float
    p50: float
    p95: float
    p99: float
    first: float


@dataclass
class _Counts:
    """The counts and times of the clients of one run.

    Attributes:
        events: the time of each event that has text.
        gaps: seconds between two events of one stream.
        firsts: seconds to the first event of each answer.
        answered: tokens of each answer.
    """

    events: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)


async def _stream(url: str, model: str, until: float, counts: _Counts) -> None:
    """Ask one question after another."""
    place = urlsplit(url)
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
    content = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST {place.path}/completions HTTP/1.1\r\nhost: {place.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    while time.perf_counter() < until:
        last = time.perf_counter()
        writer.write(head.encode() + content)
        first = True
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if not line:
                raise ConnectionError("the server closed a stream")
            if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                raise ValueError(f"the server answered {line.decode()}")
            if line.startswith(b"data: "):
                now = time.perf_counter()
                event = json.loads(line[6:])
                if event.get("usage") is not None:
                    counts.answered.append(event["usage"]["completion_tokens"])
                elif event["choices"][0]["text"]:
                    (counts.firsts if first else counts.gaps).append(now - last)
                    counts.events.append(now)
                    last, first = now, False
        while await reader.readline() != b"0\r\n":  # the last chunk
            pass
        await reader.readline()
    writer.close()


async def asked(url: str, model: str, streams: int, seconds: float) -> Seen:
    """Run so many clients for some seconds."""
    counts = _Counts()
    start = time.perf_counter()
    until = start + seconds
    await asyncio.gather(*[_stream(url, model, until, counts) for _ in range(streams)])
    within = [event for event in counts.events if event < until]  # then fewer streams go on
    tokens = sum(counts.answered) / len(counts.events)  # for each event
    rate = tokens * len(within) / (max(within) - start)
    cuts = statistics.quantiles(counts.gaps, n=100)
    mean, first = statistics.mean(counts.answered), statistics.median(counts.firsts)
    return Seen(rate, mean, cuts[49], cuts[94], cuts[98], first)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the built-in ensemble with a ledger in this folder; yield the address."""
    with tempfile.TemporaryDirectory() as trained, socket.socket() as free:
        ensemble = train_demo(Path(trained, MODEL))
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "adapmixed", "serve", "--base", str(demo_base())]
        command += ["--ensemble", str(ensemble), "--ledger", str(folder / "ledger.db")]
        command += ["--mechanism", MECHANISM, "--allow-weak", "--memory", "4G", "--port", str(port)]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            while server.poll() is None:
                try:
                    urllib.request.urlopen(f"{url}/health").close()
                    break
                except OSError:
                    time.sleep(0.1)
            if server.poll() is not None:
                raise SystemExit(f"the server ended with status {server.returncode}")
            yield f"{url}/v1"
        finally:
            server.terminate()
            server.wait()


def measure(report: Report, url: str, model: str, seconds: float) -> None:
    """Measure every number of streams."""
    for streams in STREAMS:
        asyncio.run(asked(url, model, streams, min(seconds, 3.0)))  # warms up
        seen = asyncio.run(asked(url, model, streams, seconds))
        report.say(
            f"{streams:>3} streams: {seen.tokens_per_second:7.1f} tokens/s, "
            f"{seen.tokens_per_answer:.0f} tokens an answer\n    between tokens p50 "
            f"{1e3 * seen.p50:.1f}, p95 {1e3 * seen.p95:.1f}, p99 {1e3 * seen.p99:.1f} ms; first "
            f"token {1e3 * seen.first:.1f} ms"
        )
        report.tables.setdefault("streams", []).append({"streams": streams, **asdict(seen)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a second for each run")
    parser.add_argument("--url", help="of a running server, up to /v1")
    parser.add_argument("--model", default=MODEL, help="its model (default: demo)")
    parser.add_argument("--folder", type=Path, help="where the ledger is written")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    arguments = parser.parse_args()
    seconds = 1.0 if arguments.quick else SECONDS
    report, neighbours, about = Report(), Neighbours(), machine()
    report.say(headline(about))
    report.say(f"at most {TOKENS} tokens an answer, {seconds:g} s a run")
    if arguments.url:
        measure(report, arguments.url, arguments.model, seconds)
    else:
        report.say("the built-in ensemble, 64 members of the output layer, a ledger on a disk")
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            with served(Path(folder)) as url:
                measure(report, url, MODEL, seconds)
            about["others"] = report.others(neighbours)
    if arguments.out is not None:
        report.write(arguments.out, machine=about, seconds=seconds)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
