"""What commands share: --mechanism, progress, --device, --dtype; doctor; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mechanism_cases import MECHANISMS
from trained_demo import MODELS, copy_trained

from adapmixed.cli import main
from adapmixed.commands import options
from adapmixed.commands.options import kinds, mechanism_of
from adapmixed.data import demo_base, held_out_text
from adapmixed.ensemble import Ensemble
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, PMixED, PublicOnly
from adapmixed_ext import build_info
from adapmixed_lab.cli import main as laboratory

pytestmark = pytest.mark.usefixtures("demo_ensemble")

SHORT = ["--mechanism", "clipped-log-pool lower=-0.25 upper=0.5", "--seed", "1"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    loaded: dict[str, Any] = {}

    def load(base: str, folder: str, **settings: Any) -> None:
        loaded.update(settings)
        raise ValueError("loaded")

    monkeypatch.setattr(Ensemble, "from_pretrained", load)
    return loaded


@pytest.mark.parametrize("command", ["evaluate", "generate", "chat", "reproduce"])
def test_a_gpu_that_is_not_there_is_refused(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"evaluate": ["--text", __file__], "generate": ["--prompt", "a"], "chat": ["--plain"]}
    arguments, program = [command, "table2"], laboratory
    if command != "reproduce":
        arguments, program = [command, *MODELS, *SHORT, *text[command]], main
    arguments += ["--device", "cuda"]
    if not build_info()["cuda"]:
        assert program(arguments) == 2
        assert "--device cuda needs adapmixed_ext built with CUDA" in capsys.readouterr().err
    monkeypatch.setattr("adapmixed_ext.build_info", lambda: {"cuda": True})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert program(arguments) == 2
    assert "--device cuda needs GPU 0, but torch finds 0" in capsys.readouterr().err


@pytest.mark.parametrize("local", ["0", "3"])
def test_a_rank_takes_the_gpu_of_its_place(
    asked: dict[str, Any], local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(options, "check_device", lambda arguments: None)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", local)
    given = ["generate", *MODELS, *SHORT, "--prompt", "a", "--device=cuda", "--dtype=bfloat16"]
    assert main(given) == 2
    assert asked["device"] == f"cuda:{local}" and taken == [f"cuda:{local}"]
    assert asked["dtype"] == torch.bfloat16


def test_half_precision_answers(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", *MODELS, *SHORT, "--prompt", "The value", "--max-new-tokens", "2"]
    assert main([*given, "--dtype", "bfloat16", "--verbose"]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() and "torch.bfloat16 on cpu" in printed.err


@pytest.mark.slow
def test_reproduce_loads_where_it_is_told(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("adapmixed_lab.commands.reproduce.check_device", lambda arguments: None)
    copy_trained(tmp_path / "out")
    given = ["reproduce", "table2", "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert laboratory([*given, "--device", "cuda"]) == 2
    assert asked == {"dtype": torch.bfloat16, "device": "cuda"}


def test_the_time_left_is_that_of_the_work_since_a_resumption(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    update = options.progress_bar("token")
    update(900, 1000)  # read from a file
    clock[0] += 40
    update(920, 1000)
    assert "920/1000 [00:40<02:40" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--base", str(demo_base())]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"instruction_set", "cuda", "compiler"} <= facts["build"].keys()
    assert isinstance(facts["gpus"], list) and facts["torch"]
    assert facts["members_of_the_last_block_share"] == "the first 3 of 4 blocks"


# --mechanism, and the command that lists its names and keys.


def made(text: str, epsilon: float | None = None, way: str = "zero_out") -> Any:
    return mechanism_of(text, delta=1e-5, epsilon=epsilon, queries=100, way=way)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("public", PublicOnly()),
        ("adapmixed", AdaPMixED(18.0, 0.2)),
        ("adapmixed screen=none loss_orders=2,18", AdaPMixED(18.0, 0.2, None, loss_orders=(2, 18))),
        ("adapmixed threshold=inf adjacency=add_remove",
         AdaPMixED(18.0, 0.2, threshold=float("inf"), adjacency="add_remove")),
        ("adapmixed preset=pubmed", AdaPMixED.preset("pubmed")),
        ("adapmixed preset=pubmed sigma=0.5 screen_top_k=7",
         AdaPMixED(15.0, 0.3, sigma=0.5, screen_weight=1e-3, screen_top_k=7)),
        ("pmixed epsilon=8", PMixED(8.0, 1e-5, 100, 3.0)),
        ("clipped-mixing lower=0.5 upper=2", ClippedMixing(0.5, 2.0, 100)),
        ("clipped-log-pool lower=-0.5 upper=1 queries=none", ClippedLogPool(-0.5, 1.0)),
    ],
)  # fmt: skip
def test_a_text_describes_a_mechanism(text: str, expected: Any) -> None:
    assert made(text) == expected
    assert made(f"  {text.replace(' ', '   ')} ") == expected


def test_a_budget_of_every_shard_has_no_plan() -> None:
    assert made("clipped-mixing lower=0.5 upper=2", 3.0) == ClippedMixing(0.5, 2.0, order=8.0)
    assert made("clipped-mixing lower=0.5 upper=2 order=6", 3.0).order == 6.0
    assert made("clipped-log-pool lower=-0.5 upper=1", 3.0) == ClippedLogPool(-0.5, 1.0)
    with pytest.raises(ValueError, match="epsilon must be None for PMixED, got 3.0"):
        made("pmixed epsilon=8", 3.0)  # always planned


def test_the_mechanism_is_for_the_neighbours_that_are_asked_for() -> None:
    assert made("pmixed epsilon=8 order=18", way="replace_one").adjacency == "replace_one"
    with pytest.raises(ValueError, match="adjacency must be 'zero_out' for AdaPMixED"):
        made("adapmixed", way="replace_one")


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("adapmixed order=18 target_leakage=0.2", "adapmixed"),
        ("adapmixed loss_orders=2,18", "adapmixed loss_orders=2.0,18.0"),
        ("clipped-log-pool lower=-1 upper=1", "clipped-log-pool lower=-1.0 upper=1e0 scale=1"),
    ],
)
def test_one_setting_has_one_text(text: str, other: str) -> None:
    """Equal settings have one `repr`, to which accountants and ledgers are bound."""
    assert repr(made(text)) == repr(made(other))


KEYS = "keys are epsilon, queries, order"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"--mechanism must be 'NAME KEY=VALUE ...' .*, got ''"),
        ("adapmixed 'order=3", "--mechanism must be 'NAME KEY=VALUE ...'"),
        ("pate", r"--mechanism must be one of \('adapmixed', .*, got 'pate'"),
        ("pmixed 3", "--mechanism pmixed must have KEY=VALUE once for every key, got '3'"),
        ("pmixed epsilon=3 epsilon=4", "once for every key, got 'epsilon=4'"),
        ("pmixed --epsilon=3", f"--mechanism pmixed does not take --epsilon: {KEYS}"),
        ("pmixed epsilon=x", "--mechanism pmixed: epsilon must be a number, got 'x'"),
        ("pmixed epsilon=6 delta=1e-6", "does not take delta: use --delta"),
        ("pmixed epsilon=8 queries=2.5", "queries must be an integer, got '2.5'"),
        ("public x=1", "does not take x: keys are none"),
        ("clipped-mixing", "--mechanism clipped-mixing: missing 2 .* 'lower' and 'upper'"),
        ("adapmixed loss_orders=2,x", "must be a number, got 'x'"),
        ("adapmixed preset=bogus", "preset must be one of wikitext-103, .*, got 'bogus'"),
    ],
)
def test_mechanisms_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(text)


def test_mechanisms_lists_names_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mechanisms"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in listed] == list(kinds())
    for name in kinds():
        assert main(["mechanisms", name]) == 0
        first, *keys = capsys.readouterr().out.splitlines()
        assert first in listed
        # The listed value is the one that is used by default.
        pairs = dict(line.strip().split("=", 1) for line in keys)
        pairs.pop("queries", None)
        case = MECHANISMS.get(name)
        must = {key: f"{getattr(case, key)!r}" for key in pairs if pairs[key] == "..."}
        short = " ".join([name, *(f"{key}={value}" for key, value in must.items())])
        whole = " ".join([name, *(f"{key}={value}" for key, value in (pairs | must).items())])
        assert repr(made(whole)) == repr(made(short))


# What is refused before any work: one line names the option, and nothing is written.

CLIPPED = "clipped-log-pool lower=-0.5 upper=0.5"
POOL = ["--mechanism", CLIPPED]
ASKED = ["--epsilon=3", "--tokens=9"]
ANY = "for any number of tokens,"
HUB = "--corpus must be hub:NAME[:CONFIG][@REVISION], got "
GIVEN = {
    "generate": [*MODELS, "--prompt", "The"],
    "chat": [*MODELS, "--plain"],
    "compare": [*MODELS, "--prompt", "The"],
    "evaluate": [*MODELS, "--text", "text.txt"],
    "plan": [],
    "train": ["--base", ".", "--output", "out"],
}
"""What is given to each command before the options of a row, of which the last one counts."""

GENERATE: list[tuple[list[str], str]] = [
    (["--mechanism", "clipped-log-pool lower=1 upper=2"], "lower (a log-ratio) must be <= 0"),
    (["--mechanism", "adapmixed target_leakage=9"], f"target_leakage must be <= {600 / 17 / 18},"),
    (["--epsilon", "0", *POOL], "--epsilon must be > 0"),
    (["--epsilon", "2", "--mechanism", "adapmixed"], "None for AdaPMixED, got 2.0: its losses"),
    (["--epsilon", "2", "--mechanism", "pmixed epsilon=8"], "the same for every member"),
    (["--epsilon", "2", "--mechanism", f"{CLIPPED} queries=9"], "queries must be None if ev"),
    (["--adjacency=replace_one", "--mechanism", "adapmixed"], "be 'zero_out' for AdaPMixED"),
    (["--memory", "1K", *POOL], "--memory must be >= "),
    (["--stop", "", *POOL], "--stop must be a list of strings"),
    (["--max-new-tokens", "0", *POOL], "--max-new-tokens must be an integer >= 1"),
    (["--max-new-tokens", "99999", *POOL], "--max-new-tokens must be <= "),
    (["--temperature", "0", *POOL], "--temperature must be >= 0.01"),
    (["--top-k", "0", *POOL], "--top-k must be an integer >= 1"),
    (["--batch", "0", *POOL], "--batch must be an integer >= 1, got 0"),
    (["--prompts", "blank.txt", *POOL], "a prompt in every line, line 2 of blank.txt is blank"),
    (["--prompts", "utf16.txt", *POOL], "must be UTF-8 text (iconv -f UTF-16"),
    (["--seed", "4", "--ledger", "x", *POOL], "--seed cannot be used with --ledger, got 4"),
    (["--ensemble", ".", *POOL], "ensemble.json"),
]
LEDGERS: list[tuple[list[str], str]] = [
    (["--epsilon", "2", *POOL, "--ledger", "x", "--no-create"],
     "x must be an existing file"),
    (["--epsilon", "2", *POOL, "--no-create"], "--no-create needs --ledger"),
    # No mechanism is taken by default, above all not one whose ε must not be published.
    (["--ledger", "x"], "--mechanism must be 'NAME KEY=VALUE ...' ('adapmixed mechanisms' lists"),
    # A second run of the same command would be rejected.
    *((["--mechanism", text, "--ledger", "x"],
       f"--ledger needs --epsilon, {ANY} or queries= in --mechanism {text.split()[0]}")
      for text in (CLIPPED, "clipped-mixing lower=0.5 upper=2")),
    (["--mechanism", "pmixed epsilon=8", "--ledger", "x"],
     "--ledger needs queries= in --mechanism pmixed, the number of tokens of all runs"),
    (["--epsilon", "2", *POOL, "--ledger", "."], "--ledger must name a file in an existing folder"),
]  # fmt: skip
EVALUATE: list[tuple[list[str], str]] = [
    (["--result", "."], "--result must name a file in an existing folder"),
    (["--base", "./no-base", "--json", "none/out.json"], "--json must name a file in an exist"),
    (["--base", "./no-base", "--json", "/dev/null"], "--json must name a file in an exist"),
    (["--base", "./no-base"], "no-base"),
    (["--text", "none.txt"], "--text must name a file of text or a folder of *.txt files, got"),
    (["--epsilon=2"], "--epsilon must be None for AdaPMixED, got 2.0: its losses depend"),
    (["--mechanism", "adapmixed"] * 2, "must not be repeated, got 'adapmixed' twice"),
    ([*POOL, f"--mechanism={CLIPPED.replace(' ', '  ')}"], f"got '{CLIPPED}' twice"),
    (["--queries", "0"], "--queries must be"),
    (["--block", "100000"], "--block must be <="),
    (["--mechanism", "pmixed epsilon=7 queries=10", "--queries", "30"],
     "up to 30 more with 10 left: ask for fewer (evaluate: --queries"),
]  # fmt: skip
PLAN: list[tuple[list[str], str]] = [
    (["--epsilon=1", "--models=2"], "--epsilon and --tokens must be given"),
    (["--epsilon=-1", "--models=3", "--tokens=9"], "epsilon must be > 0, got -1.0"),
    ([*ASKED, "--models=3", "--save=x"], "--save needs --ensemble"),
    ([*ASKED, "--ensemble=none"], "none does not"),
    ([*ASKED, "--ensemble=none", "--models=3"], "--models must not be given with --ensemble"),
    ([*ASKED, "--all"], "--all needs --ensemble or --models"),
    ([*ASKED, "--models=3", "--save=no/folder"], "--save must name a file in an existing fold"),
]
TRAIN: list[tuple[list[str], str]] = [
    (["--corpus", "nowhere"], "--corpus must be a file, a folder"),
    (["--corpus", "builtin", "--id-column", "user"], "--id-column applies to rows"),
    (["--corpus", "builtin"], "Unrecognized model"),
    (["--corpus", "builtin", "--training", "validation_fraction=x"],
     "--training: validation_fraction must be a number, got 'x'"),
    *((["--corpus", name], f"{HUB}'{name}'") for name in ("hub:", "hub:a:", "hub:a:b:c", "hub:a@")),
]  # fmt: skip
OTHERS = [
    ("chat", ["--mechanism", "public", "--turns", "0"], "--turns must be"),
    ("compare", [], "--mechanism must be 'NAME KEY=VALUE ...'"),
]
TABLE = [
    *(("generate", *row) for row in [*GENERATE, *LEDGERS]),
    *(("chat", *row) for row in LEDGERS),
    *(("evaluate", *row) for row in EVALUATE),
    *(("plan", *row) for row in PLAN),
    *(("train", *row) for row in TRAIN),
    *OTHERS,
]


@pytest.mark.parametrize(("command", "options", "words"), TABLE)
def test_what_commands_refuse(
    command: str,
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n\n".join(held_out_text()[:6]), encoding="utf-8")
    Path("blank.txt").write_text("The value\n \nIf the name\n", encoding="utf-8")
    Path("utf16.txt").write_text("a prompt", encoding="utf-16")
    before = sorted(tmp_path.iterdir())
    assert main([command, *GIVEN[command], *options]) == 2
    output = capsys.readouterr()
    assert output.out == "" and words in output.err
    assert output.err.startswith(f"adapmixed {command}: ")
    assert len(output.err.strip().splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before
