"""Time the server with the built-in ensemble: tokens a second, and the time between two tokens.

    python -m benchmarks.serving [--quick] [--folder DISK] [--out PREFIX]

1, 8 and 64 clients stream completions, one after the other, from a process of their own. The server
runs in this process. Its answers are compared with those of `PrivateGenerator` first. A client gets
an event for a token that adds text. The server's usage has the tokens without text, too. Reported
are:

- tokens a second while all streams go on, from the events and the usage. A ratio compares them with
  one batch of as many sequences, none of which ends early, without HTTP and without a ledger: the
  median of several runs before and after. Its answers are as long as those of the server on
  average;
- what the clients see between two events of one stream, in milliseconds (p50, p95, p99);
- where the engine's thread spends its time. The charge is written meanwhile by another thread, so
  only the wait for it counts. HTTP is the event loop's CPU time, beside the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from adapmixed.data.demo import demo_base
from adapmixed.ensemble import Decoder, Ensemble
from adapmixed.generation import PrivateGenerator
from adapmixed.generation.loop import Answerer
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom
from adapmixed.training.demo import train_demo
from benchmarks.harness import Neighbours, Report, headline, machine

STREAMS = (1, 8, 64)
SECONDS = 20.0
TOKENS = 128
PROMPT = "The try statement executes the first clause"
PLAN = 10**9  # queries: enough for every run
MODEL = "demo"
MEMORY = 4 << 30


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
        seconds: length of the run until its last answer has ended.
    """

    tokens_per_second: float
    tokens_per_answer: float
    p50: float
    p95: float
    p99: float
    first: float
    seconds: float


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


async def _stream(url: str, until: float, counts: _Counts) -> None:
    """Ask one question after another."""
    place = urlsplit(url)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
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
                found = json.loads(line[6:])
                if found["usage"] is not None:
                    counts.answered.append(found["usage"]["completion_tokens"])
                elif found["choices"][0]["text"]:
                    (counts.firsts if first else counts.gaps).append(now - last)
                    counts.events.append(now)
                    last, first = now, False
        while await reader.readline() != b"0\r\n":  # the last chunk
            pass
        await reader.readline()
    writer.close()


async def _client(url: str, streams: int, seconds: float) -> Seen:
    counts = _Counts()
    start = time.perf_counter()
    await asyncio.gather(*[_stream(url, start + seconds, counts) for _ in range(streams)])
    taken = time.perf_counter() - start
    within = [one for one in counts.events if one < start + seconds]  # then fewer streams go on
    tokens = sum(counts.answered) / len(counts.events)  # for each event
    rate = tokens * len(within) / (max(within) - start)
    mean = statistics.mean(counts.answered)
    cuts = statistics.quantiles(counts.gaps, n=100)
    return Seen(rate, mean, cuts[49], cuts[94], cuts[98], statistics.median(counts.firsts), taken)


class Times:
    """Seconds that were spent in some calls, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Time every call of a method from now on."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[label] += time.perf_counter() - start

        setattr(owner, name, timed)


@contextmanager
def served(ensemble: Ensemble, folder: Path, times: Times) -> Iterator[tuple[str, int]]:
    """Serve the ensemble; yield the address and the id of the event loop's thread."""
    from adapmixed.serving.admission import Admission
    from adapmixed.serving.app import Service, application
    from adapmixed.serving.batch import BatchEngine
    from adapmixed.serving.fields import Defaults
    from adapmixed.serving.listener import Listener, bound, configuration, url_of
    from adapmixed.serving.metrics import Metrics
    from adapmixed.serving.scheduler import Scheduler

    mechanism = ClippedLogPool(-0.25, 1.0, 2.0, queries=PLAN)
    with Accountant(1e-5, path=folder / "ledger.db") as accountant:
        times.wrap(accountant, "charge", "charge")
        engine = BatchEngine(ensemble, mechanism, accountant, memory_bytes=MEMORY)
        times.wrap(Decoder, "read", "prompts")
        times.wrap(engine, "_advance", "forward")
        times.wrap(engine, "_answered", "mechanism")
        times.wrap(engine, "step", "step")
        scheduler = Scheduler(engine, ensemble.tokenizer, ensemble.end_tokens)
        admission = Admission(accountant, mechanism)
        metrics = Metrics(lambda: scheduler.running, lambda: scheduler.waiting)
        service = Service(scheduler, admission, ensemble.tokenizer, Defaults(MODEL), metrics)
        listening = bound("127.0.0.1", 0)
        listener = Listener(configuration(application(service)), scheduler, 0.0)
        thread = threading.Thread(target=listener.run, kwargs={"sockets": [listening]})
        thread.start()
        while not listener.started:
            time.sleep(0.01)
        try:
            assert thread.ident is not None
            yield url_of(listening, tls=False), thread.ident
        finally:
            scheduler.stop(0.0)
            listener.should_exit = True
            thread.join()
            listening.close()


