"""Through HTTP, over our own engine and over vLLM: what is answered, refused, charged and told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from head_ensembles import write_base, write_ensemble
from serving_cases import CHATS, COMPLETIONS, ENGINES, MODEL, Served, answering, check_error
from transformers import AutoModelForCausalLM

from adapmixed.ensemble import Ensemble
from adapmixed.errors import LedgerWriteError
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy.ledger import entered, register_of

QUERIES = 600


@dataclass
class Server:
    """A server in this process, over the built-in base with random heads, and its ledger."""

    served: Served
    ledger: Path

    def settled(self) -> int:
        """Wait until nothing runs; return what was charged."""
        assert self.served.settled(20.0)
        return read_ledger(self.ledger, whole=False).account.planned

    def ask(self, path: str = COMPLETIONS, **fields: Any) -> Any:
        body = {"model": MODEL, **({"prompt": "The"} if path == COMPLETIONS else {}), **fields}
        return self.served.client().post(path, json=body)


@contextmanager
def running(name: str, folder: Path, queries: int, **settings: Any) -> Iterator[Server]:
    base = write_base(folder / "base")
    ensemble = Ensemble.from_pretrained(
        str(base), write_ensemble(folder / "ensemble", 8, base=base)
    )
    mechanism = ClippedLogPool(-1.0, 1.0, 4.0, queries=queries)
    with Accountant(1e-5, path=folder / "ledger") as accountant:
        given = {"max_tokens": 200} | settings
        with answering(name, base, ensemble, mechanism, accountant, **given) as served:
            yield Server(served, folder / "ledger")


@pytest.fixture(scope="module", params=ENGINES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running(request.param, tmp_path_factory.mktemp("engines"), QUERIES) as found:
        yield found


def used(reply: Any) -> int:
    """Return the number of tokens of an answer."""
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["completion_tokens"])


def test_completions(server: Server) -> None:
    before = server.settled()
    reply = server.ask(prompt=["A function", "The"], max_tokens=7)
    register = entered(register_of(server.ledger.parent / "ensemble"))
    assert read_ledger(server.ledger).identity in register  # or sums over ledgers would lack it
    assert 2 <= used(reply) <= 14  # an end token may be drawn
    assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in reply.json()["choices"])
    total = used(reply)
    neutral = {"n": 1, "top_p": 1, "presence_penalty": 0, "seed": None, "user": "x"}
    for fields in (
        {"temperature": 0.7, "top_k": 5, **neutral}, {"prompt": [5, 6, 7], "stop": ["e"]},
        {"top_k": 10**30}, {"temperature": 100}, {"temperature": 0.01},
    ):  # fmt: skip
        total += used(server.ask(max_tokens=3, **fields))
    chat = [{"role": "user", "content": "A function that returns"}]
    total += used(server.ask(CHATS, messages=chat, max_completion_tokens=5))
    assert server.settled() - before == total  # all that was released, and nothing else


def test_a_stop_token_ends_an_answer(server: Server) -> None:
    """With top_k = 1 the tokens are the likeliest public ones, so the stop surely comes."""
    base = AutoModelForCausalLM.from_pretrained(server.ledger.parent / "base")
    tokenizer = Ensemble.from_pretrained(
        str(server.ledger.parent / "base"), server.ledger.parent / "ensemble"
    ).tokenizer
    asked = {"prompt": "If the name", "top_k": 1, "max_tokens": 20}
    ids = tokenizer(asked["prompt"], return_tensors="pt")["input_ids"]
    *shown, end = base.generate(ids, do_sample=False, max_new_tokens=3)[0, ids.shape[1] :].tolist()
    assert end not in shown
    before = server.settled()
    reply = server.ask(stop_token_ids=[end], **asked)
    assert reply.json()["choices"][0]["text"] == tokenizer.decode(shown)
    assert reply.json()["choices"][0]["finish_reason"] == "stop" and used(reply) == 3
    streamed = server.ask(stop_token_ids=[end], stream=True, **asked).text
    *pieces, done, _ = (part.removeprefix("data: ") for part in streamed.split("\n\n"))
    texts = [json.loads(piece)["choices"][0]["text"] for piece in pieces]
    assert done == "[DONE]" and "".join(texts) == tokenizer.decode(shown)
    assert server.settled() - before == 6


def test_the_end_of_the_plan(server: Server) -> None:
    """The last test of this server. All prompts of a list are reserved together or not at all."""
    while (reply := server.ask(prompt=["The"] * 4, max_tokens=75)).status_code == 200:
        server.settled()
    assert check_error(reply.json(), 429)["code"] == "insufficient_quota"
    while (left := QUERIES - server.settled()) > 0:
        assert left < 300
        assert server.ask(max_tokens=min(left, 200)).status_code == 200
    for stream in (False, True):
        assert server.ask(max_tokens=1, stream=stream).status_code == 429
    assert server.settled() == QUERIES


@pytest.mark.parametrize("name", ENGINES)
def test_the_public_model_answers_beyond_the_plan(name: str, tmp_path: Path) -> None:
    with running(name, tmp_path, 5, then_public=True) as server:
        assert server.ask(max_tokens=9).json()["system_fingerprint"] == "public-model"
        while left := 5 - server.settled():
            assert "system_fingerprint" not in server.ask(max_tokens=left).json()
        assert server.ask(max_tokens=4).json()["system_fingerprint"] == "public-model"
        assert server.settled() == 5


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("fault", ["the disk is full", "a row is not answered"])
def test_a_step_draws_what_is_charged_and_nothing_else(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The charge is written before the draw. A step that fails gives nothing, and is the last."""
    done: list[str] = []
    commit, answered = Accountant._commit, PrivateGenerator.answer

    def committed(self: Accountant, *charge: Any) -> None:
        time.sleep(0.1)
        if "fails" in done:
            raise LedgerWriteError(fault)
        commit(self, *charge)
        done.append("charge")

    def drawn(self: PrivateGenerator, *row: Any, **shape: Any) -> Any:
        done.append("draw")
        return answered(self, *row, **shape)

    with running(name, tmp_path, 50) as server:
        monkeypatch.setattr(Accountant, "_commit", committed)
        monkeypatch.setattr(PrivateGenerator, "answer", drawn)
        count = used(server.ask(max_tokens=4))
        assert server.settled() == count and done == ["charge", "draw"] * count
        if fault == "the disk is full":
            done[:] = ["fails"]
        else:
            server.served.engine._drawing._allowance.add(1)
        reply = server.ask(max_tokens=4)
        assert check_error(reply.json(), reply.status_code)["code"] == "stopping"
        assert server.served.scheduler.failed
        assert done == ["fails"] or server.settled() == count + 1
        assert server.served.engine._drawing._allowance.left == (done != ["fails"])
