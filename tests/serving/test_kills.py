"""Kill a server under load at random moments: all that its clients got must have been charged.

A child, forked from this warm process, serves on one ledger while clients stream answers from it
and count tokens. It is killed with SIGKILL after a random time: while it opens the ledger, starts,
answers, or charges. Then the ledger is verified, and the next child goes on with it. The tokens
that it holds, and those that the key has used, are never fewer than the clients have counted, and
never more than the plan. Once the plan is spent, clients get 429, and a new ledger is begun.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from head_ensembles import BASE, write_ensemble
from processes import forked, status_of
from serving_cases import ENGINES, MODEL, answering, listening, opened, usage

from adapmixed.ensemble import Ensemble
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.serving.admission import Clients, add_key

STREAMS = 4
ROUNDS = 10  # kills of one ledger, unless its plan is spent before
PLAN = 400  # tokens of each ledger
POOL = ClippedLogPool(-1.0, 1.0, 4.0, queries=PLAN)
NAME = "client"
KILLS = {"adapmixed": 40, "vllm": 3}
SECONDS = {"adapmixed": 0.3, "vllm": 1.0}
"""Longest time from the start of the clients to the kill."""
ASKED = {"model": MODEL, "prompt": "The", "stream": True}


def serve(name: str, ensemble: Ensemble, ledger: Path, keys: Path, told: int) -> None:
    """Serve in this process until it is killed; write the port to `told` once it listens."""
    with Accountant(1e-5, path=ledger) as accountant:
        clients = Clients(keys, ledger)
        with answering(name, BASE, ensemble, POOL, accountant, clients=clients) as server:
            with listening(server.app) as port:
                os.write(told, b"%d" % port)
                threading.Event().wait()


def stream(port: int, key: str, seed: int, began: threading.Event) -> tuple[int, int]:
    """Ask again and again; return the counted tokens and the last status."""
    draw, counted, status = random.Random(seed), 0, 0
    with contextlib.suppress(OSError, IndexError):  # the server is killed
        while status in (0, 200, 503):
            if status == 503:  # others have reserved what is left
                time.sleep(0.02)
            leaves = draw.choice((2, 5, 999))  # some clients leave early
            asked = ASKED | {"max_tokens": draw.randint(1, 40)}
            connection = opened(port, asked, authorization=f"Bearer {key}")
            with connection, connection.makefile("rb") as lines:
                status = int(lines.readline().split()[1])
                for line in lines if status == 200 else ():
                    if line.startswith(b"data: {"):
                        counted += bool(json.loads(line[6:])["choices"][0]["text"])
                        began.set()
                        leaves -= 1
                    if line == b"data: [DONE]\n" or not leaves:
                        break
    return counted, status


def port_of(told: int, seconds: float) -> int | None:
    """Return the port of the child once it listens, or None if it does not in time."""
    ports: list[bytes] = []
    reader = threading.Thread(target=lambda: ports.append(os.read(told, 16)))
    reader.start()
    reader.join(seconds)
    return int(ports[0]) if ports and ports[0] else None


def check(ledger: Path, counted: int) -> None:
    """Verify the ledger after a kill."""
    if not ledger.exists():
        assert counted == 0, f"{counted} tokens without a ledger"
        return
    charged, used = read_ledger(ledger).account.queries, usage(ledger)
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
            early, began = draw.random() < 0.2, threading.Event()
            port = port_of(told, draw.uniform(0.0, 0.1) if early else 60.0)
            with ThreadPoolExecutor(STREAMS) as pool:
                seeds = draw.sample(range(1 << 30), STREAMS if port else 0)
                clients = [pool.submit(stream, port or 0, key, seed, began) for seed in seeds]
                if clients and number % 2 == 0:  # so that a slow machine has some answers, too
                    began.wait(20.0)
                time.sleep(draw.uniform(0.0, SECONDS[name]) * bool(clients))
                os.kill(child, signal.SIGKILL)
                seen = [client.result() for client in clients]
            assert status_of(child) == -signal.SIGKILL, "the server ended by itself"
            os.close(told)
            assert all(status in (0, 200, 503, 429) for _, status in seen), seen
            counted += sum(count for count, _ in seen)
            check(ledger, counted)
            if any(status == 429 for _, status in seen):
                break
        total += counted
    assert total
