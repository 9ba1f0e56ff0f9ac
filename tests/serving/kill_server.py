"""Kill a server under load at random moments: all that its clients got must have been charged.

    python tests/serving/kill_server.py --count 200            a stub engine
    python tests/serving/kill_server.py --count 10 --real      the built-in ensemble
    python tests/serving/kill_server.py --count 3 --vllm       inside vLLM

A child, forked from this warm process, serves on one ledger while clients stream answers from it
and count tokens. It is killed with SIGKILL after a random time: while it opens the ledger, starts,
answers, or charges. Then the ledger is verified, and the next child goes on with it. The tokens
that it holds, and those that the key has used, are never fewer than the clients have counted, and
never more than the plan. Once the plan is spent, clients get 429, and a new ledger is begun.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]

from processes import forked, status_of  # noqa: E402
from serving_cases import MODEL, listening  # noqa: E402
from stub_engine import END, ByteTokenizer, StubEngine  # noqa: E402

from adapmixed.ensemble import Ensemble  # noqa: E402
from adapmixed.mechanisms import ClippedLogPool  # noqa: E402
from adapmixed.privacy import Accountant, read_ledger  # noqa: E402
from adapmixed.serving.admission import Admission  # noqa: E402
from adapmixed.serving.app import Service, application  # noqa: E402
from adapmixed.serving.batch import BatchEngine  # noqa: E402
from adapmixed.serving.clients import Clients, Usage  # noqa: E402
from adapmixed.serving.fields import Defaults  # noqa: E402
from adapmixed.serving.keys import add_key, read_keys  # noqa: E402
from adapmixed.serving.metrics import Metrics  # noqa: E402
from adapmixed.serving.scheduler import Scheduler  # noqa: E402

STREAMS = 4
ROUNDS = 10  # kills of one ledger, unless its plan is spent before
PLAN = 400  # tokens of each ledger
NAME = "client"


@dataclass
class Kind:
    """An engine to kill.

    Attributes:
        mechanism: how it answers, with a plan for each ledger.
        make: returns the engine over an accountant, in the child.
        tokenizer: of its answers.
        end_tokens: tokens that end an answer.
        seconds: longest time from the start of the clients to the kill.
    """

    mechanism: ClippedLogPool
    make: Callable[[Accountant], Any]
    tokenizer: Any
    end_tokens: frozenset[int]
    seconds: float


def stub(tokens: int) -> Kind:
    """Return the stub engine, with a text whose every token is an event."""
    text = "abcdefghijklmnopqrstuvwxyz "
    mechanism = StubEngine(text, tokens).mechanism
    make = partial(StubEngine, text, tokens)
    return Kind(mechanism, make, ByteTokenizer(), frozenset({END}), 0.25)


def real(tokens: int, folder: Path) -> Kind:
    """Return the engine over the built-in ensemble, which is trained if it is not there."""
    from adapmixed.data import demo_base
    from adapmixed.training.demo import train_demo

    ensemble = Ensemble.from_pretrained(str(demo_base()), train_demo(folder))
    mechanism = ClippedLogPool(-0.25, 1.0, 2.0, queries=tokens)
    make = partial(BatchEngine, ensemble, mechanism)
    return Kind(mechanism, make, ensemble.tokenizer, ensemble.end_tokens, 1.0)


def in_vllm(tokens: int, folder: Path) -> Kind:
    """Return the engine over vLLM, which starts in every child, with random members."""
    from head_ensembles import BASE, write_ensemble

    members, mechanism = write_ensemble(folder), ClippedLogPool(-1.0, 1.0, 4.0, queries=tokens)
    ensemble = Ensemble.from_pretrained(str(BASE), members)

    def make(accountant: Accountant) -> Any:
        from adapmixed.vllm.engine import VllmEngine

        return VllmEngine(
            str(BASE), ensemble, mechanism, accountant, memory_bytes=1 << 28, enforce_eager=True
        )

    return Kind(mechanism, make, ensemble.tokenizer, ensemble.end_tokens, 1.0)


def serve(kind: Kind, ledger: Path, keys: Path, told: int) -> None:
    """Serve in this process until it is killed; write the port to `told` once it listens."""
    with Accountant(1e-5, path=ledger) as accountant:
        scheduler = Scheduler(kind.make(accountant), kind.tokenizer, kind.end_tokens)
        metrics = Metrics(lambda: scheduler.running, lambda: scheduler.waiting)
        clients = Clients(read_keys(keys), Usage(ledger))
        admission = Admission(accountant, kind.mechanism)
        parts = (scheduler, admission, kind.tokenizer, Defaults(MODEL), metrics, clients)
        with listening(application(Service(*parts))) as port:
            os.write(told, b"%d" % port)
            threading.Event().wait()


async def stream(port: int, key: str, seed: int, began: asyncio.Event) -> tuple[int, int]:
    """Ask again and again; return the counted tokens and the last status."""
    draw, counted, status = random.Random(seed), 0, 0
    with contextlib.suppress(OSError):
        while status in (0, 200, 503):
            if status == 503:  # others have reserved what is left
                await asyncio.sleep(0.02)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = {"model": MODEL, "prompt": "The", "stream": True}
            content = json.dumps(body | {"max_tokens": draw.randint(1, 40)}).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n"
                b"content-length: %d\r\n\r\n%b" % (key.encode(), len(content), content)
            )
            leaves = draw.choice((2, 5, 999))  # some clients leave early
            while (line := await reader.readline()) and line != b"data: [DONE]\n" and leaves:
                if line.startswith(b"HTTP/1.1"):
                    status = int(line.split()[1])
                elif line.startswith(b"data: {") and status == 200:
                    counted += bool(json.loads(line[6:])["choices"][0]["text"])
                    began.set()
                    leaves -= 1
                elif status not in (0, 200) and line.startswith(b"{"):
                    break
            writer.close()
            if not line:
                break
    return counted, status


async def load(
    port: int, key: str, kill: Callable[[], None], after: float, seed: int, late: bool
) -> Any:
    """Run the clients, and kill the server meanwhile; return what each client has seen.

    If it is late, the wait begins with an answer, so that a slow machine has some, too.
    """
    began = asyncio.Event()
    clients = [asyncio.create_task(stream(port, key, seed + i, began)) for i in range(STREAMS)]
    if late:
        answer = asyncio.create_task(began.wait())
        await asyncio.wait([answer, *clients], timeout=20.0, return_when=asyncio.FIRST_COMPLETED)
        answer.cancel()
    await asyncio.sleep(after)
    kill()
    return await asyncio.gather(*clients)


def port_of(told: int, seconds: float) -> int | None:
    """Return the port of the child once it listens, or None if it does not in time."""
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(os.read(told, 16)))
    reader.start()
    reader.join(seconds)
    return int(found[0]) if found and found[0] else None


@dataclass
class Total:
    """What was seen.

    Attributes:
        counted: tokens that clients have got.
        charged: tokens in the ledgers.
        spent: times that a plan was spent.
        starting: children that were killed before they listened.
    """

    counted: int = 0
    charged: int = 0
    spent: int = 0
    starting: int = 0


def trials(kind: Kind, count: int, folder: Path, seed: int) -> Total:
    """Kill `count` times.

    Raises:
        AssertionError: a client has got a token that was not charged, or a plan was overspent.
    """
    draw, total, number = random.Random(seed), Total(), 0
    while number < count:
        ledger, keys = folder / f"ledger-{number}.db", folder / f"keys-{number}.json"
        key = add_key(keys, NAME, tokens=10**9)
        counted, charged = 0, 0
        for _ in range(min(ROUNDS, count - number)):
            number += 1
            told, telling = os.pipe()
            child = forked(lambda there=telling: serve(kind, ledger, keys, there))  # noqa: B023
            os.close(telling)
            early = draw.random() < 0.2
            port = port_of(told, draw.uniform(0.0, 0.1) if early else 60.0)
            kill = lambda process=child: os.kill(process, signal.SIGKILL)  # noqa: E731
            seen: list[tuple[int, int]] = []
            if port is None:
                total.starting += 1
                kill()
            else:
                after, drawn = draw.uniform(0.0, kind.seconds), draw.randrange(1 << 30)
                seen = asyncio.run(load(port, key, kill, after, drawn, late=number % 2 == 0))
            assert status_of(child) == -signal.SIGKILL, "the server ended by itself"
            os.close(told)
            assert all(status in (0, 200, 503, 429) for _, status in seen), seen
            counted += sum(one for one, _ in seen)
            charged = check(kind, ledger, counted)
            if any(status == 429 for _, status in seen):
                total.spent += 1
                break
        total.counted += counted
        total.charged += charged
    return total


def check(kind: Kind, ledger: Path, counted: int) -> int:
    """Verify the ledger after a kill; return the tokens that it holds."""
    if not ledger.exists():
        assert counted == 0, f"{counted} tokens without a ledger"
        return 0
    charged = read_ledger(ledger).account.queries
    assert counted <= charged <= kind.mechanism.queries, f"charged {charged}, counted {counted}"
    usage = Usage(ledger)
    assert usage.used(NAME) >= counted, f"the key has used {usage.used(NAME)} of {counted}"
    usage.close()
    return charged


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="the built-in ensemble")
    parser.add_argument("--vllm", action="store_true", help="random members inside vLLM")
    parser.add_argument("--ensemble", type=Path, help="its folder (default: it is trained)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has no other threads
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trained = arguments.ensemble or Path(folder) / "ensemble"
        if arguments.vllm:
            kind = in_vllm(PLAN, Path(folder) / "heads")
        else:
            kind = real(PLAN, trained) if arguments.real else stub(PLAN)
        total = trials(kind, arguments.count, Path(folder), arguments.seed)
    print(
        f"{arguments.count} kills ({total.starting} before the server listened) in "
        f"{time.monotonic() - start:.0f} s: clients counted {total.counted} tokens, "
        f"{total.charged} were charged; {total.spent} plans were spent"
    )


if __name__ == "__main__":
    main()
