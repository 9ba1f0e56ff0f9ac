"""``adapmixed serve``: what it refuses, a whole life, and what it says of its answers."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from serving_cases import ASK, IN_VLLM, asks
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import main
from adapmixed.commands import serve
from adapmixed.commands.options import mechanism_of
from adapmixed.commands.serve import promise, promised
from adapmixed.data import demo_base
from adapmixed.mechanisms import Mechanism, Origin, ShapedLogits
from adapmixed.privacy import Accountant, Guarantee, read_ledger
from adapmixed.rng import SecureRandom
from adapmixed.serving import app

MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
POOL = ["--mechanism", "clipped-log-pool lower=-0.5 upper=0.5 queries=500"]
WIDE = "clipped-log-pool lower=-0.25 upper=1 scale=2"


@pytest.mark.parametrize(
    "options,words",
    [
        (POOL, "--base must be given, or --demo"),
        ([*MODELS, *POOL], "--ledger must be given: a server without one forgets what was spent"),
        (MODELS, "--mechanism must be 'NAME KEY=VALUE ...'"),
        ([*MODELS, "--mechanism", "clipped-log-pool lower=-1 upper=1", "--ledger", "x"],
         "queries= in --mechanism clipped-log-pool, the number of tokens of all runs"),
        ([*MODELS, "--mechanism", "pmixed epsilon=3", "--ledger", "x"], "queries= in --mechanism"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 needs --keys, and --tls or --behind-proxy"),
        (["--host", "0.0.0.0", "--keys", "k"], "--host 0.0.0.0 needs --keys, and --tls or"),
        (["--behind-proxy"], "--behind-proxy needs --keys"),
        (["--tls", "x", "y"], "No such file"),
        (["--keys", "x"], "No such file or directory: 'x'"),
        (["--port", "70000"], "--port must be <= 65535"),
        (["--metrics-port", "-1"], "--metrics-port must be an integer >= 0"),
        ([*MODELS, *POOL, "--ledger", "no/folder"], "--ledger must name a file in an"),
        (["--max-tokens", "0"], "--max-tokens must be an integer >= 1"),
        (["--top-p", "0.5"], "unrecognized arguments: --top-p"),
        ([*MODELS, "--mechanism", WIDE, "--epsilon", "3", "--ledger", "x", "--when-spent",
          "public"], "--when-spent public needs queries= in --mechanism, got ClippedLogPool"),
        (["--demo", "x", "--ledger", "y"], "--ledger must not be given with --demo"),
        (["--demo", "x", "--plan", "y"], "--plan must not be given with --demo"),
        (["--demo", "x", "--device", "vllm"], "--device vllm needs vllm, which is not installed"),
    ],
)  # fmt: skip
def test_what_it_refuses(
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "find_spec", lambda name: None)  # as if not installed
    port = [] if "--port" in options else ["--port", "0"]
    try:
        assert main(["serve", *port, *options]) == 2
    except SystemExit as left:  # of argparse
        assert left.code == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # nothing was made


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_port_that_is_taken(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is found before models are loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [*MODELS, *POOL, "--ledger", "x", "--port", "0", option, port]
        assert main(["serve", *given]) == 2
    error = capsys.readouterr().err
    assert "in use" in error and "Loading" not in error


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "--demo"]) == 2
    assert (
        "adapmixed serve needs uvicorn: pip install 'adapmixed[serve]'" in capsys.readouterr().err
    )


def started(arguments: list[str], cwd: Path) -> tuple[subprocess.Popen[str], int]:
    """Start the command, and return its process and its port once it answers."""
    run = subprocess.Popen(
        [sys.executable, "-m", "adapmixed", "serve", "--port", "0", *arguments],
        cwd=cwd, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stderr is not None
    lines = []
    for line in run.stderr:
        lines.append(line)
        if line.startswith("Serving "):
            return run, urlsplit(line.split(" at ")[1].split(". ")[0]).port or 0
    raise AssertionError("".join(lines))


@pytest.mark.slow
@pytest.mark.usefixtures("demo_ensemble")
def test_the_line_is_about_the_whole_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over two runs. It had the ε of one answer beside the number of all."""
    monkeypatch.setattr(app.Listener, "run", lambda self, sockets: None)
    ledger = tmp_path / "ledger"
    common = [*MODELS, "--mechanism", f"{WIDE} queries=none", "--ledger", str(ledger)]
    assert main(["serve", "--port", "0", *common]) == 2 and not ledger.exists()
    assert "--allow-weak must be given" in capsys.readouterr().err
    for answered in (False, True):
        assert main(["serve", "--port", "0", "--allow-weak", *common]) == 0
        line = capsys.readouterr().err
        assert "ε of all answers has no limit and grows with every answer." in line
        guarantee = read_ledger(ledger).guarantee
        assert bool(guarantee.queries) == answered == (str(guarantee) in line)
        assert main(["generate", *common, "--prompt", "The", "--max-new-tokens", "5"]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("demo_ensemble")
@pytest.mark.parametrize("device", ["cpu", pytest.param("vllm", marks=IN_VLLM)])
def test_a_whole_life(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With keys and a share of the budget, over two runs on one ledger."""
    assert main(["keys", "add", str(tmp_path / "keys.json"), "alice", "--tokens", "50"]) == 0
    headers = {"Authorization": f"Bearer {capsys.readouterr().out.strip()}"}
    arguments = [*MODELS, *POOL, "--ledger", "ledger", "--keys", "keys.json", "--name", "demo"]
    arguments += ["--device", device]
    run, port = started(arguments, tmp_path)
    status, text = asks(port, ASK | {"max_tokens": 30}, **headers)
    used = json.loads(text)["usage"]["completion_tokens"]
    assert status == 200 and asks(port, ASK)[0] == 401
    run.send_signal(signal.SIGTERM)
    out, error = run.communicate(timeout=30)
    assert run.returncode == 0 and out == ""
    assert "Up to 500 answered queries are (ε, δ)-differentially private" in error
    assert read_ledger(tmp_path / "ledger").guarantee.queries == used
    run, port = started(arguments, tmp_path)
    status, text = asks(port, ASK | {"max_tokens": 51 - used}, **headers)
    assert status == 429 and f"{50 - used} tokens left" in text
    assert asks(port, ASK | {"max_tokens": 50 - used}, **headers)[0] == 200
    assert main(["keys", "remove", str(tmp_path / "keys.json"), "alice"]) == 0
    run.send_signal(signal.SIGHUP)  # it made a server read the file, and changes nothing now
    assert asks(port, ASK, **headers)[0] == 401
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=30)
    assert run.returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("demo_ensemble")
def test_the_demonstration(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    for name in ("ensemble", "ensemble.private"):
        (folder / name).symlink_to(DEMO_ENSEMBLE.with_name(name))
    run, port = started(["--demo"], tmp_path)
    status, text = asks(port, {"model": "adapmixed-demo", "prompt": "The try statement"})
    assert status == 200 and json.loads(text)["usage"]["prompt_tokens"] == 4
    run.send_signal(signal.SIGTERM)
    _, error = run.communicate(timeout=30)
    assert run.returncode == 0 and "with ε = 3 at δ = 1e-05" in error
    assert (folder / "serve.ledger").exists()


# What a server says of its answers: for every mechanism, with and without a ledger's charges.


MEMBERS, DELTA = 4, 1e-5
KNOWN, UNKNOWN = Origin("ab" * 32, ()), Origin("ab" * 32, ("base",))
GROWS = "has no limit and grows with every answer"
DISJOINT, BASE = "Disjointness of the shards was not verified", "The public model was not compared"
BOX = "clipped-mixing lower=0.8 upper=1.5"
CONFIDENCES = ("none", "0", "0.4", "1")


def made(text: str, epsilon: float | None = None) -> Mechanism:
    return mechanism_of(text, delta=DELTA, epsilon=epsilon, queries=1, way="zero_out")


def answer(
    accountant: Accountant, mechanism: Mechanism, queries: int, origin: Origin = KNOWN
) -> None:
    """Charge answers to rows of four tokens, whose likeliest public token has probability 0.7."""
    public = torch.tensor([0.7, 0.1, 0.1, 0.1]).log().expand(queries, 4).clone()
    private = public.expand(MEMBERS, queries, 4) + torch.randn(MEMBERS, queries, 4)
    rows = ShapedLogits(private, public, None, 4)
    accountant.charge(mechanism.propose_rows(rows, rng=SecureRandom(), origin=origin))


def gated(mechanism: Mechanism, epsilon: float | None = None) -> Guarantee:
    """Return the guarantee of all answers to come, as the gate sees it."""
    return promised(Accountant(DELTA, epsilon=epsilon), mechanism, MEMBERS, KNOWN)


PLAN, BUDGET = "Up to 50 answered queries", "All answers (7 so far)"
STATED: list[tuple[str, float | None, str, str]] = [
    # mechanism, epsilon of every shard, the kind of guarantee, words of the line
    ("adapmixed", None, "data-dependent, ex-post", "depends on the private data"),
    ("adapmixed screen=none", None, "data-dependent, ex-post", "depends on the private data"),
    ("pmixed epsilon=3 order=8 queries=50", None, "fixed", PLAN),
    ("public", None, "public", "the 7 answered queries"),
    ("unprotected", None, "none", "no privacy guarantee"),
    *(
        (f"{WIDE} queries=none public_confidence={text}", None, "fixed", GROWS)
        for text in CONFIDENCES
    ),
    *((f"{WIDE} queries=50 public_confidence={text}", None, "fixed", PLAN) for text in CONFIDENCES),
    *((f"{BOX} queries=50 public_confidence={text}", None, "fixed", PLAN) for text in CONFIDENCES),
    *((f"{WIDE} public_confidence={text}", 2.0, "fixed", BUDGET) for text in CONFIDENCES),
    *((f"{BOX} order=8 public_confidence={text}", 2.0, "fixed", BUDGET) for text in CONFIDENCES),
]


@pytest.mark.parametrize(("text", "epsilon", "kind", "words"), STATED)
def test_what_is_stated(text: str, epsilon: float | None, kind: str, words: str) -> None:
    """The guarantee that was fixed in advance is the gate's and the line's; others are allowed.

    Without a plan the line gave ε of one answer and the number of all.
    """
    accountant, grows = Accountant(DELTA, epsilon=epsilon), words == GROWS
    mechanism = made(text if epsilon is None else f"{text} queries=none", epsilon)
    guarantee = gated(mechanism, epsilon)
    assert guarantee.kind == kind and guarantee.limited != grows
    if kind in ("fixed", "public") and (guarantee.epsilon or 0.0) <= 10 and not grows:
        promise(accountant, mechanism, MEMBERS, KNOWN, allow_weak=False)
    else:
        refused = "^--allow-weak must be given to serve this mechanism" + f".*{GROWS}" * grows
        with pytest.raises(ValueError, match=refused):
            promise(accountant, mechanism, MEMBERS, KNOWN, allow_weak=False)
    if words == PLAN:
        plain = gated(made(text.split(" public_confidence")[0]))
        assert guarantee == plain and guarantee.budget == 50 and guarantee.epsilon
    if words == BUDGET:
        assert (guarantee.method, guarantee.epsilon) == ("per-shard budget", 2.0)
    if grows:
        empty = promise(accountant, mechanism, MEMBERS, UNKNOWN)
        assert GROWS in empty and "ε = " not in empty
        assert BASE in empty and "weak guarantee" in empty
    answer(accountant, mechanism, 7)
    line = promise(accountant, mechanism, MEMBERS, KNOWN)
    assert words in line and accountant.queries == 7  # the trial charged a copy
    if kind == "fixed" and not grows:
        assert line == str(accountant.guarantee())
    free = text.endswith(("=0", "=0.4"))
    assert ("not counting 7 from public values only" in line) == (free and words == PLAN)
    if grows:
        assert line.endswith(str(accountant.guarantee())) and "he 7 answered queries" in line
        used = "the 7 answered queries used public values only" in line
        assert used == free == (accountant.guarantee().kind == "public")
        assert BASE in promise(accountant, mechanism, MEMBERS, UNKNOWN)


@pytest.mark.parametrize(
    ("text", "epsilon"),
    [(f"{WIDE} queries=9", None), (f"{WIDE} queries=none", None),
     (f"{WIDE} queries=none", 2.0), ("adapmixed", None)],
)  # fmt: skip
def test_caveats_of_the_ledger_and_of_the_ensemble(text: str, epsilon: float | None) -> None:
    accountant, mechanism = Accountant(DELTA, epsilon=epsilon), made(text, epsilon)
    answer(accountant, mechanism, 2, Origin(KNOWN.ensemble, ("shards", "positions")))
    line = promise(accountant, mechanism, MEMBERS, UNKNOWN)
    assert DISJOINT in line and "named by positions" in line and BASE in line
    assert line.count(DISJOINT) == 1


def test_a_plan_that_is_spent() -> None:
    accountant, mechanism = Accountant(DELTA), made(f"{WIDE} queries=3")
    answer(accountant, mechanism, 3, UNKNOWN)
    assert promise(accountant, mechanism, MEMBERS, UNKNOWN) == str(accountant.guarantee())


@pytest.mark.parametrize("screen", ["noisy", "public"])
def test_the_gate_does_not_depend_on_chance(screen: str) -> None:
    """Noise decides which answers pass a screening, and the others are public."""
    mechanism = made(f"adapmixed screen={screen} threshold=0 sigma=5")
    kinds = {gated(mechanism).kind for _ in range(20)}
    assert kinds == {"data-dependent, ex-post"}
