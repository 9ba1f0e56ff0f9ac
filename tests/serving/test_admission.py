"""Keys, shares and the plan: who is let in, what is reserved, and what a kill keeps."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from processes import ended, until
from serving_cases import (
    ASK,
    COMPLETIONS,
    a_client,
    check_error,
    clients_of,
    listening,
    opened,
    served,
    usage,
    used,
)
from stub_engine import StubEngine

from adapmixed.errors import LedgerCorruptError
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant, BoundedRangeAnswer, read_ledger
from adapmixed.rng import SecureRandom
from adapmixed.serving import admission
from adapmixed.serving.admission import Admission, Clients, Key, add_key, read_keys, remove_key
from adapmixed.serving.errors import RequestError

A, B = "0" * 64, "1" * 64


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_used_tokens_stay_with_the_ledger(tmp_path: Path) -> None:
    """While it is charged, too. Under a second name a key does not get its share again."""
    file, ledger, link = (tmp_path / name for name in ("keys.json", "real.db", "current.db"))
    link.symlink_to(ledger.name)
    add_key(file, "alice", tokens=9)
    (alice,) = read_keys(file)
    for path, tokens in ((link, 4), (ledger, 8)):
        with Accountant(1e-5, path=ledger) as accountant:
            clients = Clients(file, path)
            clients.admit(alice, 4)
            accountant.add(BoundedRangeAnswer(1.0, -1.0, 1.0, 3, 1, 9))
            assert used(clients, alice) == tokens
            clients.close()
    assert {entry.name for entry in tmp_path.iterdir()} == {"keys.json", "real.db", "current.db"}
    assert read_ledger(ledger).guarantee.queries == 2
    assert usage(link) == usage(ledger) == {"alice": 8}


def test_the_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once it has changed: a new key is let in and a removed one is not; a bad file is none."""
    file = tmp_path / "keys.json"
    alice, bob = (bearer(add_key(file, name, requests_per_minute=2)) for name in ("alice", "bob"))
    with served(clients=clients_of(tmp_path)) as server:

        def status(headers: dict[str, str]) -> int:
            return server.client().post(COMPLETIONS, json=ASK, headers=headers).status_code

        assert status(alice) == status(bob) == 200
        remove_key(file, "alice")
        carol = bearer(add_key(file, "carol", tokens=9))
        assert status(alice) == 401 and status(carol) == 200
        assert [status(bob), status(bob)] == [200, 429]  # it kept its rate
        whole = file.read_text()
        file.write_text(whole[:-9])
        assert status(carol) == status(bob) == 429
        file.unlink()
        assert status(carol) == 429
        said = [record.getMessage() for record in caplog.records]
        assert [text[:19] for text in said] == ["the old keys stay: "] * 3 and str(file) in said[0]
        file.write_text(whole)
        for name in ("bob", "carol"):
            remove_key(file, name)
        with patch.object(admission, "read_keys", side_effect=OSError("too many open files")):
            assert status(carol) == 429
        assert status(carol) == 401


def _file(*keys: object) -> str:
    return json.dumps({"format_version": 1, "keys": keys})


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"format_version": 2, "keys": []}', '{"format_version": 1}',
        "[" * 100_000,
        '{"format_version": 1, "keys": 3}', _file(1), _file({"name": "a"}),
        _file({"name": "a", "sha256": "00"}), _file({"name": "a", "sha256": A, "tokens": 1.5}),
        _file({"name": "a", "sha256": A, "spare": 1}), _file({"name": "a b", "sha256": A}),
        _file({"name": "a", "sha256": A}, {"name": "a", "sha256": B}),
        _file({"name": "a", "sha256": A}, {"name": "b", "sha256": A}),
    ],
)  # fmt: skip
def test_files_that_hold_no_keys(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="keys.json must"):
        read_keys(file)
    with pytest.raises(ValueError, match="keys.json must"):
        add_key(file, "new")
    assert file.read_text() == content


