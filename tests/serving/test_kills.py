"""Kill a server under load at random moments: all that its clients got must have been charged.

A child, forked from this warm process, serves on one ledger while clients stream answers from it
and count tokens. It is killed with SIGKILL after a random time: while it opens the ledger, starts,
answers, or charges. Then the ledger is verified, and the next child goes on with it. The tokens
that it holds, and those that the key has used, are never fewer than the clients have counted, and
never more than the plan. Once the plan is spent, clients get 429, and a new ledger is begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from head_ensembles import BASE, write_ensemble
from processes import forked, status_of
from serving_cases import ENGINES, MODEL, answering, listening

from adapmixed.ensemble import Ensemble
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.serving.admission import Clients, add_key, read_keys, read_usage

STREAMS = 4
ROUNDS = 10  # kills of one ledger, unless its plan is spent before
PLAN = 400  # tokens of each ledger
POOL = ClippedLogPool(-1.0, 1.0, 4.0, queries=PLAN)
NAME = "client"
KILLS = {"adapmixed": 40, "vllm": 3}
SECONDS = {"adapmixed": 0.3, "vllm": 1.0}
"""Longest time from the start of the clients to the kill."""


def serve(name: str, ensemble: Ensemble, ledger: Path, keys: Path, told: int) -> None:
    """Serve in this process until it is killed; write the port to `told` once it listens."""
    with Accountant(1e-5, path=ledger) as accountant:
        clients = Clients(read_keys(keys), ledger)
        with answering(name, BASE, ensemble, POOL, accountant, clients=clients) as server:
            with listening(server.app) as port:
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


def check(ledger: Path, counted: int) -> None:
    """Verify the ledger after a kill."""
    if not ledger.exists():
        assert counted == 0, f"{counted} tokens without a ledger"
        return
    charged, used = read_ledger(ledger).account.queries, read_usage(ledger)
    assert counted <= charged <= PLAN and used.get(NAME, 0) >= counted


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_clients_never_get_more_than_was_charged(name: str, tmp_path: Path) -> None:
    ensemble = Ensemble.from_pretrained(str(BASE), write_ensemble(tmp_path / "heads", 8))
    draw, number, total = random.Random(0), 0, 0
    while number < KILLS[name]:
        ledger, keys = tmp_path / f"ledger-{number}.db", tmp_path / f"keys-{number}.json"
        key, counted = add_key(keys, NAME, tokens=10**9), 0
        for _ in range(min(ROUNDS, KILLS[name] - number)):
            number += 1
            told, telling = os.pipe()
            child = forked(lambda there=telling: serve(name, ensemble, ledger, keys, there))  # type: ignore[misc] # noqa: B023
            os.close(telling)
            early = draw.random() < 0.2
            port = port_of(told, draw.uniform(0.0, 0.1) if early else 60.0)
            kill = lambda process=child: os.kill(process, signal.SIGKILL)  # noqa: E731
            seen: list[tuple[int, int]] = []
            if port is None:
                kill()
            else:
                after, drawn = draw.uniform(0.0, SECONDS[name]), draw.randrange(1 << 30)
                seen = asyncio.run(load(port, key, kill, after, drawn, late=number % 2 == 0))
            assert status_of(child) == -signal.SIGKILL, "the server ended by itself"
            os.close(told)
            assert all(status in (0, 200, 503, 429) for _, status in seen), seen
            counted += sum(one for one, _ in seen)
            check(ledger, counted)
            if any(status == 429 for _, status in seen):
                break
        total += counted
    assert total
