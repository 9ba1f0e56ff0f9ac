"""What can be checked without vLLM: the members, the mechanism, the ledger, the options."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_cases import BASE, POOL, write_ensemble

from adapmixed import cli
from adapmixed.mechanisms import ClippedLogPool, Origin
from adapmixed.privacy import Accountant
from adapmixed.vllm.arguments import check_arguments
from adapmixed.vllm.heads import check_heads, load
from adapmixed.vllm.options import GATE, KEY, Options, read_options

MECHANISM = "clipped-log-pool lower=-1 upper=1 scale=4 queries=1000"


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ensemble(tmp_path_factory.mktemp("ensembles") / "heads", 3)


def config(ensemble: Path, ledger: Path, *others: str, mechanism: str = MECHANISM) -> list[str]:
    paths = ["--base", str(BASE), "--ensemble", str(ensemble), "--ledger", str(ledger)]
    return ["vllm-config", *paths, "--mechanism", mechanism, "--allow-weak", *others]


def test_the_command_holds_every_option(
    ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(config(ensemble, tmp_path / "ledger", "--block", "8")) == 0
    command = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
    assert command[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    given = dict(zip(command[3:-3:2], command[4:-3:2], strict=True))
    assert given["--host"] == "127.0.0.1" and given["--generation-config"] == "vllm"
    assert command[-1] == "--disable-uvicorn-access-log"
    options = read_options(json.loads(given["--additional-config"]))
    assert options.mechanism == ClippedLogPool(-1.0, 1.0, 4.0, 1000)
    assert (options.block, options.gate) == (8, True)
    assert not (tmp_path / "ledger").exists()


def test_a_weak_guarantee_must_be_allowed(
    ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = config(ensemble, tmp_path / "ledger")
    arguments.remove("--allow-weak")
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == "" and "--allow-weak must be given" in told.err
    strong = MECHANISM.replace("scale=4", "scale=0.05")
    assert cli.main([*arguments[:-1], strong]) == 0
    assert "a guarantee fixed in advance that may be published" in capsys.readouterr().err


@pytest.mark.parametrize(
    "others,mechanism,message",
    [
        ((), "clipped-log-pool lower=-1 upper=1", "must have queries="),
        ((), "adapmixed", "must have queries="),
        ((), "clipped-mixing lower=0.5 upper=2 queries=9", "must be clipped-log-pool inside vLLM"),
        ((), f"{MECHANISM} public_confidence=0.5", "public_confidence must be None"),
        (("--epsilon", "4"), MECHANISM, "--epsilon cannot be used inside vLLM"),
        (("--host", "0.0.0.0"), MECHANISM, "--host 0.0.0.0 needs --keys"),
        (("--max-tokens", "0"), MECHANISM, "tokens must be an integer >= 1"),
    ],
)
def test_what_cannot_be_served(
    ensemble: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    others: tuple[str, ...],
    mechanism: str,
    message: str,
) -> None:
    ledger = tmp_path / "ledger"
    assert cli.main(config(ensemble, ledger, *others, mechanism=mechanism)) == 2
    told = capsys.readouterr().err
    assert re.search(message, told), told
    assert not ledger.exists()


def test_a_ledger_must_fit(
    ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger"
    with Accountant(1e-5, path=path) as accountant:
        accountant.charge_ahead(POOL, 3, 1, Origin("ab" * 32))
    assert cli.main(config(ensemble, path)) == 2
    assert "must be charged for what it is bound to" in capsys.readouterr().err
    assert cli.main(config(ensemble, path, "--delta", "1e-6")) == 2
    assert "--ledger must have been made with" in capsys.readouterr().err
    assert cli.main(config(ensemble, tmp_path / "missing" / "ledger")) == 2
    assert "--ledger must lie in a folder" in capsys.readouterr().err


@pytest.mark.parametrize("spent", [1, 1000])
def test_caveats_of_the_ledger_are_named(
    ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spent: int
) -> None:
    path, loaded = tmp_path / "ledger", load(str(BASE), ensemble)
    mechanism = ClippedLogPool(-1.0, 1.0, 4.0, 1000)
    origin = Origin(loaded.origin.ensemble, ("positions",))
    with Accountant(1e-5, path=path) as accountant:
        accountant.charge_ahead(mechanism, loaded.num_models, spent, origin)
    before = path.read_bytes()
    assert cli.main(config(ensemble, path)) == 0
    told = capsys.readouterr().err
    assert "Up to 1000 answered queries are" in told and "assigned by positions" in told
    # Once the plan is spent, no answer can follow that the ensemble's own caveats are about.
    assert ("Disjointness of the shards was not verified" in told) == (spent == 1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("adapted", [{"lm_head": [8], "h.0": [8]}, {"h.0": [8]}, {}])
def test_members_must_adapt_the_output_layer_alone(adapted: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match="adapt the output layer lm_head alone inside vLLM"):
        check_heads(adapted, "lm_head")
    check_heads({"lm_head": [4, 8]}, "lm_head")


def test_rows_equal_our_own_engine(ensemble: Path) -> None:
    loaded = load(str(BASE), ensemble)
    heads = loaded.heads(torch.device("cpu"))
    own = loaded.reference()
    ids = torch.arange(40).view(2, 20)
    seen: list[Any] = []
    head = own._forward.model.lm_head
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    private, public = own.logits(ids)
    handle.remove()
    hidden = seen[0][:, -1]
    found, same, _ = heads.rows(hidden, public[:, -1])
    assert torch.equal(same, public[:, -1])
    assert float((found - private[:, :, -1]).abs().max()) <= 1e-5


SAFE: dict[str, Any] = {
    "enable_log_requests": False, "enable_log_outputs": False, "log_error_stack": False,
    "uvicorn_log_level": "info", "disable_uvicorn_access_log": True, "api_key": None,
    "enable_per_request_metrics": False, "middleware": [GATE], "uds": None, "host": "127.0.0.1",
    "ssl_certfile": None, "ssl_keyfile": None,
}  # fmt: skip
TLS = {"ssl_certfile": "c", "ssl_keyfile": "k"}


@pytest.mark.parametrize(
    "changes,given,named",
    [
        ({}, {}, None),
        ({"host": "::1"}, {}, None),
        ({"host": "0.0.0.0", **TLS}, {"keys": "/k"}, None),
        ({"host": None}, {"keys": "/k", "behind_proxy": True}, None),
        ({"host": "0.0.0.0"}, {}, "--host 0.0.0.0"),
        ({"host": None, **TLS}, {}, "--host 0.0.0.0"),
        ({"host": "10.0.0.1"}, {"keys": "/k"}, "--host 10.0.0.1"),
        ({"host": "0.0.0.0", "ssl_certfile": "c"}, {"keys": "/k"}, "--host 0.0.0.0"),
        ({"enable_log_requests": True}, {}, "--enable-log-requests"),
        ({"enable_log_outputs": True}, {}, "--enable-log-outputs"),
        ({"log_error_stack": True}, {}, "--log-error-stack"),
        ({"uvicorn_log_level": "trace"}, {}, "--uvicorn-log-level"),
        ({"disable_uvicorn_access_log": False}, {}, "--disable-uvicorn-access-log"),
        ({"enable_per_request_metrics": True}, {}, "--enable-per-request-metrics"),
        ({"api_key": ["x"]}, {}, "--api-key"),
        ({"middleware": [GATE, "other"]}, {}, "--middleware"),
        ({"middleware": []}, {}, "--middleware"),
        ({"uds": "/tmp/socket"}, {}, "--uds"),
    ],
)
def test_arguments_of_the_http_server(
    changes: dict[str, Any], given: dict[str, Any], named: str | None
) -> None:
    arguments = SimpleNamespace(**(SAFE | changes))
    whole = Options.of(POOL, ensemble="/e", ledger="/l", **given)
    if named is None:
        check_arguments(arguments, whole)
    else:
        with pytest.raises(ValueError, match=f"^{named} "):
            check_arguments(arguments, whole)


@pytest.mark.parametrize("name", ["VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "VLLM_API_KEY"])
def test_variables_of_the_http_server(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match=f"^{name} "):
        check_arguments(SimpleNamespace(**SAFE), Options.of(POOL, ensemble="/e", ledger="/l"))


def options(**changes: Any) -> dict[str, Any]:
    whole = Options.of(POOL, ensemble="/e", ledger="/l").written()
    return {KEY: whole[KEY] | changes}


@pytest.mark.parametrize(
    "given,message",
    [
        (None, "must hold 'adapmixed'"),
        ({KEY: {}}, "lacks options"),
        (options(unknown=1), "unknown"),
        (options(queries=None), "queries"),
        (options(ledger="relative"), "ledger"),
        (options(gate=1), "gate"),
        (options(block=0), "block"),
        (options(delta=2.0), "delta"),
    ],
)
def test_bad_options(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(given)