def test_who_is_let_in(tmp_path: Path) -> None:
    clients, _, mine = a_client(tmp_path, max_tokens=4)
    secret, (key,) = mine["authorization"].split()[1], read_keys(tmp_path / "keys.json")
    with served(clients=clients) as server:
        client = server.client()
        wrong: list[Any] = [
            {}, bearer(""), bearer("x"), bearer(secret[:-1]), bearer(secret + "x"),
            {"authorization": secret}, {"authorization": f"Basic {secret}"}, bearer(secret.upper()),
            {"authorization": b"Bearer \xff\xfe"}, {"x-api-key": secret},
            bearer(key.sha256),
        ]  # fmt: skip
        for headers in wrong:
            for path in (COMPLETIONS, "/v1/models", "/nowhere"):
                answer = client.post(path, headers=headers, content=b"x" * (2 << 20))
                assert answer.status_code == 401
                assert check_error(answer.json(), 401)["code"] == "invalid_api_key"
        assert client.get("/health").is_success
        assert client.get("/v1/models", headers=bearer(secret)).is_success
        # A server with keys may have any name, so it does not look at the host.
        headers = bearer(secret) | {"host": "api.example", "origin": "https://app.example"}
        answer = client.post(COMPLETIONS, json=ASK | {"max_tokens": 4}, headers=headers)
        assert answer.is_success
        answer = client.post(COMPLETIONS, json=ASK, headers={"authorization": f"bearer  {secret} "})
        assert "max_tokens must be <= 4" in check_error(answer.json(), 400)["message"]
        del headers["origin"]
        body = {key: value for key, value in ASK.items() if key != "max_tokens"}
        usage = client.post(COMPLETIONS, json=body, headers=headers).json()["usage"]
        assert usage["completion_tokens"] == 4


def test_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, key = [100.0], Key("a", A, requests_per_minute=3)
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    clients = clients_of(tmp_path, key)
    for seconds, most, wait in ((0.0, 3, "20"), (20.01, 1, "20"), (1e6, 3, "20")):
        now[0] += seconds
        for _ in range(most):
            clients.check_rate(key)
        with pytest.raises(RequestError) as raised:
            clients.check_rate(key)
        assert raised.value.headers == {"retry-after": wait}


@pytest.mark.parametrize("share", [{"tokens": 40}, {}])
def test_a_share_of_the_budget(tmp_path: Path, share: dict[str, int]) -> None:
    """A key counts max_tokens of every prompt, and gets back what its answers did not use."""
    clients, alice, headers = a_client(tmp_path, **share)
    give_back = clients.give_back  # slow, so that the answer would come before it
    clients.give_back = lambda *of: (time.sleep(0.1), give_back(*of))[1]  # type: ignore[method-assign]
    with served(StubEngine("ab", ends=True), clients=clients) as server:
        client, two = server.client(headers=headers), ASK | {"prompt": ["a", "b"]}
        if share:
            answer = client.post(COMPLETIONS, json=two | {"max_tokens": 21})
            assert "40 tokens left" in check_error(answer.json(), 429)["message"]
        assert client.post(COMPLETIONS, json=two | {"max_tokens": 20}).is_success
        assert used(clients, alice) == 6  # three tokens each; the rest is free already
        if share:
            answer = client.post(COMPLETIONS, json=two | {"max_tokens": 20})
            assert "34 tokens left" in check_error(answer.json(), 429)["message"]
        assert server.admission.reserved == 0 and server.engine.clients == {"alice"}
    assert usage(tmp_path / "usage") == {"alice": 6}


def test_usage_after_a_kill(tmp_path: Path) -> None:
    """A killed process loses a key at most tokens of its own, at every step of an admission."""
    path, key = tmp_path / "usage", Key("a", A)
    clients_of(tmp_path, key).close()
    for amid, left in ((True, 5), (False, 17)):

        def work(amid: bool = amid) -> None:
            clients = Clients(tmp_path / "keys.json", path)
            clients.admit(key, 5)
            if amid:  # the statement, whatever is then in the journal
                clients._database.execute("BEGIN")
                clients._database.execute("UPDATE used SET tokens = 0")
            else:
                clients.admit(key, 9)
                clients.give_back("a", 2)
            os.kill(os.getpid(), signal.SIGKILL)

        assert ended(work) == -signal.SIGKILL
        assert usage(path) == {"a": left}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_damaged_ledger_counts_for_no_key(tmp_path: Path) -> None:
    key = Key("a", A, tokens=5)
    clients_of(tmp_path, key).close()
    (tmp_path / "usage").write_bytes(b"x" * 5000)
    with pytest.raises(LedgerCorruptError, match="usage"):
        Clients(tmp_path / "keys.json", tmp_path / "usage")