def asked(url: str, streams: int, seconds: float) -> Seen:
    """Run the clients in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.serving", "--client", url, str(streams)]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)], check=True, capture_output=True, text=True
    )
    return Seen(**json.loads(done.stdout))


def alone(ensemble: Ensemble, streams: int, tokens: int, seconds: float) -> list[float]:
    """Return the tokens a second of one batch that never shrinks, for each of several runs.

    Args:
        ensemble: the models.
        streams: number of sequences.
        tokens: number of tokens of each.
        seconds: how long to begin new runs.
    """
    mechanism = ClippedLogPool(-0.25, 1.0, 2.0, queries=PLAN)
    one = Answerer(ensemble, mechanism, Accountant(1e-5), SecureRandom(), memory_bytes=MEMORY)
    ids = torch.tensor([ensemble.tokenizer(PROMPT)["input_ids"]] * streams)
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while not rates or time.perf_counter() < until:
        start = time.perf_counter()
        count = sum(len(step) for step in one.stream(ids, max_new_tokens=tokens))
        rates.append(count / (time.perf_counter() - start))
    return rates


def check(ensemble: Ensemble, url: str) -> None:
    """Compare the likeliest public tokens, which no randomness changes, with a generator's."""
    import urllib.request

    mechanism = ClippedLogPool(-0.25, 1.0, 2.0, queries=PLAN)
    generator = PrivateGenerator(ensemble, mechanism, Accountant(1e-5))
    prompts = [PROMPT, "A list", "while"]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 32, "top_k": 1}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        found = [choice["text"] for choice in json.loads(response.read())["choices"]]
    expected = generator.generate(prompts, max_new_tokens=32, top_k=1)
    assert found == expected, (found, expected)


def main() -> None:
    """Run the benchmark, or its clients."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a second for each run")
    parser.add_argument("--folder", type=Path, help="where the ledger is written")
    parser.add_argument("--out", type=Path, metavar="PREFIX")
    parser.add_argument("--client", nargs=2, metavar=("URL", "STREAMS"), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        url, streams = arguments.client
        print(json.dumps(asdict(asyncio.run(_client(url, int(streams), arguments.seconds)))))
        return
    seconds = 1.0 if arguments.quick else arguments.seconds
    trained = tempfile.TemporaryDirectory()  # removed when the program ends
    ensemble = Ensemble.from_pretrained(str(demo_base()), train_demo(Path(trained.name, "demo")))
    report, neighbours, about = Report(), Neighbours(), machine()
    report.say(headline(about))
    report.say(
        f"N = {ensemble.num_models} members of the output layer, V = {ensemble.vocab_size}, "
        f"at most {TOKENS} tokens an answer, {seconds:g} s a run; ledger on a disk"
    )
    times = Times()
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        served(ensemble, Path(folder), times) as (url, loop),
    ):
        check(ensemble, url)
        clock = time.pthread_getcpuclockid(loop)
        for streams in STREAMS:
            length = round(asked(url, streams, min(seconds, 3.0)).tokens_per_answer)  # warms up
            rates = alone(ensemble, streams, length, seconds / 4)
            times.seconds.clear()
            cpu = time.clock_gettime(clock)
            seen = asked(url, streams, seconds)
            http = time.clock_gettime(clock) - cpu
            spent = dict(times.seconds)
            rates += alone(ensemble, streams, length, seconds / 4)
            row(report, streams, seen, rates, spent, http)
    about["others"] = report.others(neighbours)
    if arguments.out is not None:
        report.write(arguments.out, machine=about, seconds=seconds)


def row(
    report: Report,
    streams: int,
    seen: Seen,
    rates: list[float],
    spent: dict[str, float],
    http: float,
) -> None:
    """Print and keep the figures of one run."""
    wall = seen.seconds
    rate = statistics.median(rates)
    ratio = seen.tokens_per_second / rate
    waited = spent["step"] - spent["prompts"] - spent["forward"] - spent["mechanism"]
    parts = {
        "prompts": spent["prompts"],
        "forward": spent["forward"],
        "wait for the charge": waited,
        "mechanism": spent["mechanism"],
    }
    shares = {name: one / wall for name, one in parts.items()}
    shares["text, queue and idle"] = 1 - sum(shares.values())
    report.say(
        f"{streams:>3} streams: {seen.tokens_per_second:7.1f} tokens/s, {ratio:.2f} of one batch "
        f"without HTTP and ledger ({rate:.1f}, {min(rates):.1f} to {max(rates):.1f} in "
        f"{len(rates)} runs); {seen.tokens_per_answer:.0f} tokens an answer"
    )
    report.say(
        f"    between tokens p50 {1e3 * seen.p50:.1f}, p95 {1e3 * seen.p95:.1f}, p99 "
        f"{1e3 * seen.p99:.1f} ms; first token {1e3 * seen.first:.1f} ms"
    )
    listed = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    report.say(f"    engine: {listed}; HTTP beside it {http / wall:.0%} of a core")
    report.say(
        f"    charges took {spent['charge'] / wall:.0%} of the time, beside the forward pass"
    )
    kept = {"streams": streams, **asdict(seen), "batch_tokens_per_second": rates, "ratio": ratio}
    report.tables.setdefault("streams", []).append(
        {**kept, "shares": shares, "http_cpu": http / wall, "charge": spent["charge"] / wall}
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