def test_usage_that_cannot_be_written(tmp_path: Path) -> None:
    """No answer starts, and the server ends."""
    clients, _, headers = a_client(tmp_path, tokens=40)
    with served(clients=clients) as server:
        client = server.client(headers=headers)
        clients._database.execute("PRAGMA query_only = ON")
        assert check_error(client.post(COMPLETIONS, json=ASK).json(), 503)
        clients._database.execute("PRAGMA query_only = OFF")
        assert client.post(COMPLETIONS, json=ASK).status_code == 503
        assert server.scheduler.failed
        assert server.engine.released == 0 and server.admission.reserved == 0


def test_threads_cannot_overspend(tmp_path: Path) -> None:
    key = Key("a", A, tokens=100)
    clients = clients_of(tmp_path, key)

    def granted(_: int) -> bool:
        try:
            clients.admit(key, 3)
        except RequestError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(granted, range(80))) == 33
    assert used(clients, key) == 99


def test_tokens_are_reserved_until_they_are_charged_or_given_back() -> None:
    """While two prompts of a list are answered, others get what is left, and no more."""
    engine, body = StubEngine(queries=1000), ASK | {"prompt": ["a", "b"], "stream": True}
    engine.go.clear()
    with served(engine, max_tokens=1001) as server, listening(server.app) as port:
        admission, client = server.admission, server.client()

        def asked(tokens: int) -> tuple[int, str]:
            answer = client.post(COMPLETIONS, json=ASK | {"max_tokens": tokens})
            return answer.status_code, answer.json()["error"]["code"]

        with opened(port, body | {"max_tokens": 400}):
            until(lambda: server.scheduler.running == 2)
            assert (admission.reserved, admission.left) == (800, 200)
            with pytest.raises(RequestError, match="reserved what is left"):
                admission.reserve(201)
            assert asked(201) == (503, "reserved") and asked(1001) == (429, "insufficient_quota")
            admission.reserve(200)
            admission.free(200, "")
            engine.go.set()
            until(lambda: engine.released >= 10)
            engine.go.clear()
            until(lambda: admission.reserved == 800 - engine.released)
            assert admission.left == 200
            with pytest.raises(RequestError, match="reserved what is left"):
                admission.reserve(201)
        engine.go.set()
        assert server.settled() and not engine._running
        assert admission.left == admission.unspent == 1000 - engine.accountant.queries > 200


def test_free_answers_are_not_spent_while_others_run() -> None:
    """Of 23 answers beside one that goes on, none finds its plan spent: all are public."""
    mechanism = ClippedLogPool(-0.5, 0.5, queries=100, public_confidence=0.5)
    accountant, public = Accountant(1e-5), torch.tensor([[5.0, 0.0, 0.0, 0.0]])
    accountant.bind(mechanism, 3)
    admission = Admission(accountant, mechanism)

    def token() -> None:
        ticket = mechanism.propose(public.repeat(3, 1, 1), public, rng=SecureRandom())
        accountant.charge(ticket)
        ticket.release()
        admission.charged()

    admission.reserve(40)
    for _ in range(23):
        token()
        admission.reserve(10)
        for _ in range(10):
            token()
    admission.reserve(0)
    assert accountant.planned == 0 and admission.left == 100 - 17


@pytest.mark.parametrize("then_public", [False, True])
def test_what_a_spent_plan_answers(then_public: bool, tmp_path: Path) -> None:
    """The public model costs neither plan nor key, and says so in the body, also of a stream."""
    clients, alice, headers = a_client(tmp_path, tokens=10)
    engine, told = StubEngine(queries=10), []
    with served(engine, clients=clients, then_public=then_public) as server:
        client = server.client(headers=headers)
        for tokens, stream in ((6, False), (6, False), (6, True), (4, False), (6, False)):
            asked = ASK | {"max_tokens": tokens, "stream": stream}
            answer = client.post(COMPLETIONS, json=asked)
            public = answer.text.count('"system_fingerprint":"public-model"')
            told.append((answer.status_code, public, answer.text.count('"length"')))
            assert server.settled()
            told.append(client.get("/health").json())
    health: list[Any] = []
    for who, left in [("ensemble", 4)] * 3 + [("public model", 0)] * 2:
        more = {"answers": who, "plan_tokens_left": left} if then_public else {}
        health.append({"status": "ok"} | more)
    assert told[1::2] == health
    private, whole, stream = (200, 0, 1), (200, 1, 1), (200, 4, 1)  # 6 bytes, 4 letters
    refused = (429, 0, 0)
    spent = [whole, stream, private, whole] if then_public else [refused, refused, private, refused]
    assert told[::2] == [private, *spent]
    assert used(clients, alice) == engine.accountant.planned == 10
